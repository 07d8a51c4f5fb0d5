"""Which regions are alive, from the messages of one region: no socket, no clock."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from cocodc_jax.elastic.messages import Beat, Join, Leave, Message


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long regions wait for one another.

    Attributes:
      beat_s: seconds between two heartbeats.
      dead_after_s: seconds of silence after which a region counts as dead.
      grace_s: seconds from the message that completes the quorum of a sync to the
        decision without the others.
      start_s: seconds that a region waits for others before it begins alone.
      quorum: messages that a sync always waits for, or all of them where fewer regions
        take part.
      max_behind: syncs decided without a region after which it restarts, at the step
        of the others.
    """

    beat_s: float = 0.5
    dead_after_s: float = 10.0
    grace_s: float = 120.0
    start_s: float = 60.0
    quorum: int = 1
    max_behind: int = 32


class Heard(NamedTuple):
    """What a region's last messages said.

    Attributes:
      boot: its life.
      when: time of its last message, in seconds.
      step: step of its checkpoint, while it takes no part.
      oldest_step: from its last `Beat`.
      has_left: whether it left on purpose.
      hears_us: whether it says that it receives this region's messages.
      deaf_since: the time since which it says that it does not.
      is_elsewhere: whether it is in a later view without this region.
    """

    boot: int
    when: float
    step: int | None = None
    oldest_step: int = 0
    has_left: bool = False
    hears_us: bool = False
    deaf_since: float | None = None
    is_elsewhere: bool = False


class Hearing:
    """What is known of every other region from its last messages."""

    def __init__(self, region: int, silence_s: float):
        """Start without messages; after `silence_s` a region counts as dead."""
        self._region, self._silence_s = region, silence_s
        self.last: dict[int, Heard] = {}

    def hear(
        self, sender: int, boot: int, message: Message, now: float, are_we_told: bool
    ) -> bool:
        """Record a message; return whether to process it.

        Messages of an earlier life of the sender, and of one that left, are ignored.
        `are_we_told` says whether this region has announced itself.
        """
        before = self.last.get(sender, Heard(boot, now))
        if boot < before.boot:
            return False
        if boot > before.boot:
            before = Heard(boot, now)
        if before.has_left:
            return False
        heard = before._replace(when=now)
        match message:
            case Join(step, hears):
                heard = heard._replace(step=step, oldest_step=0)
                heard = self._with_ear(heard, hears, now, are_we_told)
            case Beat(oldest_step=oldest, hears=hears):
                heard = heard._replace(step=None, oldest_step=oldest)
                heard = self._with_ear(heard, hears, now, are_we_told)
            case Leave():
                heard = heard._replace(has_left=True)
        self.last[sender] = heard
        return True

    def _with_ear(
        self, heard: Heard, hears: tuple[int, ...], now: float, are_we_told: bool
    ) -> Heard:
        """Record whether a region says that it receives this one's messages."""
        if self._region in hears:
            return heard._replace(hears_us=True, deaf_since=None)
        since = now if heard.deaf_since is None else heard.deaf_since
        if not are_we_told:
            since = None  # This region has sent nothing yet.
        return heard._replace(hears_us=False, deaf_since=since)

    def note(self, region: int, **what) -> None:
        """Change fields of a region's `Heard`."""
        self.last[region] = self.last[region]._replace(**what)

    def of_late(self, now: float) -> tuple[int, ...]:
        """List the regions whose last message is recent."""
        return tuple(
            r for r, heard in self.last.items() if now - heard.when <= self._silence_s
        )

    def is_alive(self, region: int, boot: int, now: float) -> bool:
        """Return whether a region lives this life, takes part here, and receives."""
        heard = self.last.get(region)
        return (
            heard is not None
            and heard.boot == boot
            and not heard.has_left
            and not heard.is_elsewhere
            and now - heard.when <= self._silence_s
            and now - (heard.deaf_since or now) <= self._silence_s
        )

    def alive(self, now: float) -> dict[int, Heard]:
        """Return what is known of each live region."""
        return {r: h for r, h in self.last.items() if self.is_alive(r, h.boot, now)}

    def met(self, region: int, boot: int, now: float) -> None:
        """Record that a region has a seat in the view that begins now."""
        heard = self.last.get(region)
        if heard is None or heard.boot < boot:
            self.last[region] = Heard(boot, now)
        elif heard.boot == boot:
            self.last[region] = heard._replace(step=None)
