"""One region's connection to the others: a thread between protocol and channel."""

from __future__ import annotations

import concurrent.futures
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from cocodc_jax.elastic import lives
from cocodc_jax.elastic import messages as m
from cocodc_jax.elastic.marks import Finding
from cocodc_jax.elastic.place import Place
from cocodc_jax.elastic.protocol import Member
from cocodc_jax.elastic.times import Measured, Silence
from cocodc_jax.files import say

# How often a wait looks whether the region should stop, and for how long it then still
# waits for a mean, which usually is on its way.
_POLL_S = 0.2
_GIVE_UP_S = 0.4
# Regions to leave out, and pairs `(sender, receiver)` whose messages to forward.
Faulty = tuple[frozenset[int], frozenset[tuple[int, int]]]


class Arrived(NamedTuple):
    """A message as it arrived."""

    frames: list[bytes]
    way_back: Any = None  # For `Channel.answer`; None if nothing goes back.


class Channel(Protocol):
    """What carries frames between regions: sockets, or objects of a store.

    What is sent may be lost, come twice or in another order: the protocol asks again.
    One thread alone may use a channel, but for `wake`.
    """

    def receive(self, seconds: float) -> list[Arrived]:
        """Return new messages; waits for one, for `wake`, or so many seconds."""
        ...

    def send(self, regions: Sequence[int], frames: list[bytes]) -> None:
        """Send one message to some regions, without waiting for them."""

    def answer(self, way_back: Any, frames: list[bytes]) -> None:
        """Send a message back to where another came from, wherever that is.

        A life that is not at its region's address any more is reached in no other way.
        """

    def wake(self) -> None:
        """Have `receive` return now; any thread may call this."""

    def close(self) -> None:
        """Send what is still to be sent, for a few seconds."""


def open_channel(place: Place, boot: int, max_frame_bytes: int) -> Channel:
    """Return the channel of a region; rows and arrays have `max_frame_bytes` at most.

    Raises ImportError if a package is missing, OSError if the address cannot be
    listened at.
    """
    if place.via:
        from cocodc_jax.elastic.objects import Objects

        return Objects(place, boot, max_frame_bytes)
    from cocodc_jax.elastic.sockets import Sockets

    return Sockets(place, max_frame_bytes)


def _reach(via: str) -> None:
    from cocodc_jax.elastic.objects import reach

    reach(via)


class Watch(Protocol):
    """Receives message times, and names what is faulty."""

    def __call__(self, measured: Measured, present: tuple[int, ...]) -> Faulty:
        """Process the times of one sync; `present` are the regions that take part."""
        ...

    def silent(self, silences: Mapping[int, Silence]) -> None:
        """Process which regions are silent now."""


class LeftBehindError(RuntimeError):
    """The other regions continue without this one, which has to restart."""

    state: Any = None  # This region's last state, if it can be restarted from.


class AskedToStopError(LeftBehindError):
    """The region was asked to stop while it waited to take part."""


class SupersededError(RuntimeError):
    """This region was started again elsewhere, and that life takes part.

    It must not be started again: the two would push each other out.
    """


class Link:
    """A region among the others; use as a context manager."""

    def __init__(
        self,
        place: Place,
        run: str,
        max_frame_bytes: int,
        step: int = 0,
        is_announced: bool = True,
        watch: Watch | None = None,
        last_boot: int | None = None,
    ):
        """Listen, and announce this region to the others, at once or at `join`.

        Messages of another `run` are ignored. `max_frame_bytes` is the size of the
        largest valid row or array, and `step` that of the region's own checkpoint, 0
        for none. `last_boot` is the `boot` of this process's last link, None for the
        first one: a region that returns is no newer than one that started since.

        Raises ValueError if `place.via` cannot be reached when a region is new: all
        its messages would be lost. One that returns waits for the store.
        """
        self.place = place
        self._run = run
        self._step = step

        is_new = last_boot is None
        if is_new and place.via:
            _reach(place.via)
        boot = lives.new_boot() if is_new else lives.returned(last_boot)
        self._member = Member(place, boot, step, time.monotonic(), is_new)
        self._member.is_announced = is_announced

        self._lock = threading.Condition()  # Notified at every turn of the thread.
        self._futures: dict[m.SyncId, Future] = {}
        self._snapshots: dict[m.Life, m.Snapshot] = {}  # By sender: parts may differ.
        self._outlived: list[Any] = []  # Ways back to lives that a newer one replaced.
        self._has_said_rounding = False
        self._ended = False
        self._answered_s = 0.0
        self._watch = watch
        # Whether it was asked to stop: every wait then ends. Any thread calls it.
        self.should_stop: Callable[[], bool] = lambda: False
        self.strangers = 0

        self._channel = open_channel(place, boot, max_frame_bytes)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    @property
    def region(self) -> int:
        """The index of this region."""
        return self.place.region

    @property
    def boot(self) -> int:
        """The life of this region, see `lives.py`."""
        with self._lock:
            return self._member.boot

    @property
    def view(self) -> m.View:
        """The regions that take part, as this region knows it."""
        with self._lock:
            return self._member.view

    def hears_others(self, seconds: float) -> bool:
        """Return whether others take part already, after at most `seconds`."""
        with self._lock:
            return self._wait_until(self._member.hears_others, seconds)

    def close(self) -> None:
        """Leave, after pending messages are sent."""
        with self._lock:
            if self._ended:
                return
            self._member.leave()
            self._ended = True
            self._channel.wake()
        self._thread.join()

    def wait_for_step(self, step: int, timeout_s: float) -> int:
        """Wait until the others reach a step; return the one that all have reached.

        Waits for `timeout_s` at most. Returns 0 if no others take part, or they end.
        """
        member = self._member
        with self._lock:
            self._wait_until(
                lambda: member.others_step(time.monotonic()) >= step, timeout_s
            )
            reached = member.others_step(time.monotonic())
        return reached if reached < sys.maxsize else 0

    def leave(self) -> None:
        """Announce that this region leaves, so that no other region waits for it.

        All decisions that it waits for must have arrived.
        """
        with self._lock:
            self._member.leave()
            self._channel.wake()

    def send(self, sync: m.SyncId, row: bytes, step_s: float = 0.0) -> Future:
        """Send this region's message of a sync; the future's result is the decision.

        If the others continue without this region, that is an empty decision of
        `NO_EPOCH`, and the next `at` raises. `step_s` are the seconds of an inner step
        in this region, 0 if not measured.
        """
        with self._lock:
            self._member.times.step_s = step_s
            self._member.offer(sync, row, time.monotonic())
            return self._future(sync)

    def expect(self, sync: m.SyncId) -> Future:
        """Return the future of a sync's decision without sending a message."""
        with self._lock:
            self._member.expect(sync, time.monotonic())
            return self._future(sync)

    def at(self, oldest_step: int, marks: Sequence[m.Mark] = ()) -> dict[int, int]:
        """Report this region's progress; return the regions that wait for a copy.

        This region has applied all syncs that started before `oldest_step`. `marks` are
        what its outer fragments were after the last ones. Returns lives by region.
        Raises `LeftBehindError` if the others continue without it, `SupersededError`
        if this region was started again.
        """
        with self._lock:
            self._check()
            self._member.mark(marks)
            self._member.oldest_step = oldest_step
            return self._member.joiners(time.monotonic())

    def agree(self, value: int) -> int:
        """Return what the processes of this region agree on: it has one."""
        return value

    def finish(self, timeout_s: float) -> None:
        """Wait at the end of a run until the others need no decision of this region."""
        with self._lock:
            self._member.finish(time.monotonic())
            self._channel.wake()
            self._wait_until(
                lambda: not self._member.is_needed(time.monotonic()), timeout_s
            )

    def let_in(
        self, region: int, boot: int, copy: m.Snapshot, oldest_step: int
    ) -> None:
        """Send a region a copy to start from, and propose a view with it."""
        with self._lock:
            self._member.outbox.append((region, copy))
            self._member.admit(region, boot, copy.step, oldest_step)
            self._channel.wake()

    def join(self, timeout_s: float) -> m.Snapshot | None:
        """Wait until this region takes part; return the copy that it starts from.

        None where the run begins, or continues from this region's own checkpoint.
        Raises `LeftBehindError` if others begin without it, `AskedToStopError` if it
        should stop, and `SupersededError` if this region was started again.
        """
        with self._lock:
            if not self._member.is_announced and not self.should_stop():
                self._member.announce(time.monotonic())
                self._channel.wake()

            if not self._wait_until(self._can_begin, timeout_s):
                self._check_not_stopped()
                raise TimeoutError(
                    f"no region admitted region {self.region} within {timeout_s:.0f} s"
                )

            seat = self._member.view.seats[self.region]
            copy = self._copy(seat)
            self._snapshots = {}
            return copy

    def _copy(self, seat: m.Seat) -> m.Snapshot | None:
        """Return the copy that a seat goes with.

        Two parts of a cut network may both admit this region at one step: a copy of the
        other part is not what the regions of this view have.
        """
        copy = self._snapshots.get(seat.source)
        return copy if copy and copy.step == seat.since_step else None

    def _can_begin(self) -> bool:
        """Return whether this region has a seat, and what it starts from."""
        self._check()
        seat = self._member.view.seats.get(self.region)
        if seat and (seat.source == self._member.life or self._copy(seat)):
            return True

        self._check_not_stopped()
        if seat is None:
            return False

        # Sockets deliver the copy before the seat; in a store it may take longer.
        timing = self.place.timing
        limit_s = timing.start_s if self.place.via else timing.dead_after_s
        if time.monotonic() - self._member.entered_at > limit_s:
            raise TimeoutError(
                f"the copy of the others' state for region {self.region} did not come "
                f"within {limit_s:.0f} s: it was lost; start the region again"
            )

        return False

    def _check_not_stopped(self) -> None:
        if self.should_stop():
            raise AskedToStopError(f"region {self.region} was asked to stop")

    def _wait_until(self, is_met: Callable[[], bool], timeout_s: float) -> bool:
        """Wait, with the lock held, for a condition or a request to stop.

        Time in which this process was held up does not count: a region that was frozen
        while it waited then reads why it need not, in place of giving up and being
        started again.
        """
        beat_s = self.place.timing.beat_s
        held_up_s = self._member.held_up_s

        end_s = time.monotonic() + timeout_s
        while not is_met():
            rest_s = end_s + self._member.held_up_s - held_up_s - time.monotonic()
            if rest_s <= 0:
                return is_met()
            if self.should_stop():
                return False

            wait_s = min(rest_s, beat_s, _POLL_S)
            began_s = time.monotonic()
            self._lock.wait(wait_s)

            if time.monotonic() - began_s > wait_s + beat_s:
                self._lock.wait(beat_s)  # It was frozen: the thread notes it next.

        return True

    def wait_for(self, future: Future) -> Any:
        """Return what arrives in a future that depends on a decision of `send`.

        A region that is asked to stop waits for it no longer than a moment. Then it
        leaves the others, and all decisions that it still waits for are empty.
        """
        asked_at = None
        while not concurrent.futures.wait([future], _POLL_S).done:
            if not self.should_stop():
                continue
            now = time.monotonic()
            asked_at = now if asked_at is None else asked_at
            if now - asked_at >= _GIVE_UP_S:
                self._give_up()
        return future.result()

    def _give_up(self) -> None:
        """Leave, and end the wait for decisions."""
        with self._lock:
            if self._member.why_left:
                return
            self._member.leave()
            self._member.gave_up = True
            self._hand_out()
            self._channel.wake()
        say(f"asked to stop: region {self.region} waits for no further messages")

    def _future(self, sync: m.SyncId) -> Future:
        future = self._futures.setdefault(sync, Future())
        self._hand_out()
        self._channel.wake()
        return future

    def _check(self) -> None:
        if self._member.is_superseded:
            raise SupersededError(
                f"region {self.region} was started again elsewhere, and its newer life "
                "takes part; this one ends, and must not be started again"
            )
        if self._member.why_left and not self._member.gave_up:
            raise LeftBehindError(f"region {self.region}: {self._member.why_left}")

    def _hand_out(self) -> None:
        decisions = list(self._member.delivered)
        self._member.delivered.clear()
        if self._member.why_left:
            decisions += [m.Decision(m.NO_EPOCH, sync, {}) for sync in self._futures]
        for decision in decisions:
            if future := self._futures.pop(decision.sync, None):
                future.set_result(decision)
        self._lock.notify_all()

    def _serve(self) -> None:
        """Own the channel until the end; an error ends all waits."""
        try:
            self._serve_on()
        except BaseException as error:
            with self._lock:
                self._member.why_left = f"its link broke: {error!r}"
                self._hand_out()
            raise
        finally:
            self._channel.close()

    def _serve_on(self) -> None:
        pause = min(self.place.timing.beat_s / 2, _POLL_S)
        while True:
            arrived = self._channel.receive(pause)
            with self._lock:
                now = time.monotonic()
                for message in arrived:
                    self._take(message, now)
                self._member.tick(now)
                if self.should_stop():
                    self._member.give_up(now)
                self._hand_out()

                # Sending, reporting and watching are done without the lock.
                outbox = self._member.outbox
                self._member.outbox = []
                findings = self._member.findings
                self._member.findings = []
                present = tuple(self._member.view.seats)
                measured = self._member.times.finished(present, now)
                silences = self._member.silent(now)
                boot = self._member.boot
                answers = [(x, self._member.sign_of_life(now)) for x in self._outlived]
                self._outlived = []
                ended = self._ended

            for regions, message in _shared(outbox):
                letter = m.Letter(self._run, self.region, boot, message)
                self._channel.send(regions, m.pack(letter))
            for way_back, sign in answers:
                letter = m.Letter(self._run, self.region, boot, sign)
                self._channel.answer(way_back, m.pack(letter))

            for finding in findings:
                self._say(finding)
            if ended:
                return

            if self._watch is not None:
                self._watch.silent(silences)
                for sync in measured:
                    faulty = self._watch(sync, present)
                    with self._lock:
                        self._member.shunned, self._member.detours = faulty

    def _say(self, finding: Finding) -> None:
        """Report that outer models differ; if only by rounding, once."""
        fragment, step = finding.sync
        where = f"outer fragment {fragment} after the sync of step {step}"
        if finding.astray:
            say(
                f"{where}: that of regions {[*finding.astray]} is not that of regions "
                f"{[*finding.right]}; they take a copy"
            )
        elif not self._has_said_rounding:
            self._has_said_rounding = True
            say(
                f"{where}: regions {[*finding.right]} differ by rounding only, as "
                "different processors do; nothing is done"
            )

    def _take(self, arrived: Arrived, now: float) -> None:
        try:
            letter = m.unpack(arrived.frames, self.place.num_regions)
        except m.WireError:
            self.strangers += 1
            return

        if letter.run != self._run:
            self.strangers += 1
            if isinstance(letter.message, m.Join):
                self._meet_another_run(letter.sender, now)
        elif isinstance(letter.message, m.Snapshot):
            self._snapshots[letter.sender, letter.boot] = letter.message
        else:
            self._member.receive(letter.sender, letter.boot, letter.message, now)
            life = letter.sender, letter.boot
            is_sign = isinstance(letter.message, m.Join | m.Beat)
            if is_sign and self._member.is_outlived(life):
                self._outlived.append(arrived.way_back)

    def _meet_another_run(self, sender: int, now: float) -> None:
        """Refuse to take part, and let the other run notice this one too."""
        member = self._member
        if now - self._answered_s >= self.place.timing.beat_s:
            self._answered_s = now
            member.outbox.append((sender, m.Join(0, ())))
        # Where others of its own run take part, the stranger is the other one.
        if not (member.why_left or member.is_in or member.hears_others()):
            member.why_left = (
                f"region {sender} is of another run (method, model, data or code "
                "differ): start all regions with the same command"
            )


def _shared(
    outbox: Sequence[tuple[int, m.Message]],
) -> list[tuple[list[int], m.Message]]:
    """Group the regions that get equal messages, so that each is written once."""
    groups: list[tuple[list[int], m.Message]] = []
    for region, message in outbox:
        for regions, earlier in groups:
            if earlier == message and region not in regions:
                regions.append(region)
                break
        else:
            groups.append(([region], message))
    return groups
