"""What one region knows of the messages of every sync, and of what was decided."""

from __future__ import annotations

from collections.abc import Iterable

from cocodc_jax.runtime.membership.messages import Decision, SyncId


class Book:
    """Messages and decisions until every region has applied them.

    Attributes:
      floor: every region has applied all syncs that started before this step; nothing
        is kept of them, and what still arrives of them is nothing.
      own: this region's messages that nothing is decided of.
      waiting: the syncs that this region waits for, and since when.
      collected: messages by sync and region, of all, where this region coordinates.
      first_s: when the first of a sync's messages was collected.
      decided: decisions, by sync.
      delivered: decisions of what was waited for, to be taken away.
    """

    def __init__(self):
        """Know nothing."""
        self.floor = 0
        self.own: dict[SyncId, bytes] = {}
        self.waiting: dict[SyncId, float] = {}
        self.collected: dict[SyncId, dict[int, bytes]] = {}
        self.first_s: dict[SyncId, float] = {}
        self.decided: dict[SyncId, Decision] = {}
        self.delivered: list[Decision] = []

    def wait_for(self, sync: SyncId, row: bytes | None, now: float) -> None:
        """Wait for a decision, with this region's message or without one."""
        if row is not None:
            self.own[sync] = row
        self.waiting[sync] = now
        self._settle(sync)

    def collect(self, sender: int, sync: SyncId, row: bytes, now: float) -> None:
        """Take in a region's message."""
        if sync not in self.decided and sync[1] >= self.floor:
            self.collected.setdefault(sync, {})[sender] = row
            self.first_s.setdefault(sync, now)

    def learn(self, decision: Decision) -> None:
        """Take in a decision; the first that is known of a sync holds."""
        if decision.sync[1] >= self.floor:
            self.decided.setdefault(decision.sync, decision)
            self._settle(decision.sync)

    def forget_collected(self) -> None:
        """Coordinate no more."""
        self.collected, self.first_s = {}, {}

    def forget_before(self, floor: int) -> None:
        """Forget what every region has applied."""
        self.floor = floor
        for sync in [s for s in self.decided if s[1] < floor]:
            del self.decided[sync]

    def undecided(self) -> list[SyncId]:
        """List the syncs that somebody waits for here or has sent a message of."""
        return sorted(self.waiting.keys() | self.collected.keys())

    def known(self) -> tuple[SyncId, ...]:
        """List the syncs with a decision."""
        return tuple(self.decided)

    def beyond(self, known: Iterable[SyncId]) -> tuple[Decision, ...]:
        """List the decisions that somebody does not know."""
        known = set(known)
        return tuple(d for sync, d in self.decided.items() if sync not in known)

    def _settle(self, sync: SyncId) -> None:
        """Hand out a decision that was waited for."""
        if sync not in self.decided:
            return
        for table in (self.collected, self.first_s, self.own):
            table.pop(sync, None)
        if self.waiting.pop(sync, None) is not None:
            self.delivered.append(self.decided[sync])
