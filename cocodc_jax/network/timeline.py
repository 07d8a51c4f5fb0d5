"""The timeline of a run: clocks, stalls, bytes, and every sync.

A simulator's timeline holds simulated seconds. A measured one (`experiments.timeline`)
has the same form, so that the two can be compared.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True)
class SyncRecord:
    """One sync: times in simulated seconds, steps as counts of steps done.

    Attributes:
      fragments: ids of the fragments sent.
      start_step: inner steps done when it was staged.
      merge_step: inner steps done when it was merged.
      start_s: when its first byte could leave (the slowest region was ready).
      arrival_s: when all of it had arrived.
      merge_s: when the region that waited longest merged it; the last of several such.
      stalls_s: time each region waited for it.
      bytes_sent: bytes each region sent for it.
    """

    fragments: tuple[int, ...]
    start_step: int
    merge_step: int
    start_s: float
    arrival_s: float
    merge_s: float
    stalls_s: tuple[float, ...]
    bytes_sent: tuple[float, ...]

    @property
    def stall_s(self) -> float:
        """Longest time a region waited for it."""
        return max(self.stalls_s)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The result of `simulate`.

    Attributes:
      regions: their names.
      syncs: merged syncs, in the order of their merges.
      num_steps: inner steps simulated.
      step_time_s: seconds of an inner step in each region.
      marks: (step, seconds in each region after waiting there), increasing in step.
      stall_s: seconds each region waited for the network.
      bytes_sent: bytes each region sent, of merged syncs and of those still under way.
    """

    regions: tuple[str, ...]
    syncs: tuple[SyncRecord, ...]
    num_steps: int
    step_time_s: tuple[float, ...]
    marks: tuple[tuple[int, tuple[float, ...]], ...]
    stall_s: tuple[float, ...]
    bytes_sent: tuple[float, ...]

    @property
    def sim_s(self) -> float:
        """Simulated seconds of the whole run, in the slowest region."""
        return max(self.marks[-1][1])

    def utilization(self, since_step: int = 0) -> float:
        """Share of time spent computing after `since_step`, mean over regions."""
        ends = self.times_s(self.num_steps)
        begins = self.times_s(since_step)
        busy = (self.num_steps - since_step) * np.asarray(self.step_time_s)
        return float(np.mean(busy / (ends - begins)))

    @property
    def exposed_s(self) -> float:
        """Seconds in which a message was under way and a region only waited for it.

        That is communication which no computation hides, of the region that waits
        longest for each sync. Waits for anything else (slower regions, the outer step)
        do not count.
        """
        flights = self.flights()
        total = 0.0
        counted_s = 0.0
        waits = [(sync.merge_s - sync.stall_s, sync.merge_s) for sync in self.syncs]
        for since, until in sorted(waits):
            until = min(until, self.sim_s)
            total += flights.covered_s(max(since, counted_s), until)
            counted_s = max(counted_s, until)
        return total

    def flights(self) -> Intervals:
        """Return the intervals in which messages were under way."""
        return Intervals((sync.start_s, sync.arrival_s) for sync in self.syncs)

    @property
    def exposed_share(self) -> float:
        """Mean share of a step's time that is exposed communication, see `exposed_s`.

        Source: the measure of overlap in TokenWeave and ACE, from memory.
        """
        return self.exposed_s / self.sim_s if self.sim_s else 0.0

    def times_s(self, step: int) -> np.ndarray:
        """Seconds at which each region had done (and merged at) `step`, [M]."""
        if not 0 <= step <= self.num_steps:
            raise ValueError(f"step={step} must be between 0 and {self.num_steps}")
        at, seconds = [mark for mark in self.marks if mark[0] <= step][-1]
        return np.asarray(seconds) + (step - at) * np.asarray(self.step_time_s)

    def waited_s(self) -> dict[int, np.ndarray]:
        """Return each region's waiting after each mark, by its step: 0 for others."""
        waited = collections.defaultdict(lambda: np.zeros(len(self.regions)))
        for sync in self.syncs:  # A mark is made before the waiting that follows it.
            waited[sync.merge_step] += sync.stalls_s
        return waited

    def stretches(self) -> list[tuple[int, np.ndarray]]:
        """Return seconds of a step between every two marks, without waits for syncs.

        Each is (step of the later mark, seconds of a step in each region `[M]`).
        """
        waited = self.waited_s()
        stretches = []
        for (step, begins), (later, ends) in itertools.pairwise(self.marks):
            took_s = np.subtract(ends, begins) - waited[step]
            stretches.append((later, np.maximum(took_s, 0) / (later - step)))
        return stretches

    def seconds_until(self, steps: float) -> float:
        """Return the seconds until the slowest region has done `steps`, [0, infinity).

        Beyond the simulated steps, the pace of the second half of the timeline
        continues, so simulate at least two full sync intervals.
        """
        num = self.num_steps
        if steps <= num:
            below = int(steps)
            begin = self.times_s(below).max()
            end = self.times_s(min(below + 1, num)).max()
            return float(begin + (steps - below) * (end - begin))
        end = self.times_s(num).max()
        half = self.times_s(num // 2).max()
        return float(end + (steps - num) * (end - half) / (num - num // 2))

    def summary(self) -> dict[str, float]:
        """Return the main numbers, of the worst region if regions differ.

        `slowdown` is against the same steps of the slowest region without a network.
        """
        delays = [sync.merge_step - sync.start_step for sync in self.syncs]
        flights = [sync.arrival_s - sync.start_s for sync in self.syncs]
        compute_s = self.num_steps * max(self.step_time_s)

        return {
            "steps": self.num_steps,
            "sim_s": self.sim_s,
            "sim_s_per_step": self.sim_s / self.num_steps,
            "sim_s_without_network": compute_s,
            "slowdown": self.sim_s / compute_s,
            "utilization": self.utilization(),
            "stall_s": max(self.stall_s),
            "exposed_share": self.exposed_share,
            "bytes_sent_per_region": max(self.bytes_sent),
            "syncs": len(self.syncs),
            "mean_sync_s": float(np.mean(flights)) if flights else 0.0,
            "mean_delay_steps": float(np.mean(delays)) if delays else 0.0,
            "max_delay_steps": max(delays, default=0),
        }


class Intervals:
    """Intervals of time, which may overlap, prepared for many queries."""

    def __init__(self, intervals: Iterable[tuple[float, float]]):
        self._sorted = sorted(intervals)
        self._begins = [since for since, _ in self._sorted]
        # The latest end among the intervals up to each one, after which all have ended.
        ends = (until for _, until in self._sorted)
        self._over = list(itertools.accumulate(ends, max))

    def covered_s(self, begin_s: float, end_s: float) -> float:
        """Return the seconds between two moments that any of them covers.

        >>> Intervals([(0.0, 2.0), (1.0, 3.0), (5.0, 9.0)]).covered_s(1.0, 6.0)
        3.0
        """
        first = bisect.bisect_right(self._over, begin_s)
        last = bisect.bisect_left(self._begins, end_s)
        total = 0.0
        for since, until in self._sorted[first:last]:
            since = max(begin_s, since)
            until = min(end_s, until)
            total += max(0.0, until - since)
            begin_s = max(begin_s, until)
        return total
