"""How regions decide which messages each mean is of; `protocol.py` has the rules."""

from __future__ import annotations

from cocodc_jax.elastic.message_log import members_of
from cocodc_jax.elastic.messages import (
    Choice,
    Decision,
    Row,
    SyncId,
    Want,
)
from cocodc_jax.elastic.views import Views

# Beats after which a region asks for what is missing, and how often this doubles.
_ASK_BEATS, _ASK_DOUBLINGS = 4, 4


class Deciding(Views):
    """One region's part in deciding which messages a mean is of.

    Attributes:
      oldest_step: this region has applied all syncs that started before this step.
    """

    oldest_step = 0
    _asked: dict[SyncId, int]  # Begun anew in each view.

    @property
    def delivered(self) -> list[Decision]:
        """Decisions that this region waits for; the reader clears the list."""
        return self._book.delivered

    def offer(self, sync: SyncId, row: bytes, now: float) -> None:
        """Send this region's message of a sync, and wait for the decision."""
        self._book.wait_for(sync, row, now)
        if sync in self._book.own and self.is_in:
            self._book.collect((self.region, self.boot), sync, row)
            for region in self.view.seats:
                self._send_row(region, sync, now)

    def expect(self, sync: SyncId, now: float) -> None:
        """Wait for the decision of a sync that started before this region joined."""
        self._book.wait_for(sync, None, now)

    def _entered(self, now: float) -> None:
        self._asked = {}
        for sync in [s for s in self._book.waiting if s in self._book.own]:
            self._book.collect((self.region, self.boot), sync, self._book.own[sync])
            self._send_row(self.coordinator, sync, now)

    def _ask(self, now: float) -> None:
        """Ask again for missing decisions: the messages may have been lost."""
        waiting = self._book.waiting
        self._asked = {s: n for s, n in self._asked.items() if s in waiting}
        for sync, since in waiting.items():
            asked = self._asked.get(sync, 0)
            beats = _ASK_BEATS * 2 ** min(asked, _ASK_DOUBLINGS)
            beats *= max(asked - _ASK_DOUBLINGS, 0) + 1
            if now - since > beats * self._timing.beat_s and not self._leads():
                self._asked[sync] = asked + 1
                self._tell(self.coordinator, Want(self.view.epoch, sync))

    def _send_row(self, region: int, sync: SyncId, now: float) -> None:
        self._tell(region, Row(self.view.epoch, sync, self._book.own[sync], now))

    def _answer(self, sender: int, boot: int, sync: SyncId, now: float) -> None:
        if not self._leads():
            if sync in self._book.own:
                self._send_row(sender, sync, now)
        elif sync in self._book.decided:
            self._tell(sender, self._book.decided[sync])
        elif (sender, boot) not in self._book.rows.get(sync, {}):
            self._tell(sender, Want(self.view.epoch, sync))

    def _decide(self, now: float) -> None:
        if not self._holds:
            return
        seats = self.view.seats
        waited_for = [r for r in seats if r not in self.shunned] or list(seats)
        for sync in self._book.undecided():
            rows = self._book.rows.get(sync, {})
            senders = {
                r: seats[r].boot for r in waited_for if seats[r].since_step < sync[1]
            }
            missing = {r: b for r, b in senders.items() if (r, b) not in rows}
            quorum = min(self._timing.quorum, len(senders))
            there = len(senders) - len(missing)
            is_late = self._book.is_due(
                sync, there, max(quorum, 1), self._timing.grace_s, now
            )
            # If a region is dead, a view without it follows; the sync waits for that.
            alive = [self._is_alive(r, b, now) for r, b in missing.items()]
            if not missing or (is_late and all(alive)):
                self._choose(sync, rows)

    def _choose(self, sync: SyncId, rows: dict) -> None:
        """Decide a sync with the messages that have arrived, and announce it."""
        members = members_of(rows, self._boot_of, self.shunned)
        for region, seat in self.view.seats.items():
            # A region that joined since lacks all; a dead one may not have sent to all.
            lacks = {
                r: rows[r, boot]
                for r, boot in members
                if seat.since_step >= sync[1]
                or boot != self._boot_of(r)
                or (r, region) in self.detours
            }
            self._tell(region, Choice(self.view.epoch, sync, members, lacks))
        found = {r: rows[r, boot] for r, boot in members}
        self._book.learn(Decision(self.view.epoch, sync, found))

    def _trim(self) -> None:
        """Forget what every region has applied, joining regions included."""
        if not self.is_in:
            return
        others = [r for r in self.view.seats if r != self.region]
        last = self._hearing.last
        oldest = [last[r].oldest_step for r in others if r in last]
        oldest += [step for _, step in self._admitted.values()]
        self._book.forget_before(min([self.oldest_step, *oldest]))
