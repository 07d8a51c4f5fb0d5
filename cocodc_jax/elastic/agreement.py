"""How regions agree on views, and on the messages of a mean; rules: `protocol.py`."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from cocodc_jax.elastic import messages as m
from cocodc_jax.elastic.place import Place
from cocodc_jax.elastic.records import Book, Hearing

# Beats without a message after which a sender's next row is asked for at once.
_CUT_OFF_BEATS = 4
# Beats after which a region proposes, asks or announces again, and how often this
# doubles at most: what it waits for may be large, and is not lost because it is slow.
AGAIN_BEATS = 4
_DOUBLINGS = 4


def patience(times: int) -> int:
    """Return the beats to wait for an answer that did not come `times` times."""
    return AGAIN_BEATS << min(times, _DOUBLINGS)


class Agreement:
    """One region's part in agreeing on who takes part, and on every mean."""

    def __init__(self, place: Place, boot: int, step: int, now: float):
        """Start outside of any view; the arguments are those of `Member`."""
        self.region = place.region
        self.boot = boot
        self._num = place.num_regions
        self._min = place.min_regions
        self._timing = place.timing
        self._step = step
        self._born = now

        self.view = m.View()  # The present one, as this region knows it.
        self.entered_at = now  # The present view.
        self.why_left = ""  # Why this region takes part no more; empty while it does.
        self.oldest_step = 0  # It has applied all syncs that started before.

        # Where this region coordinates: regions that it does not wait for, and whose
        # messages it leaves out while there are others; and pairs `(sender, receiver)`
        # whose messages it forwards.
        self.shunned: frozenset[int] = frozenset()
        self.detours: frozenset[tuple[int, int]] = frozenset()

        # The view that this region has promised last, and its own proposal.
        self._promised = m.NO_EPOCH
        self._promised_at = now
        self._vows: set[m.Epoch] = set()
        self._proposal: m.View | None = None
        self._promises: dict[int, m.Promise] = {}
        self._failed = 0  # Proposals since the present view began.
        self._repeated: dict[int, int] = {}  # To whom the view was, and how often.
        self._highest = m.NO_EPOCH
        self._highest_at = now

        self._hearing = Hearing(self.life, self._timing.dead_after_s)
        self._admitted: dict[int, tuple[m.Seat, int]] = {}
        self._book = Book()
        self._asked: dict[m.SyncId, int] = {}  # Begun anew in each view.
        self._detoured: set[m.Life] = set()  # Whose last message came by another one.
        self.outbox: list[tuple[int, m.Message]] = []

    @property
    def life(self) -> m.Life:
        """This region, in this life."""
        return self.region, self.boot

    @property
    def is_in(self) -> bool:
        """Whether this region takes part."""
        return self.view.epoch != m.NO_EPOCH and not self.why_left

    @property
    def coordinator(self) -> int:
        """The region that decides in the view."""
        return self.view.epoch.region

    @property
    def delivered(self) -> list[m.Decision]:
        """Decisions that this region waits for; the reader clears the list."""
        return self._book.delivered

    @property
    def _leads(self) -> bool:
        return self.view.epoch.coordinator == self.life

    @property
    def _holds(self) -> bool:
        """Whether this region coordinates a view that is not about to end."""
        return self.is_in and self._leads and self._promised == self.view.epoch

    def _is_alive(self, region: int, boot: int, now: float) -> bool:
        if region == self.region:
            return boot == self.boot
        return self._hearing.is_alive(region, boot, now)

    def _tell(self, region: int, message: m.Message) -> None:
        if region != self.region:
            self.outbox.append((region, message))

    # Views.

    def _next_seats(self, now: float) -> dict[int, m.Seat] | None:
        """Return the seats to propose now, None if it is not this region's turn."""
        pause_s = patience(self._failed) * self._timing.beat_s
        if self._promised > self.view.epoch and now - self._promised_at <= pause_s:
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
            if self._hearing.sends(r, seat.boot, now)  # It receives after its copy.
        }
        seats = alive | {r: seat for r, (seat, _) in self._admitted.items()}

        least = min(self._min, len(self.view.seats))  # A run may begin with one.
        if leader != self.region or len(seats) < least:
            return None

        # A region may have promised a view that did not come about: it needs another.
        is_left_behind = (
            self._highest > self._promised and now - self._highest_at > pause_s
        )
        is_same = (
            seats == dict(self.view.seats)
            and self._promised == self.view.epoch
            and leader == self.coordinator
            and not is_left_behind
        )
        return None if is_same else seats

    def _leader_of(self, alive: Collection[int], now: float) -> int:
        """Return the next coordinator: the present one unless it is dead or faulty."""
        faulty = self.shunned | {region for pair in self.detours for region in pair}
        well = [r for r in alive if r not in faulty] or list(alive)
        # For a while, regions may disagree on what is faulty.
        is_new = now - self.entered_at <= self._timing.dead_after_s
        if self.coordinator in (alive if is_new else well):
            return self.coordinator
        return min(well)

    def _first_seats(self, now: float) -> dict[int, m.Seat] | None:
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
        if self._step:  # The others start from a copy of this one.
            return {self.region: m.Seat(self.boot, self._step, self.life)}

        boots = {r: heard.boot for r, heard in alive.items()} | {self.region: self.boot}
        return {r: m.Seat(boots[r], 0, (r, boots[r])) for r in sorted(steps)}

    def _propose(self, seats: dict[int, m.Seat], now: float) -> None:
        highest = max(self._highest, self._promised, self.view.epoch)
        epoch = m.Epoch(highest.round + 1, *self.life)
        self._failed += self._proposal is not None
        self._proposal = m.View(epoch, seats)
        self._promises = {}
        self._promised = epoch
        self._promised_at = now
        self._book.choices.clear()

        for region in seats:
            known = tuple(self._book.decided)
            self._tell(region, m.Propose(self._proposal, self.view.epoch, known))
        self._count_promise(self.life, m.Promise(epoch, (), ()), now)

    def _descends(self, sender: m.Life, base_epoch: m.Epoch) -> bool:
        """Return whether a region knows what this region's view has decided.

        It does if this region is in no view yet, if both are in one view, or if one has
        promised the other's view and does not know yet that it holds.
        """
        if self.view.epoch == m.NO_EPOCH or base_epoch == self.view.epoch:
            return True
        if base_epoch < self.view.epoch:
            return self.view.has(sender)
        return base_epoch in self._vows

    def _promise(
        self, sender: int, view: m.View, known: Iterable[m.SyncId], now: float
    ):
        if not view.has(self.life) or view.epoch <= self._promised:
            return
        self._promised = view.epoch
        self._promised_at = now
        self._proposal = None
        self._vows.add(view.epoch)
        self._book.choices.clear()
        lacks = self._book.beyond(known)
        self._tell(sender, m.Promise(view.epoch, tuple(self._book.decided), lacks))

    def _count_promise(self, sender: m.Life, promise: m.Promise, now: float) -> None:
        view = self._proposal
        if view is None or promise.epoch.coordinator != self.life:
            return
        if not self.view.epoch < promise.epoch <= view.epoch:
            return
        if promise.epoch < view.epoch:  # Too late, but its decisions hold.
            self._learn(promise.decisions)
            return
        if not view.has(sender):
            return

        self._promises[sender[0]] = promise
        if self._promises.keys() < view.seats.keys():
            return

        for member_promise in self._promises.values():
            self._learn(member_promise.decisions)
        for region, member_promise in self._promises.items():
            lacks = self._book.beyond(member_promise.known)
            self._tell(region, m.Install(view, lacks))
        self._enter(view, (), now)

    def _enter(self, view: m.View, decisions: Iterable[m.Decision], now: float) -> None:
        is_led_by_another = view.epoch.coordinator != self.view.epoch.coordinator
        self.view = view
        self._proposal = None
        self.entered_at = now
        self._promised = view.epoch

        if is_led_by_another:
            members = [(region, seat.boot) for region, seat in view.seats.items()]
            self._book.keep_rows_of(members)
        if not self._leads:
            self._admitted = {}

        for region, seat in view.seats.items():
            if region != self.region:
                self._hearing.met(region, seat.boot, now)
            if region in self._admitted:
                _, oldest_step = self._admitted.pop(region)
                self._hearing.note(region, oldest_step=oldest_step)

        self._learn(decisions)
        self._asked = {}
        self._repeated = {}
        self._failed = 0
        self._book.chosen.clear()

        for sync in [s for s in self._book.waiting if s in self._book.own]:
            self._book.collect(self.life, sync, self._book.own[sync])
            self._send_row(self.coordinator, sync, now)

    def _learn(self, decisions: Iterable[m.Decision]) -> None:
        for decision in decisions:
            self._book.learn(decision)

    # Means.

    def offer(self, sync: m.SyncId, row: bytes, now: float) -> None:
        """Send this region's message of a sync, and wait for the decision."""
        self._book.wait_for(sync, row, now)
        if sync in self._book.own and self.is_in:
            self._book.collect(self.life, sync, row)
            for region in self.view.seats:
                self._send_row(region, sync, now)

    def expect(self, sync: m.SyncId, now: float) -> None:
        """Wait for the decision of a sync that started before this region joined."""
        self._book.wait_for(sync, None, now)

    def _send_row(self, region: int, sync: m.SyncId, now: float) -> None:
        self._tell(region, m.Row(self.view.epoch, sync, self._book.own[sync], now))

    def _ask(self, now: float) -> None:
        """Ask again for missing decisions: the messages may have been lost."""
        waiting = self._book.waiting
        self._asked = {s: n for s, n in self._asked.items() if s in waiting}
        for sync, since in waiting.items():
            asked = self._asked.get(sync, 0)
            beats = patience(asked) * (max(asked - _DOUBLINGS, 0) + 1)
            if now - since > beats * self._timing.beat_s and not self._leads:
                self._asked[sync] = asked + 1
                self._want(sync)

    def _want(self, sync: m.SyncId) -> None:
        """Ask the coordinator for a decision, or for its messages that are missing."""
        lacks = tuple(region for region, _ in self._book.lacks(sync))
        self._tell(self.coordinator, m.Want(self.view.epoch, sync, lacks))

    def _choice_came(self, choice: m.Choice, now: float) -> None:
        """Ask at once for messages whose senders do not reach this region."""
        lacked = self._book.lacks(choice.sync)
        self._detoured |= {life for life in lacked if life[0] in choice.rows}
        self._book.choose(choice)
        cut_off_s = _CUT_OFF_BEATS * self._timing.beat_s
        if any(
            life in self._detoured or self._hearing.silent_s(life, now) > cut_off_s
            for life in self._book.lacks(choice.sync)
        ):
            self._want(choice.sync)

    def _answer(
        self, sender: m.Life, sync: m.SyncId, lacks: Collection[int], now: float
    ) -> None:
        if not self._leads:
            if sync in self._book.own:
                self._send_row(sender[0], sync, now)
        elif lacks and sync in self._book.chosen:
            members = self._book.chosen[sync]
            decided = self._book.decided[sync].rows
            rows = {region: decided[region] for region in lacks if region in decided}
            self._tell(sender[0], m.Choice(self.view.epoch, sync, members, rows))
        elif sync in self._book.decided:
            self._tell(sender[0], self._book.decided[sync])
        elif sender not in self._book.rows.get(sync, {}):
            self._tell(sender[0], m.Want(self.view.epoch, sync))

    def _decide(self, now: float) -> None:
        """Decide the syncs of which all messages, or enough for long, are here."""
        if not self._holds:
            return

        seats = self.view.seats
        waited_for = [r for r in seats if r not in self.shunned] or list(seats)
        for sync in self._book.undecided():
            _, start_step = sync
            rows = self._book.rows.get(sync, {})
            senders = {
                (region, seats[region].boot)
                for region in waited_for
                if seats[region].since_step < start_step
            }
            missing = senders - rows.keys()
            quorum = max(min(self._timing.quorum, len(senders)), 1)

            is_late = False
            if len(senders) - len(missing) >= quorum:
                since = self._book.quorum_s.setdefault(sync, now)
                is_late = now - since > self._timing.grace_s

            # If a region is dead, a view without it follows; the sync waits for that.
            are_alive = all(
                self._is_alive(region, boot, now) for region, boot in missing
            )
            if not missing or (is_late and are_alive):
                self._choose(sync, rows)

    def _choose(self, sync: m.SyncId, rows: dict[m.Life, bytes]) -> None:
        """Decide a sync with the messages that have arrived, and announce it."""
        _, start_step = sync
        members = self._members_of(rows)
        chosen = {region: rows[region, boot] for region, boot in members}

        for region, seat in self.view.seats.items():
            is_new = seat.since_step >= start_step  # It has received none of them.
            lacks = {
                r: row
                for r, row in chosen.items()
                if is_new or (r, region) in self.detours
            }
            self._tell(region, m.Choice(self.view.epoch, sync, members, lacks))

        self._book.chosen[sync] = members
        self._book.learn(m.Decision(self.view.epoch, sync, chosen))

    def _members_of(self, rows: Collection[m.Life]) -> tuple[m.Life, ...]:
        """Return the lives of the view that have sent a message.

        Shunned regions are left out unless no other region has sent one.
        """
        lives = sorted((r, seat.boot) for r, seat in self.view.seats.items())
        senders = tuple(life for life in lives if life in rows)
        return tuple(life for life in senders if life[0] not in self.shunned) or senders

    def _trim(self) -> None:
        """Forget what every region has applied, joining regions included."""
        if not self.is_in or self._promised > self.view.epoch:
            return  # The next view may have a region that needs them.

        others = [r for r in self.view.seats if r != self.region]
        last = self._hearing.last
        oldest = [last[r].oldest_step for r in others if r in last]
        oldest += [step for _, step in self._admitted.values()]
        self._book.forget_before(min([self.oldest_step, *oldest]))
