"""What messages take between pairs of regions, measured as they come.

Regions' clocks differ. With c the sender's clock as a message leaves and t the
receiver's as it is there, t - c holds that difference; so what a message took is told
against the least t - c of the sender's signs of life, which are next to no bytes, over
the last minutes:

    seconds = (t - c of the message) - min (t - c of signs of life)

It is what a message takes beyond the shortest way of a few bytes. Each region tells all
of what came to it, and so everyone knows the matrix of pairs.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Collection
from typing import NamedTuple

from cocodc_jax.elastic.messages import Life, Report, SyncId

# Two of these are looked back on: clocks drift apart by parts in ten thousand.
_BUCKET_S = 300.0
_REMEMBERED = 64  # Syncs that were told of.


class Measured(NamedTuple):
    """One sync, as all regions have told.

    Attributes:
      sync: which.
      seconds: rows of a matrix, M by M; row sends. NaN was not measured, infinity is a
        message that came to others and not here, or of a region, and to one, from which
        nothing was heard.
      step_s: of an inner step, by region; NaN was not measured.
    """

    sync: SyncId
    seconds: list[list[float]]
    step_s: list[float]


class _Least:
    """The least of some numbers of late."""

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
    """What one region measures, and what others tell.

    Attributes:
      step_s: seconds of an inner step here, 0 for not measured.
      wait_s: after a decision, for messages that have not come; and for others to tell
        of theirs.
    """

    def __init__(self, region: int, num_regions: int, wait_s: float):
        """Know nothing.

        Args:
          region: which this is.
          num_regions: M.
          wait_s: until it is changed.
        """
        self._region, self._num, self.wait_s = region, num_regions, wait_s
        self._least: dict[Life, _Least] = {}
        self._came: dict[SyncId, dict[int, float]] = {}
        self._decided: dict[SyncId, tuple[float, frozenset[int]]] = {}
        self._told: dict[SyncId, dict[int, Report]] = {}
        self._told_s: dict[SyncId, float] = {}
        self._done: collections.deque[SyncId] = collections.deque(maxlen=_REMEMBERED)
        self.step_s = 0.0

    def sign(self, sender: Life, clock_s: float, now: float) -> None:
        """Take in a sign of life."""
        self._least.setdefault(sender, _Least()).take(now - clock_s, now)

    def came(self, sender: Life, sync: SyncId, clock_s: float, now: float) -> None:
        """Take in that a message is here; the first time counts."""
        least = self._least.get(sender)
        if least is None or sync in self._done:
            return
        seconds = max(now - clock_s - least.value, 0.0)
        self._came.setdefault(sync, {}).setdefault(sender[0], seconds)
        while len(self._came) > _REMEMBERED:
            del self._came[next(iter(self._came))]

    def decided(self, sync: SyncId, members: Collection[int], now: float) -> None:
        """Take in that a mean is decided, and of whose messages."""
        others = frozenset(members) - {self._region}
        self._decided.setdefault(sync, (now, others))

    def due(self, now: float) -> list[Report]:
        """Return what is to be told to all now."""
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
        """Take in what a region tells."""
        if report.sync in self._done:
            return
        self._told.setdefault(report.sync, {})[sender] = report
        self._told_s.setdefault(report.sync, now)

    def finished(self, regions: Collection[int], now: float) -> list[Measured]:
        """Return the syncs of which all regions have told, or that are long ago.

        Args:
          regions: that take part.
          now: seconds.
        """
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
