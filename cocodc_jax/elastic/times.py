"""Measures how long messages take between pairs of regions.

Clocks of regions differ. Let c be the sender's clock when a message leaves and t the
receiver's when it arrives. t - c contains the difference of the clocks. So the time of
a message is measured against the least t - c of the sender's heartbeats, which are a
few bytes, over the last minutes:

    seconds = (t - c of the message) - min (t - c of heartbeats)

This is the time beyond that of the fastest small message. Each region reports the times
of the messages that it received, so all know the matrix of pairs.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Collection
from typing import NamedTuple

from cocodc_jax.elastic.messages import Life, Report, SyncId

# The history spans two of these; clocks drift apart by parts in ten thousand.
_BUCKET_S = 300.0
_REMEMBERED = 64  # Syncs.


class Measured(NamedTuple):
    """One sync, from the reports of all regions.

    Attributes:
      sync: the fragment's id and the start step.
      seconds: rows of a matrix, M by M; the row is the sender. NaN was not measured.
        Infinity is a message that reached other regions and not this one, or a pair of
        which one region reported nothing and sent nothing.
      step_s: seconds of an inner step, by region; NaN was not measured.
    """

    sync: SyncId
    seconds: list[list[float]]
    step_s: list[float]


class _Least:
    """The least of recent numbers."""

    def __init__(self):
        self._since, self._before, self._now = -math.inf, math.inf, math.inf

    def take(self, value: float, now: float) -> None:
        if now - self._since > _BUCKET_S:
            self._since, self._before, self._now = now, self._now, math.inf
        self._now = min(self._now, value)

    @property
    def value(self) -> float:
        return min(self._before, self._now)


class Times:
    """One region's measurements, and the reports of the others.

    Attributes:
      step_s: seconds of an inner step here, 0 if not measured.
      wait_s: seconds after a decision to wait for missing messages; reports of the
        others may take twice as long.
    """

    def __init__(self, region: int, num_regions: int, wait_s: float):
        """Start without measurements; `num_regions` is M."""
        self._region, self._num, self.wait_s = region, num_regions, wait_s
        self._least: dict[Life, _Least] = {}
        self._came: dict[SyncId, dict[int, float]] = {}
        self._decided: dict[SyncId, tuple[float, frozenset[int]]] = {}
        self._told: dict[SyncId, dict[int, Report]] = {}
        self._told_s: dict[SyncId, float] = {}
        self._done: collections.deque[SyncId] = collections.deque(maxlen=_REMEMBERED)
        self.step_s = 0.0

    def sign(self, sender: Life, clock_s: float, now: float) -> None:
        """Record a heartbeat."""
        self._least.setdefault(sender, _Least()).take(now - clock_s, now)

    def came(self, sender: Life, sync: SyncId, clock_s: float, now: float) -> None:
        """Record the arrival of a message; only the first one counts."""
        least = self._least.get(sender)
        if least is None or sync in self._done:
            return
        seconds = max(now - clock_s - least.value, 0.0)
        self._came.setdefault(sync, {}).setdefault(sender[0], seconds)
        while len(self._came) > _REMEMBERED:
            del self._came[next(iter(self._came))]

    def decided(self, sync: SyncId, members: Collection[int], now: float) -> None:
        """Record that a mean is decided, and of which regions' messages."""
        others = frozenset(members) - {self._region}
        self._decided.setdefault(sync, (now, others))

    def due(self, now: float) -> list[Report]:
        """Return the reports to send to all regions now."""
        found = []
        for sync, (since, members) in list(self._decided.items()):
            came = self._came.get(sync, {})
            if members <= came.keys() or now - since > self.wait_s:
                del self._decided[sync]
                self._came.pop(sync, None)
                report = Report(sync, tuple(sorted(came.items())), self.step_s)
                self.told(self._region, report, now)
                found.append(report)
        return found

    def told(self, sender: int, report: Report, now: float) -> None:
        """Record a region's report."""
        if report.sync in self._done:
            return
        self._told.setdefault(report.sync, {})[sender] = report
        self._told_s.setdefault(report.sync, now)

    def finished(self, regions: Collection[int], now: float) -> list[Measured]:
        """Return the syncs that all `regions` have reported, or that are old."""
        found = []
        for sync, told in sorted(self._told.items(), key=lambda each: each[0][1]):
            is_old = now - self._told_s[sync] > 2 * self.wait_s
            if set(regions) <= told.keys() or is_old:
                del self._told[sync], self._told_s[sync]
                self._done.append(sync)
                found.append(self._matrix(sync, told, regions))
        return found

    def _matrix(
        self, sync: SyncId, told: dict[int, Report], regions: Collection[int]
    ) -> Measured:
        seconds = [[math.nan] * self._num for _ in range(self._num)]
        sent = {r for report in told.values() for r, _ in report.seconds}
        for receiver, report in told.items():
            came = dict(report.seconds)
            for sender in sent - {receiver}:
                seconds[sender][receiver] = came.get(sender, math.inf)
        for silent in set(regions) - told.keys() - sent:
            for region in told:
                seconds[silent][region] = seconds[region][silent] = math.inf
        step_s = [math.nan] * self._num
        for region, report in told.items():
            step_s[region] = report.step_s or math.nan
        return Measured(sync, seconds, step_s)
