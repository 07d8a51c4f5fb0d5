"""How regions agree on the next view; `protocol.py` has the rules."""

from __future__ import annotations

import abc
from collections.abc import Collection

from cocodc_jax.elastic.failure_detector import Hearing, Timing
from cocodc_jax.elastic.message_log import Book
from cocodc_jax.elastic.messages import (
    Install,
    Message,
    Promise,
    Propose,
    Seat,
    SyncId,
    View,
)


class Views(abc.ABC):
    """One region's part in agreeing on which regions take part.

    Attributes:
      view: the present view, as this region knows it.
      is_over: why this region takes part no more; "" while it does or may.
      shunned: where this region coordinates, the regions that it does not wait for, and
        whose messages it leaves out while there are others.
      detours: where this region coordinates, pairs `(sender, receiver)` whose messages
        it forwards.
      outbox: messages to send, `(region, message)`.
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
        """Start outside of any view; the arguments are those of `Member`."""
        self.region, self._num, self.boot = region, num_regions, boot
        self._step, self._timing, self._min = step, timing, min_regions
        self._born = now
        self.view, self.is_over = View(), ""
        self.shunned: frozenset[int] = frozenset()
        self.detours: frozenset[tuple[int, int]] = frozenset()
        self._entered_at = now
        self._promised, self._promised_at = 0, now
        self._vows: set[int] = set()
        self._proposal: View | None = None
        self._promises: dict[int, Promise] = {}
        self._highest = 0
        self._hearing = Hearing(region, timing.dead_after_s)
        self._admitted: dict[int, tuple[Seat, int]] = {}
        self._book = Book()
        self.outbox: list[tuple[int, Message]] = []

    @property
    def is_in(self) -> bool:
        """Whether this region takes part."""
        return self.view.epoch > 0 and not self.is_over

    @property
    def coordinator(self) -> int:
        """The region that decides in the view."""
        return self.view.epoch % self._num

    def _leads(self, epoch: int | None = None) -> bool:
        epoch = self.view.epoch if epoch is None else epoch
        return epoch == self.view.epoch and self.coordinator == self.region

    def _boot_of(self, region: int) -> int | None:
        seat = self.view.seats.get(region)
        return None if seat is None else seat.boot

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
        return self._hearing.is_alive(region, boot, now)

    def _next_seats(self, now: float) -> dict[int, Seat] | None:
        """Return the seats to propose now, None if it is not this region's turn."""
        if self._promised > self.view.epoch and now - self._promised_at <= self._pause:
            return None  # A proposal is pending.
        if not self.is_in:
            return self._first_seats(now)
        alive = {
            r: seat
            for r, seat in self.view.seats.items()
            if self._is_alive(r, seat.boot, now)
        }
        leader = self._leader_of(alive, now)
        self._admitted = {
            r: (seat, oldest)
            for r, (seat, oldest) in self._admitted.items()
            if self._is_alive(r, seat.boot, now)
        }
        seats = alive | {r: seat for r, (seat, _) in self._admitted.items()}
        is_same = seats == dict(self.view.seats) and self._promised == self.view.epoch
        is_same &= leader == self.coordinator
        if leader != self.region or is_same or len(seats) < self._min:
            return None
        return seats

    def _leader_of(self, alive: Collection[int], now: float) -> int:
        """Return the next coordinator: the present one unless it is dead or faulty."""
        faulty = self.shunned | {region for pair in self.detours for region in pair}
        well = [r for r in alive if r not in faulty] or list(alive)
        # For a while, regions may disagree on what is faulty.
        is_new = now - self._entered_at <= self._timing.dead_after_s
        if self.coordinator in (alive if is_new else well):
            return self.coordinator
        return min(well)

    @property
    def _pause(self) -> float:
        """Seconds after which a failed proposal is made again."""
        return 4 * self._timing.beat_s

    def _first_seats(self, now: float) -> dict[int, Seat] | None:
        """Return the seats of the run's first view, None if another proposes them."""
        alive = self._hearing.alive(now)
        if any(heard.step is None for heard in alive.values()):
            return None  # There is a view already, which will admit this region.
        steps = {r: h.step or 0 for r, h in alive.items() if h.hears_us}
        steps[self.region] = self._step
        is_early = now - self._born < self._timing.start_s
        if len(steps) < self._num and (is_early or len(steps) < self._min):
            return None
        if max(steps, key=lambda r: (steps[r], -r)) != self.region:
            return None
        boots = {r: heard.boot for r, heard in alive.items()} | {self.region: self.boot}
        if self._step:  # The others start from a copy of this one.
            return {self.region: Seat(self.boot, self._step)}
        return {r: Seat(boots[r], 0) for r in sorted(steps)}

    def _propose(self, seats: dict[int, Seat], now: float) -> None:
        highest = max(self._highest, self._promised, self.view.epoch)
        epoch = (highest // self._num + 1) * self._num + self.region
        self._proposal = View(epoch, seats)
        self._promises = {}
        self._promised, self._promised_at = epoch, now
        self._book.forget_choices()
        for region in seats:
            known = self._book.known()
            self._tell(region, Propose(self._proposal, self.view.epoch, known))
        self._count_promise(self.region, Promise(epoch, (), ()), now)

    def _descends(self, sender: int, boot: int, base_epoch: int) -> bool:
        """Return whether a region knows what this region's view has decided.

        It does if this region is in no view yet, if both are in one view, or if one has
        promised the other's view and does not know yet that it holds.
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
        self._book.forget_choices()
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
        is_led_by_another = view.epoch % self._num != self.coordinator
        self.view, self._proposal, self._entered_at = view, None, now
        self._promised = view.epoch
        if is_led_by_another:
            self._book.forget_rows_but([(r, x.boot) for r, x in view.seats.items()])
        if not self._leads():
            self._admitted = {}
        for region, seat in view.seats.items():
            if region != self.region:
                self._hearing.met(region, seat.boot, now)
            if region in self._admitted:
                oldest = self._admitted.pop(region)[1]
                self._hearing.note(region, oldest_step=oldest)
        for decision in decisions:
            self._book.learn(decision)
        self._entered(now)

    @abc.abstractmethod
    def _entered(self, now: float) -> None:
        """Act on the view that begins now."""

    def _tell(self, region: int, message: Message) -> None:
        if region != self.region:
            self.outbox.append((region, message))

    def _tell_all(self, message: Message) -> None:
        for region in range(self._num):
            self._tell(region, message)
