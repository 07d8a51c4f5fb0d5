"""What one region has heard from the others: who lives, and what each sync is of."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from cocodc_jax.elastic import messages as m

# A life is forgotten after so many times `silence_s`. No message is on its way as long.
FORGET = 4


class Heard(NamedTuple):
    """What a region's last messages said."""

    boot: int  # Its life.
    when: float  # Time of its last message, in seconds.
    step: int | None = None  # Of its checkpoint, while it takes no part.
    has_begun: bool = False  # A `Beat` has come: it takes part until this life ends.
    oldest_step: int = 0  # From its last `Beat`.
    has_left: bool = False  # On purpose.
    hears_us: bool = False  # It says that it receives this region's messages;
    deaf_since: float | None = None  # that it does not, since this time.
    is_elsewhere: bool = False  # In a later view without this region.
    is_spared: bool = False  # Nothing came since this process was held up.


class Hearing:
    """What is known of every other region from its last messages."""

    def __init__(self, life: m.Life, silence_s: float):
        self.life = life  # This region and its life.
        self._silence_s = silence_s  # Then a region counts as dead.
        self.last: dict[int, Heard] = {}

    def hear(
        self, sender: int, boot: int, message: m.Message, now: float, is_announced: bool
    ) -> bool:
        """Record a message; return whether to process it.

        Messages of an earlier life of the sender, and of one that left, are ignored. If
        the later life has been silent for long, the clock was set back. So are those of
        a later life that this region does not reach, while the earlier one is there.
        `is_announced` says whether this region has announced itself.
        """
        heard = self.last.get(sender, Heard(boot, now))
        is_sign = isinstance(message, m.Join | m.Beat)
        is_reached = is_sign and self.life in message.hears
        is_gone = not self.sends(sender, heard.boot, now)
        if boot < heard.boot:
            is_next = now - heard.when > FORGET * self._silence_s
        else:
            is_next = boot > heard.boot and (is_reached or is_gone)
        if is_next:
            heard = Heard(boot, now)

        if boot != heard.boot or heard.has_left:
            return False

        heard = heard._replace(when=now, is_spared=False)
        match message:
            case m.Join() if heard.has_begun:
                return False  # It was overtaken, as in a store.
            case m.Join(step, hears, knows):
                heard = heard._replace(step=step, oldest_step=0)
            case m.Beat(oldest_step=oldest, hears=hears, knows=knows):
                heard = heard._replace(step=None, has_begun=True, oldest_step=oldest)
            case _:
                has_left = isinstance(message, m.Leave)
                self.last[sender] = heard._replace(has_left=has_left)
                return True

        hears_us = self.life in hears
        knows_newer = any(
            region == self.life[0] and known > self.life[1] for region, known in knows
        )

        # The sender is deaf unless this region has sent nothing yet, or the sender
        # takes it for an earlier life.
        deaf_since = None
        if is_announced and not hears_us and not knows_newer:
            deaf_since = now if heard.deaf_since is None else heard.deaf_since
        self.last[sender] = heard._replace(hears_us=hears_us, deaf_since=deaf_since)
        return True

    def note(self, region: int, **what: Any) -> None:
        """Change fields of a region's `Heard`."""
        self.last[region] = self.last[region]._replace(**what)

    def spare(self, gap_s: float, now: float) -> None:
        """Record that this process was held up for so long, and read nothing.

        A region that was alive before counts as heard from now, once: if this process
        is held up again before a message comes, only that time is left out.
        """
        for region, heard in self.last.items():
            when = heard.when + gap_s
            since = heard.deaf_since
            if since is not None:
                since = min(since + gap_s, now)

            was_alive = now - when <= self._silence_s
            if was_alive and not heard.is_spared:
                when = now
                since = None if since is None else now

            self.last[region] = heard._replace(
                when=min(when, now), deaf_since=since, is_spared=True
            )

    @property
    def lives(self) -> tuple[m.Life, ...]:
        """The last life of each region that was heard of."""
        return tuple((r, x.boot) for r, x in sorted(self.last.items()))

    def of_late(self, now: float) -> tuple[m.Life, ...]:
        """List the lives whose last message is recent."""
        return tuple(
            (r, x.boot)
            for r, x in sorted(self.last.items())
            if now - x.when <= self._silence_s
        )

    def silent_s(self, life: m.Life, now: float) -> float:
        """Return for how long nothing came from a life."""
        heard = self.last.get(life[0])
        return now - heard.when if heard and heard.boot == life[1] else float("inf")

    def sends(self, region: int, boot: int, now: float) -> bool:
        """Return whether a region lives this life, and has sent something lately."""
        heard = self.last.get(region)
        return (
            heard is not None
            and heard.boot == boot
            and not heard.has_left
            and now - heard.when <= self._silence_s
        )

    def is_alive(self, region: int, boot: int, now: float) -> bool:
        """Return whether a region lives this life, takes part here, and receives."""
        if not self.sends(region, boot, now) or self.last[region].is_elsewhere:
            return False
        return now - (self.last[region].deaf_since or now) <= self._silence_s

    def alive(self, now: float) -> dict[int, Heard]:
        """Return what is known of each live region."""
        return {r: h for r, h in self.last.items() if self.is_alive(r, h.boot, now)}

    def met(self, region: int, boot: int, now: float) -> None:
        """Record that a region has a seat in the view that begins now."""
        heard = self.last.get(region)
        if heard is None or heard.boot < boot:
            self.last[region] = Heard(boot, now)
        elif heard.boot == boot:
            # A copy of the state has delayed what it receives.
            self.last[region] = heard._replace(step=None, deaf_since=None)


class Book:
    """The messages and the decision of each sync, until every region has applied it."""

    def __init__(self):
        # All regions have applied all syncs that started before this step; their
        # messages are dropped, and late ones are ignored.
        self.floor = 0
        self.reached = 0  # Latest start step of a sync that this region waited for.
        self.own: dict[m.SyncId, bytes] = {}  # Its messages of undecided syncs.
        self.waiting: dict[m.SyncId, float] = {}  # For which syncs, and since when.
        self.rows: dict[m.SyncId, dict[m.Life, bytes]] = {}  # Of undecided syncs.
        # When the quorum of a sync was complete, where this region coordinates.
        self.quorum_s: dict[m.SyncId, float] = {}
        # The coordinator's choices whose messages are not all here yet.
        self.choices: dict[m.SyncId, m.Choice] = {}
        self.decided: dict[m.SyncId, m.Decision] = {}
        # Whose messages the decisions of the present view are of, at its coordinator.
        self.chosen: dict[m.SyncId, tuple[m.Life, ...]] = {}
        # Decisions that this region waited for, and all; the reader clears them.
        self.delivered: list[m.Decision] = []
        self.news: list[m.Decision] = []

    def wait_for(self, sync: m.SyncId, row: bytes | None, now: float) -> None:
        """Wait for a decision, with this region's message or without one."""
        if row is not None:
            self.own[sync] = row
        self.reached = max(self.reached, sync[1])
        self.waiting[sync] = now
        self._settle(sync)

    def collect(self, sender: m.Life, sync: m.SyncId, row: bytes) -> None:
        """Store a region's message."""
        if sync not in self.decided and sync[1] >= self.floor:
            self.rows.setdefault(sync, {})[sender] = row
            self._complete(sync)

    def choose(self, choice: m.Choice) -> None:
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

    def lacks(self, sync: m.SyncId) -> tuple[m.Life, ...]:
        """List the lives whose messages the coordinator chose and are not here."""
        choice = self.choices.get(sync)
        rows = self.rows.get(sync, {})
        if choice is None:
            return ()
        return tuple(life for life in choice.members if life not in rows)

    def spare(self, gap_s: float) -> None:
        """Leave out the time that this process was held up."""
        self.quorum_s = {sync: since + gap_s for sync, since in self.quorum_s.items()}

    def _complete(self, sync: m.SyncId) -> None:
        choice = self.choices.get(sync)
        rows = self.rows.get(sync, {})
        if choice is not None and all(life in rows for life in choice.members):
            rows_chosen = {life[0]: rows[life] for life in choice.members}
            self.learn(m.Decision(choice.epoch, sync, rows_chosen))

    def learn(self, decision: m.Decision) -> None:
        """Store a decision; the first one of a sync holds."""
        sync = decision.sync
        if sync[1] >= self.floor:
            if self.decided.setdefault(sync, decision) is decision:
                self.news.append(decision)
            self._settle(sync)

    def _settle(self, sync: m.SyncId) -> None:
        """Deliver a sync's decision, if there is one and this region waits for it."""
        if sync not in self.decided:
            return
        tables: tuple[dict, ...] = (self.rows, self.quorum_s, self.own, self.choices)
        for table in tables:
            table.pop(sync, None)
        if self.waiting.pop(sync, None) is not None:
            self.delivered.append(self.decided[sync])

    def keep_rows_of(self, senders: Collection[m.Life]) -> None:
        """Drop messages of other lives, since the coordinator has changed."""
        self.quorum_s = {}
        for sync, rows in self.rows.items():
            self.rows[sync] = {life: x for life, x in rows.items() if life in senders}

    def forget_before(self, floor: int) -> None:
        """Forget what every region has applied."""
        self.floor = floor
        tables: tuple[dict, ...] = (self.rows, self.quorum_s, self.choices, self.chosen)
        for table in (self.decided, *tables):
            for sync in [s for s in table if s[1] < floor]:
                del table[sync]

    def undecided(self) -> list[m.SyncId]:
        """List the syncs that this region waits for or has messages of."""
        has_rows = {sync for sync, rows in self.rows.items() if rows}
        return sorted(self.waiting.keys() | has_rows)

    def behind(self, since_step: int) -> int:
        """Count the decided syncs after `since_step` that are not reached here."""
        reached = max(self.reached, since_step)
        return sum(start > reached for _, start in self.decided)

    def beyond(self, known: Iterable[m.SyncId]) -> tuple[m.Decision, ...]:
        """List the decisions of all syncs but `known`."""
        known = set(known)
        return tuple(d for sync, d in self.decided.items() if sync not in known)
