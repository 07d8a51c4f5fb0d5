"""One region's side of the agreement, as a pure state machine: no socket, no clock.

Regions are jobs that may die at any moment. All that take part have to take the same
mean of the same messages. The rules:

- A *view* is a set of regions with a number, the epoch. The region that proposed it
  coordinates it: each region sends it its message of a sync, it decides of which
  messages the mean is, and sends all of these to all. It waits for every region of the
  view, but `grace_s` after the first message for nobody any more.
- A region that says nothing for `dead_after_s`, says that it does not hear, or comes
  back in another life, is dead.
  Then the coordinator, or if it is dead the lowest region that lives, proposes the next
  view. Who promises tells every decision it has, and takes none of an earlier view from
  then on. When all have promised the view holds; every decision that one of them has
  taken holds in it, and only syncs without one are decided anew.
- So no two regions of a view ever take different means of a sync, whoever died between
  two messages. A region that was only silent finds that the others have gone on
  without it, takes part no more (`is_over`), and begins anew.
- Of two views, after a network was cut in two, the larger goes on, of equal ones that
  with the lowest region; the regions of the other begin anew from it, and what they did
  since is lost. With `min_regions` above half
  of M there is never a second one: who is too few waits.

What a death leaves behind, by its moment: in the inner steps, nothing is sent and the
others go on without; a message that the coordinator has whole counts, one that it has
not does not; when the coordinator dies before it decided, its successor collects the
messages again, and that of the dead is lost with it; when it dies after some of the
regions know what it decided, their word holds for all; when it dies and nobody knows,
it has never been. A death at the merge or in a checkpoint is one in the inner steps:
neither crosses regions.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from cocodc_jax.runtime.membership.book import Book
from cocodc_jax.runtime.membership.messages import (
    Beat,
    Decision,
    Install,
    Join,
    Leave,
    Message,
    Promise,
    Propose,
    Row,
    Seat,
    SyncId,
    View,
    Want,
)


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long regions wait for one another, seconds.

    Attributes:
      beat_s: between two signs of life.
      dead_after_s: silence after which a region is taken for dead.
      grace_s: from the first message of a sync to the decision without the others.
      start_s: that a region which is alone waits for others before it begins.
    """

    beat_s: float = 0.5
    dead_after_s: float = 10.0
    grace_s: float = 120.0
    start_s: float = 60.0


class _Heard(NamedTuple):
    """The last that was heard of a region."""

    boot: int
    when: float
    step: int | None = None  # Of its checkpoint, while it takes no part.
    oldest_step: int = 0
    has_left: bool = False
    hears_us: bool = False
    deaf_since: float | None = None  # It said then, and ever since, that it does not.
    is_elsewhere: bool = False  # In a later view, without this region.


class Member:
    """What one region knows, and what it says next.

    Attributes:
      view: that holds, as far as this region knows.
      oldest_step: all syncs that started before it are applied here.
      is_over: why this region takes part no more, "" while it does or may.
      is_announced: whether it asks to take part, and the others shall hear of it.
      outbox: `(region, message)` to be sent.
    """

    def __init__(
        self,
        region: int,
        num_regions: int,
        boot: int,
        step: int,
        timing: Timing,
        now: float,
        min_regions: int = 1,
    ):
        """Take no part yet.

        Args:
          region: which this is.
          num_regions: M, the most there can be.
          boot: which life of the region, see `Seat`.
          step: of its own checkpoint, 0 for none.
          timing: how long to wait.
          now: seconds, of any clock that only grows.
          min_regions: that a view needs.
        """
        self.region, self._num, self.boot = region, num_regions, boot
        self._step, self._timing, self._min = step, timing, min_regions
        self._born, self._beat_at = now, -float("inf")
        self.view, self.oldest_step, self.is_over = View(), 0, ""
        self.is_announced = True
        self._promised, self._promised_at = 0, now
        self._vows: set[int] = set()
        self._proposal: View | None = None
        self._promises: dict[int, Promise] = {}
        self._highest = 0
        self._heard: dict[int, _Heard] = {}
        self._admitted: dict[int, tuple[Seat, int]] = {}
        self._book = Book()
        self.outbox: list[tuple[int, Message]] = []

    @property
    def delivered(self) -> list[Decision]:
        """Decisions of what this region waits for; who reads them clears them."""
        return self._book.delivered

    @property
    def is_in(self) -> bool:
        """Whether it takes part."""
        return self.view.epoch > 0 and not self.is_over

    @property
    def coordinator(self) -> int:
        """Who decides in the view."""
        return self.view.epoch % self._num

    def offer(self, sync: SyncId, row: bytes, now: float) -> None:
        """Send this region's message of a sync, and wait for the decision."""
        self._book.wait_for(sync, row, now)
        if sync in self._book.waiting and self.is_in:
            self._send_row(sync, now)

    def expect(self, sync: SyncId, now: float) -> None:
        """Wait for the decision of a sync that began before this region took part."""
        self._book.wait_for(sync, None, now)

    def hears_others(self) -> bool:
        """Tell whether others take part already."""
        return any(heard.step is None for heard in self._heard.values())

    def joiners(self, now: float) -> dict[int, int]:
        """Return the lives of the regions that wait for this one to let them in."""
        if not self.is_in or self.coordinator != self.region:
            return {}
        return {
            r: heard.boot
            for r, heard in self._heard.items()
            if heard.step is not None
            and heard.hears_us
            and r not in self._admitted
            and not self._has_seat(r, heard.boot)
            and self._is_alive(r, heard.boot, now)
        }

    def admit(self, region: int, boot: int, since_step: int, oldest_step: int) -> None:
        """Have the next view hold a region that goes on from a copy of this one.

        Args:
          region: one of `joiners`.
          boot: its life.
          since_step: of the copy.
          oldest_step: all syncs that started before it are applied in the copy.
        """
        self._admitted[region] = Seat(boot, since_step), oldest_step

    def announce(self, now: float) -> None:
        """Ask to take part."""
        self.is_announced, self._born = True, now

    def leave(self) -> None:
        """Take part no more; the others need not wait for the silence."""
        if not self.is_over:
            self._tell_all(Leave())
            self.is_over = "it has left"

    def tick(self, now: float) -> None:
        """Do what time has made due."""
        if self.is_over or not self.is_announced:
            return
        if now - self._beat_at >= self._timing.beat_s:
            self._beat_at = now
            self._beat(now)
        seats = self._next_seats(now)
        if seats is not None:
            self._propose(seats, now)
        self._decide(now)
        self._trim()

    def receive(self, sender: int, boot: int, message: Message, now: float) -> None:
        """Take in what another region says.

        Args:
          sender: region.
          boot: its life; an earlier one than is known is not listened to.
          message: of any kind but `Snapshot`.
          now: seconds.
        """
        before = self._heard.get(sender, _Heard(boot, now))
        if self.is_over or boot < before.boot or sender == self.region:
            return
        if boot > before.boot:
            before = _Heard(boot, now)
        if before.has_left:
            return
        heard = before._replace(when=now)
        match message:
            case Join(step, hears):
                heard = heard._replace(step=step, oldest_step=0)
                heard = self._with_ear(heard, hears, now)
            case Beat(view, promised, oldest, hears):
                heard = heard._replace(
                    step=None,
                    oldest_step=oldest,
                    is_elsewhere=self.is_in
                    and self.region not in view.seats
                    and view.epoch > self.view.epoch,
                )
                heard = self._with_ear(heard, hears, now)
                self._highest = max(self._highest, promised, view.epoch)
            case Leave():
                heard = heard._replace(has_left=True)
        self._heard[sender] = heard
        match message:
            case Join() if self._has_seat(sender, boot) and self._holds:
                # The word that it may come in was lost.
                self._tell(sender, Install(self.view, self._book.beyond(())))
            case Beat(view):
                self._compare(sender, view)
            case Row(epoch, sync, row) if self._leads(epoch):
                self._book.collect(sender, sync, row, now)
            case Want(epoch, sync) if epoch == self.view.epoch:
                self._answer(sender, sync)
            case Decision(epoch) if epoch == self.view.epoch == self._promised:
                self._book.learn(message)
            case Propose(view, base_epoch, known):
                if self._descends(sender, boot, base_epoch):
                    self._promise(sender, view, known, now)
            case Promise(epoch):
                self._count_promise(sender, message, now)
            case Install(view, decisions):
                if view.epoch == self._promised and view.epoch > self.view.epoch:
                    self._enter(view, decisions, now)

    # Signs of life, and views that have gone on.

    def _beat(self, now: float) -> None:
        silence = self._timing.dead_after_s
        hears = tuple(
            r for r, heard in self._heard.items() if now - heard.when <= silence
        )
        if not self.is_in:
            self._tell_all(Join(self._step, hears))
            return
        self._tell_all(Beat(self.view, self._promised, self.oldest_step, hears))
        for (
            sync,
            since,
        ) in self._book.waiting.items():  # What was said may have been lost.
            if now - since > 4 * self._timing.beat_s and not self._leads():
                self._tell(self.coordinator, Want(self.view.epoch, sync))

    def _compare(self, sender: int, theirs: View) -> None:
        """Find out whether the others went on without this region."""
        if not self.is_in:
            return
        mine = self.view.seats
        if self.region not in theirs.seats:
            rest = View(seats={r: x for r, x in mine.items() if r not in theirs.seats})
            is_apart = len(rest.seats) == len(mine)
            if not is_apart and theirs.epoch < self.view.epoch:
                return  # It does not know yet.
            if theirs.rank > rest.rank:
                self.is_over = (
                    f"region {sender} is of a larger part of a run cut in two"
                    if is_apart
                    else f"region {sender} and others went on without this one"
                )
        elif (
            theirs.epoch < self.view.epoch and sender in self.view.seats and self._holds
        ):  # The word that the view holds was lost.
            self._tell(sender, Install(self.view, self._book.beyond(())))

    @property
    def _holds(self) -> bool:
        """Whether this region coordinates a view that is not about to end."""
        return self.is_in and self._leads() and self._promised == self.view.epoch

    def _has_seat(self, region: int, boot: int) -> bool:
        seat = self.view.seats.get(region)
        return seat is not None and seat.boot == boot

    def _is_alive(self, region: int, boot: int, now: float) -> bool:
        if region == self.region:
            return boot == self.boot
        heard = self._heard.get(region)
        return (
            heard is not None
            and heard.boot == boot
            and not heard.has_left
            and not heard.is_elsewhere
            and now - heard.when <= self._timing.dead_after_s
            and now - (heard.deaf_since or now) <= self._timing.dead_after_s
        )

    def _with_ear(self, heard: _Heard, hears: tuple[int, ...], now: float) -> _Heard:
        """Note whether a region says that it hears this one."""
        if self.region in hears:
            return heard._replace(hears_us=True, deaf_since=None)
        since = now if heard.deaf_since is None else heard.deaf_since
        if not self.is_announced:
            since = None  # There was nothing to hear.
        return heard._replace(hears_us=False, deaf_since=since)

    # From view to view.

    def _next_seats(self, now: float) -> dict[int, Seat] | None:
        """Return the seats to propose now, None if it is not this region's turn."""
        if self._promised > self.view.epoch and now - self._promised_at <= self._pause:
            return None  # Somebody, maybe this one, is about to.
        if not self.is_in:
            return self._first_seats(now)
        alive = {
            r: seat
            for r, seat in self.view.seats.items()
            if self._is_alive(r, seat.boot, now)
        }
        leader = self.coordinator if self.coordinator in alive else min(alive)
        self._admitted = {
            r: (seat, oldest)
            for r, (seat, oldest) in self._admitted.items()
            if self._is_alive(r, seat.boot, now)
        }
        seats = alive | {r: seat for r, (seat, _) in self._admitted.items()}
        is_same = seats == dict(self.view.seats) and self._promised == self.view.epoch
        if leader != self.region or is_same or len(seats) < self._min:
            return None
        return seats

    @property
    def _pause(self) -> float:
        """Seconds after which a proposal that came to nothing is made again."""
        return 4 * self._timing.beat_s

    def _first_seats(self, now: float) -> dict[int, Seat] | None:
        """Return the seats of a run's first view, of this life of all regions."""
        alive = {r: h for r, h in self._heard.items() if self._is_alive(r, h.boot, now)}
        if any(heard.step is None for heard in alive.values()):
            return None  # Somebody takes part already, and will let this one in.
        steps = {r: h.step or 0 for r, h in alive.items() if h.hears_us}
        steps[self.region] = self._step
        is_early = now - self._born < self._timing.start_s
        if len(steps) < self._num and (is_early or len(steps) < self._min):
            return None
        if max(steps, key=lambda r: (steps[r], -r)) != self.region:
            return None
        boots = {r: heard.boot for r, heard in alive.items()} | {self.region: self.boot}
        if self._step:  # The others go on from a copy of this one.
            return {self.region: Seat(self.boot, self._step)}
        return {r: Seat(boots[r], 0) for r in sorted(steps)}

    def _propose(self, seats: dict[int, Seat], now: float) -> None:
        highest = max(self._highest, self._promised, self.view.epoch)
        epoch = (highest // self._num + 1) * self._num + self.region
        self._proposal = View(epoch, seats)
        self._promises = {}
        self._promised, self._promised_at = epoch, now
        for region in seats:
            known = self._book.known()
            self._tell(region, Propose(self._proposal, self.view.epoch, known))
        self._count_promise(self.region, Promise(epoch, (), ()), now)

    def _descends(self, sender: int, boot: int, base_epoch: int) -> bool:
        """Tell whether a region knows what this region's view has decided.

        It does if this region takes no part yet, if both are in one view, or if one
        has promised the view that the other is in, and only not heard that it holds.
        """
        if self.view.epoch == 0 or base_epoch == self.view.epoch:
            return True
        if base_epoch < self.view.epoch:
            return self._has_seat(sender, boot)
        return base_epoch in self._vows

    def _promise(
        self, sender: int, view: View, known: tuple[SyncId, ...], now: float
    ) -> None:
        seat = view.seats.get(self.region)
        if seat is None or seat.boot != self.boot or view.epoch <= self._promised:
            return
        self._promised, self._promised_at, self._proposal = view.epoch, now, None
        self._vows.add(view.epoch)
        promise = Promise(view.epoch, self._book.known(), self._book.beyond(known))
        self._tell(sender, promise)

    def _count_promise(self, sender: int, promise: Promise, now: float) -> None:
        view = self._proposal
        if view is None or promise.epoch != view.epoch:
            return
        self._promises[sender] = promise
        if self._promises.keys() < view.seats.keys():
            return
        for each in self._promises.values():
            for decision in each.decisions:
                self._book.learn(decision)
        for region, each in self._promises.items():
            self._tell(region, Install(view, self._book.beyond(each.known)))
        self._enter(view, (), now)

    def _enter(self, view: View, decisions, now: float) -> None:
        self.view, self._proposal = view, None
        self._promised = view.epoch
        if not self._leads():
            self._book.forget_collected()
            self._admitted = {}
        for region, seat in view.seats.items():
            heard = self._heard.get(region)
            if region != self.region and (heard is None or heard.boot < seat.boot):
                self._heard[region] = _Heard(seat.boot, now)
            elif heard is not None and heard.boot == seat.boot:
                self._heard[region] = heard._replace(step=None)
            if region in self._admitted:
                oldest = self._admitted.pop(region)[1]
                self._heard[region] = self._heard[region]._replace(oldest_step=oldest)
        for decision in decisions:
            self._book.learn(decision)
        for sync in [s for s in self._book.waiting if s in self._book.own]:
            self._send_row(sync, now)

    # Messages and decisions.

    def _leads(self, epoch: int | None = None) -> bool:
        epoch = self.view.epoch if epoch is None else epoch
        return epoch == self.view.epoch and self.coordinator == self.region

    def _send_row(self, sync: SyncId, now: float) -> None:
        if self._leads():
            self._book.collect(self.region, sync, self._book.own[sync], now)
        else:
            row = Row(self.view.epoch, sync, self._book.own[sync])
            self._tell(self.coordinator, row)

    def _answer(self, sender: int, sync: SyncId) -> None:
        if not self._leads():
            if sync in self._book.own:
                row = Row(self.view.epoch, sync, self._book.own[sync])
                self._tell(sender, row)
        elif sync in self._book.decided:
            self._tell(sender, self._book.decided[sync])
        elif sender not in self._book.collected.get(sync, {}):
            self._tell(sender, Want(self.view.epoch, sync))

    def _decide(self, now: float) -> None:
        if not self._holds:
            return
        for sync in self._book.undecided():
            rows = self._book.collected.get(sync, {})
            missing = {
                r: seat
                for r, seat in self.view.seats.items()
                if seat.since_step < sync[1] and r not in rows
            }
            is_late = now - self._book.first_s.get(sync, now) > self._timing.grace_s
            # Without the dead there will be another view.
            alive = [self._is_alive(r, seat.boot, now) for r, seat in missing.items()]
            if not missing or (is_late and all(alive)):
                decision = Decision(self.view.epoch, sync, dict(sorted(rows.items())))
                for region in self.view.seats:
                    self._tell(region, decision)
                self._book.learn(decision)

    def _trim(self) -> None:
        """Forget what every region has applied, and those that are about to join."""
        if not self.is_in:
            return
        others = [r for r in self.view.seats if r != self.region]
        oldest = [self._heard[r].oldest_step for r in others if r in self._heard]
        oldest += [step for _, step in self._admitted.values()]
        self._book.forget_before(min([self.oldest_step, *oldest]))

    def _tell(self, region: int, message: Message) -> None:
        if region != self.region:
            self.outbox.append((region, message))

    def _tell_all(self, message: Message) -> None:
        for region in range(self._num):
            self._tell(region, message)
