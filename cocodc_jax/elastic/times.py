"""Times that one region observes: how long messages take, and who is silent.

Clocks of regions differ. Let c be the sender's clock when a message leaves and t the
receiver's when it arrives. t - c contains the difference of the clocks. So the time of
a message is measured against the least t - c of the sender's heartbeats, which are a
few bytes, over the last minutes:

    seconds = (t - c of the message) - min (t - c of heartbeats)

This is the time beyond that of the fastest small message. Each region reports the times
of the messages that it received, so all know the matrix of pairs.

A region that is unusually silent is reported long before it counts as dead. Let g be
the longest time between two messages of a region in the last minutes, and s the median
time between two syncs. The region is silent if nothing arrives from it for

    max(4 beat_s, 3 g, 2.5 s)

So a silence is reported within five syncs, unless such gaps are usual for the region. A
silence does not count towards g, and nothing is reported if this process itself was
held up. The factors are ours.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Collection
from typing import NamedTuple

from cocodc_jax.elastic.messages import Life, Report, SyncId

# The history spans two of these; clocks drift apart by parts in ten thousand.
_BUCKET_S = 300.0
_REMEMBERED = 64  # Syncs.
_BEATS = 4
_GAPS = 3.0
_SYNCS = 2.5
# Messages and syncs before the first report.
_LEAST_HEARD = 20
_LEAST_SYNCS = 3


class _Recent:
    """The least or the greatest number of the last minutes."""

    def __init__(self, pick: Callable[[float, float], float], none: float):
        self._pick = pick
        self._none = none
        self._since = -math.inf
        self._before = none
        self._now = none

    def take(self, value: float, now: float) -> None:
        if now - self._since > _BUCKET_S:
            self._since = now
            self._before = self._now
            self._now = self._none
        self._now = self._pick(self._now, value)

    @property
    def value(self) -> float:
        return self._pick(self._before, self._now)


class Measured(NamedTuple):
    """One sync, from the reports of all regions."""

    sync: SyncId  # The fragment's id and the start step.
    # Rows of a matrix, M by M; the row is the sender. NaN was not measured. Infinity is
    # a message that reached other regions and not this one, or a pair of which one
    # region reported nothing and sent nothing.
    seconds: list[list[float]]
    step_s: list[float]  # Seconds of an inner step, by region; NaN was not measured.


class Times:
    """One region's measurements, and the reports of the others."""

    def __init__(self, region: int, num_regions: int, wait_s: float):
        # Seconds after a decision in which messages are waited for; reports of the
        # others may take twice as long.
        self.wait_s = wait_s
        self._region = region
        self._num = num_regions
        self._least: dict[Life, _Recent] = {}
        self._came: dict[SyncId, dict[int, float]] = {}
        self._decided: dict[SyncId, tuple[float, frozenset[int]]] = {}
        # Since when each sync is reported, and by whom.
        self._reports: dict[SyncId, tuple[float, dict[int, Report]]] = {}
        self._done: collections.deque[SyncId] = collections.deque(maxlen=_REMEMBERED)
        self.step_s = 0.0  # Of an inner step here, 0 if not measured.

    def sign(self, sender: Life, clock_s: float, now: float) -> None:
        """Record a heartbeat."""
        least = self._least.setdefault(sender, _Recent(min, math.inf))
        least.take(now - clock_s, now)

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
        reports = []
        for sync, (since, members) in list(self._decided.items()):
            came = self._came.get(sync, {})
            if not members <= came.keys() and now - since <= self.wait_s:
                continue

            del self._decided[sync]
            self._came.pop(sync, None)
            report = Report(sync, tuple(sorted(came.items())), self.step_s)
            self.learn(self._region, report, now)
            reports.append(report)
        return reports

    def learn(self, sender: int, report: Report, now: float) -> None:
        """Record a region's report."""
        if report.sync not in self._done:
            self._reports.setdefault(report.sync, (now, {}))[1][sender] = report

    def finished(self, regions: Collection[int], now: float) -> list[Measured]:
        """Return the syncs that all `regions` have reported, or that are old."""
        measured = []
        in_order = sorted(self._reports.items(), key=lambda entry: entry[0][1])
        for sync, (since, reports) in in_order:
            if set(regions) <= reports.keys() or now - since > 2 * self.wait_s:
                del self._reports[sync]
                self._done.append(sync)
                measured.append(self._matrix(sync, reports, regions))
        return measured

    def _matrix(
        self, sync: SyncId, reports: dict[int, Report], regions: Collection[int]
    ) -> Measured:
        seconds = [[math.nan] * self._num for _ in range(self._num)]
        step_s = [math.nan] * self._num

        sent = {r for report in reports.values() for r, _ in report.seconds}
        for receiver, report in reports.items():
            step_s[receiver] = report.step_s or math.nan
            came = dict(report.seconds)
            for sender in sent - {receiver}:
                seconds[sender][receiver] = came.get(sender, math.inf)

        for silent in set(regions) - reports.keys() - sent:
            for region in reports:
                seconds[silent][region] = math.inf
                seconds[region][silent] = math.inf
        return Measured(sync, seconds, step_s)


class Silence(NamedTuple):
    """How long a region is silent."""

    seconds: float  # Since its last message.
    usual: float  # The longest time between two of its messages before.


@dataclasses.dataclass
class _Heard:
    """The time of a region's last message, and the gaps between those before."""

    last: float
    count: int = 0
    gaps: _Recent = dataclasses.field(default_factory=lambda: _Recent(max, 0.0))


class Silences:
    """Times of the other regions' messages, as one region receives them."""

    def __init__(self, beat_s: float):
        self._beat_s = beat_s
        self._heard: dict[Life, _Heard] = {}
        self._between: collections.deque[float] = collections.deque(maxlen=9)
        self._decided_at: float | None = None
        self._looked_at: float | None = None

    def heard(self, sender: Life, now: float) -> None:
        """Record a message of a region."""
        heard = self._heard.setdefault(sender, _Heard(now))
        gap = now - heard.last
        heard.last = now
        if heard.count < _LEAST_HEARD or gap <= self._limit(heard):
            heard.count += 1
            heard.gaps.take(gap, now)

    def decided(self, now: float) -> None:
        """Record that a mean is decided."""
        if self._decided_at is not None:
            self._between.append(now - self._decided_at)
        self._decided_at = now

    @property
    def sync_s(self) -> float:
        """The median time between two syncs, 0 before it is known."""
        return statistics.median(self._between) if self._between else 0.0

    def overdue(self, lives: Collection[Life], now: float) -> dict[int, Silence]:
        """Return which of `lives` are silent; call it at least twice a heartbeat."""
        self._heard = {life: x for life, x in self._heard.items() if life in lives}
        before = self._looked_at
        self._looked_at = now

        if before is None or now - before > 2 * self._beat_s:
            for heard in self._heard.values():  # This process did not read messages.
                heard.last = now

        if len(self._between) < _LEAST_SYNCS:
            return {}
        return {
            life[0]: Silence(now - x.last, x.gaps.value)
            for life, x in self._heard.items()
            if x.count >= _LEAST_HEARD and now - x.last > self._limit(x)
        }

    def _limit(self, heard: _Heard) -> float:
        usual_s = max(_GAPS * heard.gaps.value, _SYNCS * self.sync_s)
        return max(_BEATS * self._beat_s, usual_s)
