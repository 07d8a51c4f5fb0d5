"""One region's record of the messages and the decision of every sync."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from cocodc_jax.elastic.messages import Choice, Decision, Life, SyncId


class Book:
    """Messages and decisions until every region has applied them.

    Attributes:
      floor: every region has applied all syncs that started before this step; their
        messages are dropped, and late ones are ignored.
      reached: the latest start step of a sync that this region has waited for.
      own: this region's messages of undecided syncs.
      waiting: the syncs that this region waits for, and since when.
      rows: messages of undecided syncs, by sync and sender.
      quorum_s: when the quorum of a sync was complete, where this region coordinates.
      choices: the coordinator's choices whose messages are not all here yet.
      decided: decisions, by sync.
      delivered: new decisions that this region waited for; the reader clears them.
      news: all new decisions; the reader clears them.
    """

    def __init__(self):
        """Start without messages."""
        self.floor = self.reached = 0
        self.own: dict[SyncId, bytes] = {}
        self.waiting: dict[SyncId, float] = {}
        self.rows: dict[SyncId, dict[Life, bytes]] = {}
        self.quorum_s: dict[SyncId, float] = {}
        self.choices: dict[SyncId, Choice] = {}
        self.decided: dict[SyncId, Decision] = {}
        self.delivered: list[Decision] = []
        self.news: list[Decision] = []

    def wait_for(self, sync: SyncId, row: bytes | None, now: float) -> None:
        """Wait for a decision, with this region's message or without one."""
        if row is not None:
            self.own[sync] = row
        self.reached = max(self.reached, sync[1])
        self.waiting[sync] = now
        self._settle(sync)

    def collect(self, sender: Life, sync: SyncId, row: bytes) -> None:
        """Store a region's message."""
        if sync not in self.decided and sync[1] >= self.floor:
            self.rows.setdefault(sync, {})[sender] = row
            self._complete(sync)

    def choose(self, choice: Choice) -> None:
        """Store the coordinator's choice; it counts once all its messages are here."""
        sync = choice.sync
        if sync in self.decided or sync[1] < self.floor:
            return
        self.choices[sync] = choice
        boots = dict(choice.members)
        for region, row in choice.rows.items():
            if region in boots:
                self.rows.setdefault(sync, {})[region, boots[region]] = row
        self._complete(sync)

    def _complete(self, sync: SyncId) -> None:
        choice, rows = self.choices.get(sync), self.rows.get(sync, {})
        if choice is not None and all(life in rows for life in choice.members):
            found = {life[0]: rows[life] for life in choice.members}
            self.learn(Decision(choice.epoch, sync, found))

    def learn(self, decision: Decision) -> None:
        """Store a decision; the first one of a sync holds."""
        sync = decision.sync
        if sync[1] >= self.floor:
            if self.decided.setdefault(sync, decision) is decision:
                self.news.append(decision)
            self._settle(sync)

    def forget_choices(self) -> None:
        """Drop the choices whose messages are not all here."""
        self.choices = {}

    def forget_rows_but(self, senders: Collection[Life]) -> None:
        """Keep the messages of `senders` only; another region coordinates now."""
        self.quorum_s = {}
        for sync, rows in self.rows.items():
            self.rows[sync] = {life: x for life, x in rows.items() if life in senders}

    def forget_before(self, floor: int) -> None:
        """Forget what every region has applied."""
        self.floor = floor
        for table in (self.decided, self.rows, self.choices, self.quorum_s):
            for sync in [s for s in table if s[1] < floor]:
                del table[sync]

    def undecided(self) -> list[SyncId]:
        """List the syncs that this region waits for or has messages of."""
        return sorted(
            self.waiting.keys() | {s for s, rows in self.rows.items() if rows}
        )

    def known(self) -> tuple[SyncId, ...]:
        """List the syncs with a decision."""
        return tuple(self.decided)

    def behind(self, since_step: int) -> int:
        """Count the decided syncs after `since_step` that are not reached here."""
        reached = max(self.reached, since_step)
        return sum(start > reached for _, start in self.decided)

    def beyond(self, known: Iterable[SyncId]) -> tuple[Decision, ...]:
        """List the decisions of all syncs but `known`."""
        known = set(known)
        return tuple(d for sync, d in self.decided.items() if sync not in known)

    def is_due(
        self, sync: SyncId, count: int, quorum: int, grace_s: float, now: float
    ) -> bool:
        """Return whether `grace_s` has passed since `quorum` messages were here."""
        if count < quorum:
            return False
        return now - self.quorum_s.setdefault(sync, now) > grace_s

    def _settle(self, sync: SyncId) -> None:
        """Deliver a sync's decision, if there is one and this region waits for it."""
        if sync not in self.decided:
            return
        tables: tuple[dict, ...] = (self.rows, self.quorum_s, self.own, self.choices)
        for table in tables:
            table.pop(sync, None)
        if self.waiting.pop(sync, None) is not None:
            self.delivered.append(self.decided[sync])


def members_of(
    rows: dict[Life, bytes],
    boot_of: Callable[[int], int | None],
    shunned: Collection[int],
) -> tuple[Life, ...]:
    """Return which messages a mean is of: one life per region, the present if there.

    `boot_of` gives the life that a region has a seat for. `shunned` regions are left
    out unless no other region has sent a message.
    """
    found: dict[int, int] = {}
    for region, boot in sorted(rows):
        if found.get(region) != boot_of(region):
            found[region] = boot
    kept = {r: boot for r, boot in found.items() if r not in shunned}
    return tuple(sorted((kept or found).items()))
