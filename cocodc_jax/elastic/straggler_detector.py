"""Reports a region that is unusually silent, long before it counts as dead.

Let g be the longest time between two messages of a region in the last minutes, and s
the median time between two syncs. The region is silent if nothing arrives from it for

    max(4 beat_s, 3 g, 2.5 s)

So a silence is reported within five syncs, unless such gaps are usual for the region. A
silence does not count towards g, and nothing is reported if this process itself was
held up. The factors are ours.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Collection
from typing import NamedTuple

from cocodc_jax.elastic.messages import Life

_BEATS, _GAPS, _SYNCS = 4, 3.0, 2.5
_LEAST_HEARD, _LEAST_SYNCS = 20, 3  # Messages and syncs before the first report.
_BUCKET_S = 300.0  # The history spans two of these.


class Silence(NamedTuple):
    """How long a region is silent.

    Attributes:
      seconds: since its last message.
      usual: the longest time between two of its messages before.
    """

    seconds: float
    usual: float


class _Heard:
    """The time of a region's last message, and the longest gaps before it."""

    def __init__(self, now: float):
        self.last, self.count, self._since = now, 0, now
        self._before, self._now = 0.0, 0.0

    def take(self, now: float, limit: float) -> None:
        gap, self.last = now - self.last, now
        if self.count >= _LEAST_HEARD and gap > limit:
            return
        self.count += 1
        if now - self._since > _BUCKET_S:
            self._since, self._before, self._now = now, self._now, 0.0
        self._now = max(self._now, gap)

    @property
    def longest(self) -> float:
        return max(self._before, self._now)


class Silences:
    """Times of the other regions' messages, as one region receives them."""

    def __init__(self, beat_s: float):
        """Start without messages; `beat_s` is the time between two heartbeats."""
        self._beat_s = beat_s
        self._heard: dict[Life, _Heard] = {}
        self._between: collections.deque[float] = collections.deque(maxlen=9)
        self._decided_at: float | None = None
        self._looked_at: float | None = None

    def heard(self, sender: Life, now: float) -> None:
        """Record a message of a region."""
        heard = self._heard.setdefault(sender, _Heard(now))
        heard.take(now, self._limit(heard))

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
        before, self._looked_at = self._looked_at, now
        if before is None or now - before > 2 * self._beat_s:
            for heard in self._heard.values():  # This process did not read messages.
                heard.last = now
        if len(self._between) < _LEAST_SYNCS:
            return {}
        return {
            life[0]: Silence(now - x.last, x.longest)
            for life, x in self._heard.items()
            if x.count >= _LEAST_HEARD and now - x.last > self._limit(x)
        }

    def _limit(self, heard: _Heard) -> float:
        heard_s = max(_BEATS * self._beat_s, _GAPS * heard.longest)
        return max(heard_s, _SYNCS * self.sync_s)
