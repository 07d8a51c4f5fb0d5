"""Who is alive, as far as one region hears: no socket, no clock."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from cocodc_jax.elastic.messages import Beat, Join, Leave, Message


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long regions wait for one another.

    Attributes:
      beat_s: between two signs of life.
      dead_after_s: silence after which a region is taken for dead.
      grace_s: from the message that makes the quorum of a sync to the decision without
        the others.
      start_s: that a region which is alone waits for others before it begins.
      quorum: messages of a sync that are waited for however long it takes, or all
        where fewer regions take part.
      max_behind: syncs decided without a region after which it begins anew, at the
        step of the others.
    """

    beat_s: float = 0.5
    dead_after_s: float = 10.0
    grace_s: float = 120.0
    start_s: float = 60.0
    quorum: int = 1
    max_behind: int = 32


class Heard(NamedTuple):
    """The last that was heard of a region.

    Attributes:
      boot: its life.
      when: it was heard, seconds.
      step: of its checkpoint, while it takes no part.
      oldest_step: as of its last `Beat`.
      has_left: on purpose.
      hears_us: it says so.
      deaf_since: it said then, and ever since, that it does not.
      is_elsewhere: in a later view, without this region.
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
    """What was heard last of every other region."""

    def __init__(self, region: int, silence_s: float):
        """Have heard nothing.

        Args:
          region: which this is.
          silence_s: after which a region is taken for dead.
        """
        self._region, self._silence_s = region, silence_s
        self.last: dict[int, Heard] = {}

    def hear(
        self, sender: int, boot: int, message: Message, now: float, are_we_told: bool
    ) -> bool:
        """Note a message; tell whether it is to be listened to.

        Args:
          sender: region.
          boot: its life; an earlier one than is known is not listened to.
          message: what it says.
          now: seconds.
          are_we_told: whether there is something to hear of this region.
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
        """Note whether a region says that it hears this one."""
        if self._region in hears:
            return heard._replace(hears_us=True, deaf_since=None)
        since = now if heard.deaf_since is None else heard.deaf_since
        if not are_we_told:
            since = None  # There was nothing to hear.
        return heard._replace(hears_us=False, deaf_since=since)

    def note(self, region: int, **what) -> None:
        """Change what is known of a region, see `Heard`."""
        self.last[region] = self.last[region]._replace(**what)

    def of_late(self, now: float) -> tuple[int, ...]:
        """List the regions that are heard."""
        return tuple(
            r for r, heard in self.last.items() if now - heard.when <= self._silence_s
        )

    def is_alive(self, region: int, boot: int, now: float) -> bool:
        """Tell whether another region lives this life, takes part here, and hears."""
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
        """Return what was heard of all that live."""
        return {r: h for r, h in self.last.items() if self.is_alive(r, h.boot, now)}

    def met(self, region: int, boot: int, now: float) -> None:
        """Note that a region has a seat in a view that holds now."""
        heard = self.last.get(region)
        if heard is None or heard.boot < boot:
            self.last[region] = Heard(boot, now)
        elif heard.boot == boot:
            self.last[region] = heard._replace(step=None)
