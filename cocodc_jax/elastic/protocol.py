"""One region's side of the agreement, as a pure state machine: no socket, no clock.

Regions are jobs that may die at any moment. All that take part must apply the same mean
of the same messages. The rules:

- **Views.** A *view* is a set of regions with a name, the epoch. The life that
  proposed it coordinates it, and no other decides in it. Each region sends its
  message of a sync to all. The coordinator decides which messages the mean is of, and
  announces it. A region that lacks a message asks the coordinator for it.
- **Waiting.** The coordinator waits for every region of the view. Once `quorum`
  messages have arrived, it waits for `grace_s` at most.
- **Death.** A region is dead if it sends nothing for `dead_after_s`, says that it does
  not receive, or returns in another life. Then the coordinator proposes the next view,
  or the lowest live region if the coordinator is dead.
- **Lives.** A seat belongs to one life of a region, see `lives.py`. A life that sees a
  newer one of its region with a seat ends for good (`is_superseded`). It may be where
  no message reaches it by the region's address, so others answer it (`is_outlived`).
- **Held up.** A region whose process was held up for more than a beat leaves that time
  out, and gives the others a fresh `dead_after_s`, because it may not have read yet
  what they have sent.
- **Faulty links.** If the coordinator is shunned, or has a faulty link that is to be
  routed around, the lowest healthy region proposes a view of its own. As coordinator it
  forwards what a faulty link delays.
- **Promises.** A region that promises a view reports every decision it knows, and takes
  no decision of an earlier view from then on. Once all have promised, the view holds.
  Every decision that one of them knows holds in it. Only syncs without a decision are
  decided again. If a promised view does not come about, another one is proposed.
- **Result.** No two regions of a view ever apply different means of a sync, at whatever
  moment a region dies. A region that was only silent finds that the others continued
  without it. It takes part no more (`why_left`), and restarts.
- **Too few.** If fewer than `min_regions` of a view are left, with those that they have
  admitted, no view follows it. They wait until another region is there. Then they end
  (`why_left`) and begin again with it: the furthest continues with its state, and the
  others start from a copy.
- **Leaving.** A region that is asked to stop announces it and counts as dead at once.
  Its last checkpoint delays no other region.
- **The end.** A region that has finished stays until all live regions have applied the
  decisions that it knows (`is_needed`). If it left earlier, the remaining regions could
  decide the last syncs again.
- **Stragglers.** A decision is kept until every region of the view has applied it. A
  region that is `max_behind` decided syncs behind leaves by itself, and restarts at the
  step of the others. So every region keeps a bounded number of messages.
- **Marks.** Regions compare digests of their outer fragments, see `marks.py`. A region
  whose fragment differs from that of most leaves by itself, and starts from a copy.
- **Two views.** If a network is cut in two, both parts may form a view. Once they meet,
  the larger continues, of equal ones that with the lowest region. The regions of the
  other restart from it, and the outer steps that they took since the cut are lost. With
  `min_regions` above M / 2 the smaller part waits: there is no second view, unless a
  region has a life in each part.

So a message of a region that dies counts if all other messages arrive before the region
counts as dead; later it does not. If the coordinator dies before it decides, its
successor collects the messages again. If it dies after some regions received its
decision, the decision holds for all; if none did, it never existed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from cocodc_jax.elastic import lives
from cocodc_jax.elastic import messages as m
from cocodc_jax.elastic.agreement import AGAIN_BEATS, Agreement
from cocodc_jax.elastic.marks import Finding, Marks
from cocodc_jax.elastic.place import Place
from cocodc_jax.elastic.records import FORGET
from cocodc_jax.elastic.times import Silence, Silences, Times

# A region reads its messages at least twice a beat, unless its process is held up.
_HELD_UP_BEATS = 1
# Times of messages are taken from the last look if it is further back.
_LATE_LOOK_BEATS = 2
# Beats, or share of a sync if longer, after which missing messages are reported.
_TELL_BEATS = 4
_TELL_SYNCS = 0.5


class Member(Agreement):
    """What one region knows, and what it sends next."""

    def __init__(
        self, place: Place, boot: int, step: int, now: float, is_new: bool = True
    ):
        """Start outside of any view; `now` are seconds of a monotonic clock.

        `boot` is the region's life, and `step` that of its own checkpoint, 0 for none.
        `is_new` says that it is the first life of its process, see `lives.py`.
        """
        super().__init__(place, boot, step, now)
        self._is_new = is_new
        self.is_announced = True
        self.is_superseded = False  # It is over because a newer life has its seat.
        self._doubts_since: float | None = None  # Since a newer life has its seat.
        self._has_left = False
        self.gave_up = False

        self._beat_at = -float("inf")
        self._looked_at = now
        self._read_at = now
        self.held_up_s = 0.0  # In all.

        self._marks = Marks()
        self.findings: list[Finding] = []  # The reader clears the list.
        beat_s = place.timing.beat_s
        self._silences = Silences(beat_s)
        self.times = Times(self.region, self._num, _TELL_BEATS * beat_s)

    def hears_others(self) -> bool:
        """Return whether others take part already."""
        return any(heard.step is None for heard in self._hearing.last.values())

    def others_step(self, now: float) -> int:
        """Return the last step that all live regions of a view have reached."""
        alive = self._hearing.alive(now).values()
        steps = [x.oldest_step for x in alive if x.step is None]
        return min(steps, default=sys.maxsize)

    def joiners(self, now: float) -> dict[int, int]:
        """Return the lives of the regions that wait for this one to admit them."""
        if not (self.is_in and self._leads):
            return {}
        return {
            r: heard.boot
            for r, heard in self._hearing.alive(now).items()
            if heard.step is not None
            and heard.hears_us
            and r not in self._admitted
            and not self.view.has((r, heard.boot))
        }

    def admit(self, region: int, boot: int, since_step: int, oldest_step: int) -> None:
        """Add a region of `joiners` to the next view.

        It starts from a copy of this region at `since_step`, in which all syncs that
        started before `oldest_step` are applied.
        """
        self._admitted[region] = m.Seat(boot, since_step, self.life), oldest_step

    def silent(self, now: float) -> dict[int, Silence]:
        """Return which regions of the view are silent, but not yet counted as dead."""
        seats = self.view.seats.items()
        others = {(r, x.boot) for r, x in seats if r != self.region}
        return self._silences.overdue(others, now)

    def announce(self, now: float) -> None:
        """Ask to take part."""
        self.is_announced = True
        self._born = now

    def finish(self, now: float) -> None:
        """Announce at once that this region has applied all syncs of the run."""
        self.oldest_step = sys.maxsize
        if self.is_in:
            self._beat(now)

    def is_needed(self, now: float) -> bool:
        """Return whether others may still ask for decisions that this region knows."""
        if not self.is_in:
            return False
        alive = self._hearing.alive(now).items()
        oldest = [x.oldest_step for r, x in alive if self.view.has((r, x.boot))]
        newest = max((start for _, start in self._book.decided), default=-1)
        return bool(self._book.waiting) or min(oldest, default=sys.maxsize) <= newest

    def leave(self) -> None:
        """Take part no more, and announce it so that no region waits."""
        if not self.why_left:
            self._tell_all(m.Leave())
            self.why_left = "it has left"
            self._has_left = True

    def give_up(self, now: float) -> None:
        """Wait no more for means that too few regions are left to decide."""
        if self._has_too_few(now):
            self.leave()
            self.gave_up = True

    def sign_of_life(self, now: float) -> m.Join | m.Beat:
        """Return what this region says every beat."""
        hears = self._hearing.of_late(now)
        knows = self._hearing.lives
        if not self.is_in:
            return m.Join(self._step, hears, knows)
        return m.Beat(
            self.view,
            self._promised,
            self.oldest_step,
            hears,
            clock_s=now,
            knows=knows,
            marks=self._marks.last,
        )

    def is_outlived(self, life: m.Life) -> bool:
        """Return whether a newer life of the same region has a seat in this view.

        A `sign_of_life` then says so to the older one.
        """
        region, boot = life
        seat = self.view.seats.get(region)
        return self.is_in and seat is not None and seat.boot > boot

    def mark(self, marks: Iterable[m.Mark]) -> None:
        """Report what this region's outer fragments were after its last syncs."""
        self._marks.note(self.life, marks)

    def tick(self, now: float) -> None:
        """Do what time has made due."""
        self._note_gap(now)
        self._looked_at = now
        if self._has_left and now - self._beat_at >= self._timing.beat_s:
            self._beat_at = now
            self._tell_all(m.Leave())  # The last one may have been lost.

        if self.why_left or not self.is_announced or self._leave_if_far_behind():
            return

        if now - self._beat_at >= self._timing.beat_s:
            self._beat_at = now
            self._beat(now)

        if self._has_to_begin_again(now):
            self.why_left = "fewer than min_regions are left, and others are there"
            return
        if self._leave_if_astray():
            return

        seats = self._next_seats(now)
        if seats is not None:
            self._propose(seats, now)
        self._decide(now)
        self._note_decided(now)

        for report in self.times.due(now):
            for region in self.view.seats:
                self._tell(region, report)
        self._trim()

    def receive(self, sender: int, boot: int, message: m.Message, now: float) -> None:
        """Process another region's message, of any kind but `Snapshot`.

        Messages of an earlier life, `boot`, of the sender are ignored. Only the life
        that coordinates a view may decide in it, propose it, and have it hold.
        """
        self._note_gap(now)
        if self.why_left or sender == self.region:
            return

        if isinstance(message, m.Join | m.Beat):
            self._learn_of_own_lives(message, now)
        if not self._hearing.hear(sender, boot, message, now, self.is_announced):
            return

        life = sender, boot
        self._silences.heard(life, now)
        match message:
            case m.Join() if self.view.has(life) and self._holds:
                self._repeat_view(sender, now)
            case m.Beat():
                self._beat_came(life, message, now)
            case m.Row():
                self._row_came(life, message, now)
            case m.Want(epoch, sync, lacks) if epoch == self.view.epoch:
                if self.view.has(life):
                    self._answer(life, sync, lacks, now)
            case m.Decision() if self._is_decided_by(life, message.epoch):
                self._book.learn(message)
            case m.Choice() if self._is_decided_by(life, message.epoch):
                self._choice_came(message, now)
            case m.Report():
                self.times.learn(sender, message, now)
            case m.Propose(view, base_epoch, known):
                is_its_own = view.epoch.coordinator == life
                if is_its_own and self._descends(life, base_epoch):
                    self._promise(sender, view, known, now)
            case m.Promise():
                self._count_promise(life, message, now)
            case m.Install(view, decisions) if view.epoch.coordinator == life:
                if view.epoch == self._promised and view.epoch > self.view.epoch:
                    self._enter(view, decisions, now)

    def _beat_came(self, life: m.Life, beat: m.Beat, now: float) -> None:
        """Learn from a heartbeat which view the sender is in, and what it has."""
        sender, _ = life
        highest = max(beat.promised, beat.view.epoch)
        if highest > self._highest:
            self._highest = highest
            self._highest_at = now

        has_seat = beat.view.has(self.life)
        is_ahead = not has_seat and beat.view.epoch > self.view.epoch
        self._hearing.note(sender, is_elsewhere=self.is_in and is_ahead)

        self.times.sign(life, beat.clock_s, now)
        self._marks.hear(life, beat.marks)
        self._compare(sender, beat.view, now)

    def _row_came(self, life: m.Life, message: m.Row, now: float) -> None:
        """Collect another region's message of a sync, and time it."""
        arrived_at = self._arrival_of_unread(now)
        self.times.came(life, message.sync, message.clock_s, arrived_at)
        self._detoured.discard(life)
        if message.epoch in (self.view.epoch, self._promised):
            self._book.collect(life, message.sync, message.row)

    def _is_decided_by(self, life: m.Life, epoch: m.Epoch) -> bool:
        """Return whether decisions of a view hold here that this life announces."""
        is_present = epoch == self.view.epoch == self._promised
        return is_present and epoch.coordinator == life

    def _tell_all(self, message: m.Message) -> None:
        for region in range(self._num):
            self._tell(region, message)

    def _repeat_view(self, region: int, now: float) -> None:
        """Announce the view again: the message that it holds may have been lost."""
        times = self._repeated.get(region, 0)
        if now - self.entered_at > (AGAIN_BEATS << times) * self._timing.beat_s:
            self._repeated[region] = times + 1
            self._tell(region, m.Install(self.view, self._book.beyond(())))

    # Time in which this process was held up, and other lives of this region.

    def _note_gap(self, now: float) -> None:
        """Leave out the time in which this process did not read its messages.

        What the others have sent meanwhile may be read only after this.
        """
        gap_s = now - self._read_at
        self._read_at = now
        if gap_s <= _HELD_UP_BEATS * self._timing.beat_s:
            return

        self.held_up_s += gap_s
        if gap_s > self._timing.dead_after_s:
            self._is_new = False  # Another life may have begun meanwhile.

        self._born += gap_s
        if self._doubts_since is not None:
            self._doubts_since += gap_s
        self.entered_at += gap_s
        self._promised_at += gap_s
        self._highest_at += gap_s
        self._hearing.spare(gap_s, now)
        self._book.spare(gap_s)

    def _learn_of_own_lives(self, message: m.Join | m.Beat, now: float) -> None:
        """Take a number above all lives of this region, or end if a newer has a seat.

        Only a region that has just started, and has said nothing yet, is newer than
        every life that the others know.
        """
        known = [boot for region, boot in message.knows if region == self.region]
        seat = None
        if isinstance(message, m.Beat):
            seat = message.view.seats.get(self.region)
        if seat is not None:
            known.append(seat.boot)

        newest = max(known, default=0)
        if newest <= self.boot:
            return

        has_just_begun = now - self._born <= self._timing.dead_after_s
        if self._is_new and has_just_begun and not self.is_announced:
            self.boot = lives.above(newest, self.boot)
            self._hearing.life = self.life
        elif seat is not None and seat.boot > self.boot and not self._is_in_doubt(now):
            self.is_superseded = True
            self.why_left = "it was started again, and its newer life takes part"

    def _is_in_doubt(self, now: float) -> bool:
        """Return whether the newer life may be a dead one, whose place this one takes.

        Its number is higher if the clock was set back since, and this region heard
        nobody before it asked. The others forget a life that is dead.
        """
        if self._doubts_since is None:
            self._doubts_since = now
        limit_s = (FORGET + 1) * self._timing.dead_after_s
        return self._is_new and not self.is_in and now - self._doubts_since <= limit_s

    def _leave_if_astray(self) -> bool:
        """Leave if this region's outer model differs from the others'; say whether."""
        for finding in self._marks.findings(self.view):
            self.findings.append(finding)
            if self.region in finding.astray:
                self.leave()
                fragment, step = finding.sync
                self.why_left = (
                    f"its outer fragment {fragment} was not that of regions "
                    f"{[*finding.right]} after the sync of step {step}"
                )
                return True

        return False

    # Heartbeats, and views that continued without this region.

    def _leave_if_far_behind(self) -> bool:
        """Leave if the others are too far ahead; say whether."""
        seat = self.view.seats.get(self.region)
        if not self.is_in or seat is None:
            return False

        behind = self._book.behind(seat.since_step)
        if behind <= self._timing.max_behind:
            return False

        self.leave()
        self.why_left = (
            f"it is {behind} syncs behind the others, more than "
            f"max_behind_syncs={self._timing.max_behind}"
        )

        return True

    def _has_to_begin_again(self, now: float) -> bool:
        """Return whether this view is too small for ever, but another is possible.

        This region may wait for a mean that cannot be decided, and admits nobody then.
        """
        alive = self._hearing.alive(now).items()
        others = [x for r, x in alive if not self.view.has((r, x.boot))]
        is_short = self._min <= len(self.view.seats) and self._has_too_few(now)
        return is_short and any(x.hears_us for x in others)

    def _has_too_few(self, now: float) -> bool:
        """Return whether no view can follow this one."""
        alive = self._hearing.alive(now).items()
        left = [r for r, heard in alive if self.view.has((r, heard.boot))]
        return self.is_in and len(left) + 1 < min(self._min, len(self.view.seats))

    def _beat(self, now: float) -> None:
        self._tell_all(self.sign_of_life(now))
        if self.is_in:
            self._ask(now)

    def _compare(self, sender: int, theirs: m.View, now: float) -> None:
        """Check whether the others continued without this region."""
        if not self.is_in:
            return

        mine = self.view.seats
        if not theirs.has(self.life):
            rest = m.View(
                seats={r: x for r, x in mine.items() if r not in theirs.seats}
            )
            is_apart = len(rest.seats) == len(mine)
            if not is_apart and theirs.epoch < self.view.epoch:
                return  # The sender does not know of this region's view yet.

            if theirs.rank > rest.rank:
                self.why_left = (
                    f"region {sender} is of a larger part of a run cut in two"
                    if is_apart
                    else f"region {sender} and others went on without this one"
                )
        elif theirs.epoch < self.view.epoch and sender in mine and self._holds:
            self._repeat_view(sender, now)

    # Times of messages.

    def _arrival_of_unread(self, now: float) -> float:
        """Return the earliest time at which a message that is read now had arrived.

        If this process was held up, the sender is not to blame.
        """
        was_held_up = now - self._looked_at > _LATE_LOOK_BEATS * self._timing.beat_s
        return self._looked_at if was_held_up else now

    def _note_decided(self, now: float) -> None:
        """Pass new decisions on to the times and the silences."""
        seat = self.view.seats.get(self.region)
        for decision in self._book.news:
            self._silences.decided(now)
            if seat is not None and seat.since_step < decision.sync[1]:
                self.times.decided(decision.sync, decision.rows, now)
        beats_s = _TELL_BEATS * self._timing.beat_s
        self.times.wait_s = max(beats_s, _TELL_SYNCS * self._silences.sync_s)
        self._book.news.clear()
