"""One region's side of the agreement, as a pure state machine: no socket, no clock.

Regions are jobs that may die at any moment. All that take part have to take the same
mean of the same messages. The rules:

- A *view* is a set of regions with a number, the epoch. The region that proposed it
  coordinates it: each region sends its message of a sync to all, the coordinator
  decides of whose messages the mean is, and tells all; who misses one of these asks it
  for them. It waits for every region of the view, but `grace_s` after there were
  `quorum` messages for nobody any more.
- A region that says nothing for `dead_after_s`, says that it does not hear, or comes
  back in another life, is dead.
  Then the coordinator, or if it is dead the lowest region that lives, proposes the next
  view. Where the coordinator is shunned, or at a faulty link that is to be routed
  around, the lowest region that is well does: its lists go over good links, and what
  a faulty one delays is sent on by it. Who promises tells every decision it has, and
  takes none of an earlier view from then on. When all have promised the view holds;
  every decision that one of them has taken holds in it, and only syncs without one are
  decided anew.
- So no two regions of a view ever take different means of a sync, whoever died between
  two messages. A region that was only silent finds that the others have gone on
  without it, takes part no more (`is_over`), and begins anew.
- Who is asked to stop says so, and is as good as dead from then on: nobody waits for
  its silence. What it does after that (a checkpoint) holds nobody up.
- Who is at its end stays until all that live have applied what it knows decided
  (`is_needed`): a region that leaves takes its word on decisions with it, as the dead
  do, and the last of a run would be decided anew by who is left.
- What is decided is kept until every region of the view has applied it. Where the
  others do not wait, a straggler would have them keep ever more: who has not come to
  `max_behind` syncs that are decided leaves by itself, and begins anew at the step of
  the others. So nobody ever keeps more than these and those that are on their way.
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

import sys

from cocodc_jax.elastic.commit import Deciding
from cocodc_jax.elastic.failure_detector import Timing
from cocodc_jax.elastic.messages import (
    Beat,
    Choice,
    Decision,
    Install,
    Join,
    Leave,
    Message,
    Promise,
    Propose,
    Report,
    Row,
    Seat,
    View,
    Want,
)
from cocodc_jax.elastic.straggler_detector import Silence, Silences
from cocodc_jax.elastic.times import Times

# A region looks at what has come at least twice a beat, if nothing holds it up.
_HELD_UP_BEATS = 2
# Beats, or share of a sync if that is longer, after which is told what has not come.
_TELL_BEATS, _TELL_SYNCS = 4, 0.5


class Member(Deciding):
    """What one region knows, and what it says next.

    Attributes:
      is_announced: whether it asks to take part, and the others shall hear of it.
      times: of messages.
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
        super().__init__(region, num_regions, boot, step, timing, now, min_regions)
        self._beat_at, self._looked_at = -float("inf"), now
        self.is_announced, self._has_left = True, False
        self._silences = Silences(timing.beat_s)
        self.times = Times(region, num_regions, _TELL_BEATS * timing.beat_s)

    def hears_others(self) -> bool:
        """Tell whether others take part already."""
        return any(heard.step is None for heard in self._hearing.last.values())

    def have_come_to(self, step: int, now: float) -> bool:
        """Tell whether all that live and take part have applied what began before."""
        alive = self._hearing.alive(now).values()
        return all(x.oldest_step >= step for x in alive if x.step is None)

    def joiners(self, now: float) -> dict[int, int]:
        """Return the lives of the regions that wait for this one to let them in."""
        if not self.is_in or self.coordinator != self.region:
            return {}
        return {
            r: heard.boot
            for r, heard in self._hearing.alive(now).items()
            if heard.step is not None
            and heard.hears_us
            and r not in self._admitted
            and not self._has_seat(r, heard.boot)
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

    def silent(self, now: float) -> dict[int, Silence]:
        """Return who of those that take part is silent, and not yet taken for dead."""
        seats = self.view.seats.items()
        others = {(r, x.boot) for r, x in seats if r != self.region}
        return self._silences.overdue(others, now)

    def announce(self, now: float) -> None:
        """Ask to take part."""
        self.is_announced, self._born = True, now

    def finish(self, now: float) -> None:
        """Have applied all that there is, and say so at once.

        Args:
          now: seconds.
        """
        self.oldest_step = sys.maxsize
        if self.is_in:
            self._beat(now)

    def is_needed(self, now: float) -> bool:
        """Tell whether others may still ask for what this region knows decided."""
        if not self.is_in:
            return False
        last = self._hearing.last
        oldest = min(
            (
                last[r].oldest_step
                for r, seat in self.view.seats.items()
                if r != self.region and self._is_alive(r, seat.boot, now)
            ),
            default=sys.maxsize,
        )
        newest = max((start for _, start in self._book.decided), default=-1)
        return bool(self._book.waiting) or oldest <= newest

    def leave(self) -> None:
        """Take part no more; the others need not wait for the silence."""
        if not self.is_over:
            self._tell_all(Leave())
            self.is_over, self._has_left = "it has left", True

    def tick(self, now: float) -> None:
        """Do what time has made due."""
        self._looked_at = now
        if self._has_left and now - self._beat_at >= self._timing.beat_s:
            self._beat_at = now
            self._tell_all(Leave())  # The word may have been lost.
        if self.is_over or not self.is_announced:
            return
        if self._is_far_behind():
            return
        if now - self._beat_at >= self._timing.beat_s:
            self._beat_at = now
            self._beat(now)
        seats = self._next_seats(now)
        if seats is not None:
            self._propose(seats, now)
        self._decide(now)
        self._note_decided(now)
        for report in self.times.due(now):
            for region in self.view.seats:
                self._tell(region, report)
        self._trim()

    def receive(self, sender: int, boot: int, message: Message, now: float) -> None:
        """Take in what another region says.

        Args:
          sender: region.
          boot: its life; an earlier one than is known is not listened to.
          message: of any kind but `Snapshot`.
          now: seconds.
        """
        if self.is_over or sender == self.region:
            return
        if not self._hearing.hear(sender, boot, message, now, self.is_announced):
            return
        self._silences.heard((sender, boot), now)
        if isinstance(message, Beat):
            view, mine = message.view, self.view
            self._highest = max(self._highest, message.promised, view.epoch)
            is_ahead = self.region not in view.seats and view.epoch > mine.epoch
            self._hearing.note(sender, is_elsewhere=self.is_in and is_ahead)
            self.times.sign((sender, boot), message.clock_s, now)
        match message:
            case Join() if self._has_seat(sender, boot) and self._holds:
                # The word that it may come in was lost.
                self._tell(sender, Install(self.view, self._book.beyond(())))
            case Beat(view):
                self._compare(sender, view)
            case Row(epoch, sync, row, clock_s):
                self.times.came((sender, boot), sync, clock_s, self._there(now))
                if epoch in (self.view.epoch, self._promised):
                    self._book.collect((sender, boot), sync, row)
            case Want(epoch, sync) if epoch == self.view.epoch:
                self._answer(sender, boot, sync, now)
            case Decision(epoch) if epoch == self.view.epoch == self._promised:
                self._book.learn(message)
            case Choice(epoch) if epoch == self.view.epoch == self._promised:
                self._book.choose(message)
            case Report():
                self.times.told(sender, message, now)
            case Propose(view, base_epoch, known):
                if self._descends(sender, boot, base_epoch):
                    self._promise(sender, view, known, now)
            case Promise(epoch):
                self._count_promise(sender, message, now)
            case Install(view, decisions):
                if view.epoch == self._promised and view.epoch > self.view.epoch:
                    self._enter(view, decisions, now)

    # Signs of life, and views that have gone on.

    def _is_far_behind(self) -> bool:
        """Leave if the others are so far ahead that they keep too much for this one."""
        seat = self.view.seats.get(self.region)
        if not self.is_in or seat is None:
            return False
        behind = self._book.behind(seat.since_step)
        if behind <= self._timing.max_behind:
            return False
        self.leave()
        self.is_over = (
            f"it is {behind} syncs behind the others, more than "
            f"max_behind_syncs={self._timing.max_behind}"
        )
        return True

    def _beat(self, now: float) -> None:
        hears = self._hearing.of_late(now)
        if not self.is_in:
            self._tell_all(Join(self._step, hears))
            return
        self._tell_all(Beat(self.view, self._promised, self.oldest_step, hears, now))
        self._ask(now)

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

    # What messages took.

    def _there(self, now: float) -> float:
        """Return when a message was there that is seen now, at the earliest.

        Where this process was held up, that is no fault of who sent it.
        """
        was_held_up = now - self._looked_at > _HELD_UP_BEATS * self._timing.beat_s
        return self._looked_at if was_held_up else now

    def _note_decided(self, now: float) -> None:
        """Have told what messages took, of what this region took part in."""
        seat = self.view.seats.get(self.region)
        for decision in self._book.news:
            self._silences.decided(now)
            if seat is not None and seat.since_step < decision.sync[1]:
                self.times.decided(decision.sync, decision.rows, now)
        beats_s = _TELL_BEATS * self._timing.beat_s
        self.times.wait_s = max(beats_s, _TELL_SYNCS * self._silences.sync_s)
        self._book.news.clear()
