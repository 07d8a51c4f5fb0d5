"""One region's connection to the others: a thread between protocol and channel.

A `Channel` carries the messages, by sockets or through a store. A region that needs a
message which was lost asks for it again. Other threads compute the steps, so nothing
here delays them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from cocodc_jax.elastic import wire
from cocodc_jax.elastic.channel import open_channel
from cocodc_jax.elastic.messages import (
    Decision,
    Join,
    Message,
    Snapshot,
    SyncId,
    View,
)
from cocodc_jax.elastic.place import Place
from cocodc_jax.elastic.protocol import Member
from cocodc_jax.elastic.times import Measured, Silence

# Regions to leave out, and pairs `(sender, receiver)` whose messages to forward.
Faulty = tuple[frozenset[int], frozenset[tuple[int, int]]]


class Watch(Protocol):
    """Receives message times, and names what is faulty."""

    def __call__(self, measured: Measured, present: tuple[int, ...]) -> Faulty:
        """Process the times of one sync; `present` are the regions that take part."""
        ...

    def silent(self, silences: Mapping[int, Silence]) -> None:
        """Process which regions are silent now."""
        ...


class LeftBehindError(RuntimeError):
    """The other regions continue without this one, which has to restart.

    Attributes:
      state: this region's last state, if it can be restarted from.
    """

    state: Any = None


class Link:
    """A region among the others; use as a context manager."""

    def __init__(
        self,
        place: Place,
        run: str,
        max_frame_bytes: int,
        step: int = 0,
        boot: int | None = None,
        is_announced: bool = True,
        watch: Watch | None = None,
    ):
        """Listen, and announce this region to the others.

        Args:
          place: the region's place.
          run: identifies the run; messages of another run are ignored.
          max_frame_bytes: size of the largest valid row or array.
          step: step of the region's own checkpoint, 0 for none.
          boot: see `Seat`; the time by default.
          is_announced: whether to ask to take part at once, or at `join`.
          watch: receives message times, and names what is faulty.

        Raises:
          ImportError, OSError: see `open_channel`.
        """
        self.place, self._run, self._step = place, run, step
        self.boot = time.time_ns() if boot is None else boot
        self._member = Member(
            place.region,
            place.num_regions,
            self.boot,
            step,
            place.timing,
            time.monotonic(),
            place.min_regions,
        )
        self._member.is_announced = is_announced
        self._lock = threading.Lock()
        self._futures: dict[SyncId, Future] = {}
        self._snapshots: dict[int, Snapshot] = {}
        self._changed = threading.Condition(self._lock)
        self._letters: queue.SimpleQueue = queue.SimpleQueue()
        self._ended, self._answered_s, self._watch = False, 0.0, watch
        self.strangers = 0
        self._channel = open_channel(place, self.boot, max_frame_bytes)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Link:
        """Return itself: it listens already."""
        return self

    def __exit__(self, *exception: Any) -> None:
        """Leave, after pending messages are sent."""
        self.close()

    @property
    def region(self) -> int:
        """The index of this region."""
        return self.place.region

    @property
    def view(self) -> View:
        """The regions that take part, as this region knows it."""
        with self._lock:
            return self._member.view

    def hears_others(self, seconds: float) -> bool:
        """Return whether others take part already, after at most `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with self._lock:
                if self._member.hears_others():
                    return True
            time.sleep(self.place.timing.beat_s / 4)
        return False

    def close(self) -> None:
        """Leave, after pending messages are sent."""
        with self._lock:
            if self._ended:
                return
            self._member.leave()
            self._ended = True
            self._channel.wake()
        self._thread.join()

    def wait_for_step(self, step: int, timeout_s: float) -> bool:
        """Return whether the others reach a step, after at most `timeout_s`."""
        end = time.monotonic() + timeout_s
        while (now := time.monotonic()) < end:
            with self._lock:
                if self._member.have_come_to(step, now):
                    return True
            time.sleep(self.place.timing.beat_s / 4)
        return False

    def leave(self) -> None:
        """Announce that this region leaves, so that no other region waits for it.

        All decisions that it waits for must have arrived. The region may continue on
        its own, to write a checkpoint for example.
        """
        with self._lock:
            self._member.leave()
            self._channel.wake()

    def send(self, sync: SyncId, row: bytes, step_s: float = 0.0) -> Future:
        """Send this region's message; the future's result is the decision.

        If the others continue without this region, the result is an empty decision of
        epoch 0, and the next `at` raises.

        Args:
          sync: the fragment's id and the start step.
          row: the message.
          step_s: seconds of an inner step in this region, 0 if not measured.
        """
        with self._lock:
            self._member.times.step_s = step_s
            future = self._future(sync)
            self._member.offer(sync, row, time.monotonic())
            self._hand_out()
            self._channel.wake()
        return future

    def expect(self, sync: SyncId) -> Future:
        """Return the future of a sync's decision without sending a message."""
        with self._lock:
            future = self._future(sync)
            self._member.expect(sync, time.monotonic())
            self._hand_out()
            self._channel.wake()
        return future

    def at(self, oldest_step: int) -> dict[int, int]:
        """Report this region's progress; return the regions that wait for a copy.

        Args:
          oldest_step: this region has applied all syncs that started before this step.

        Returns:
          The lives of the waiting regions, by region.

        Raises:
          LeftBehindError: if the others continue without this region.
        """
        with self._lock:
            self._check()
            self._member.oldest_step = oldest_step
            return self._member.joiners(time.monotonic())

    def finish(self, timeout_s: float) -> None:
        """Wait at the end of a run until the others need no decision of this region."""
        end = time.monotonic() + timeout_s
        with self._changed:
            self._member.finish(time.monotonic())
            self._channel.wake()
            while self._member.is_needed(now := time.monotonic()) and now < end:
                self._changed.wait(min(end - now, self.place.timing.beat_s))

    def let_in(self, region: int, boot: int, copy: Snapshot, oldest_step: int) -> None:
        """Send a region a copy to start from, and propose a view with it."""
        with self._lock:
            self._letters.put((region, copy))
            self._member.admit(region, boot, copy.step, oldest_step)
            self._channel.wake()

    def join(self, timeout_s: float) -> Snapshot | None:
        """Wait until this region takes part.

        Returns:
          The copy that it starts from; None where the run begins, or continues from
          this region's own checkpoint.

        Raises:
          TimeoutError: if no region admits it in time.
          LeftBehindError: if others begin without it meanwhile.
        """
        end = time.monotonic() + timeout_s
        with self._changed:
            if not self._member.is_announced:
                self._member.announce(time.monotonic())
                self._channel.wake()
            while True:
                self._check()
                member = self._member
                seat = member.view.seats.get(self.region)
                if seat is not None:
                    # Copies of one step are equal, whichever region sent them.
                    if seat.since_step in self._snapshots:
                        return self._snapshots[seat.since_step]
                    begins = member.coordinator == self.region
                    if seat.since_step == 0 or (
                        begins and seat.since_step == self._step
                    ):
                        return None
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"no region admitted region {self.region} within "
                        f"{timeout_s:.0f} s"
                    )
                self._changed.wait(min(left, 1.0))

    def _future(self, sync: SyncId) -> Future:
        return self._futures.setdefault(sync, Future())

    def _check(self) -> None:
        if self._member.is_over:
            raise LeftBehindError(f"region {self.region}: {self._member.is_over}")

    def _hand_out(self) -> None:
        for decision in self._member.delivered:
            future = self._futures.pop(decision.sync, None)
            if future is not None:
                future.set_result(decision)
        self._member.delivered.clear()
        if self._member.is_over:
            for sync, future in self._futures.items():
                future.set_result(Decision(0, sync, {}))
            self._futures.clear()
        self._changed.notify_all()

    def _serve(self) -> None:
        """Own the channel until the end; an error ends all waits."""
        try:
            self._serve_on()
        except BaseException as error:
            with self._lock:
                self._member.is_over = f"its link broke: {error!r}"
                self._hand_out()
            raise

    def _serve_on(self) -> None:
        pause = self.place.timing.beat_s / 2
        while True:
            arrived = self._channel.receive(pause)
            with self._lock:
                now = time.monotonic()
                for frames in arrived:
                    self._take(frames, now)
                self._member.tick(now)
                self._hand_out()
                out = list(self._member.outbox)
                self._member.outbox.clear()
                ended = self._ended
                present = tuple(self._member.view.seats)
                measured = self._member.times.finished(present, now)
                silences = self._member.silent(now)
            while not self._letters.empty():
                out.append(self._letters.get())
            for regions, message in _shared(out):
                letter = wire.Letter(self._run, self.region, self.boot, message)
                self._channel.send(regions, wire.pack(letter))
            if ended:
                self._channel.close()
                return
            self._look_at(measured, present, silences)

    def _look_at(
        self,
        measured: Sequence[Measured],
        present: tuple[int, ...],
        silences: Mapping[int, Silence],
    ) -> None:
        """Pass message times and silences to the watch, and use its answer."""
        if self._watch is None:
            return
        self._watch.silent(silences)
        for each in measured:
            shunned, detours = self._watch(each, present)
            with self._lock:
                self._member.shunned, self._member.detours = shunned, detours

    def _take(self, frames: Sequence[bytes], now: float) -> None:
        try:
            letter = wire.unpack(frames, self.place.num_regions)
        except wire.WireError:
            self.strangers += 1
            return
        if letter.run != self._run:
            self.strangers += 1
            if isinstance(letter.message, Join):
                self._meet_another_run(letter.sender, now)
            return
        if isinstance(letter.message, Snapshot):
            self._snapshots = {letter.message.step: letter.message}
            return
        self._member.receive(letter.sender, letter.boot, letter.message, now)

    def _meet_another_run(self, sender: int, now: float) -> None:
        """Refuse to take part, and let the other run notice this one too."""
        member = self._member
        if now - self._answered_s >= self.place.timing.beat_s:
            self._answered_s = now
            self._letters.put((sender, Join(0, ())))
        if not member.is_over and not member.is_in:
            member.is_over = (
                f"region {sender} is of another run (method, model, data or code "
                "differ): start all regions with the same command"
            )


def _shared(out: Sequence[tuple[int, Message]]) -> list[tuple[list[int], Message]]:
    """Group the regions that are told the same, so that it is written once."""
    found: list[tuple[list[int], Message]] = []
    for region, message in out:
        for regions, said in found:
            if said == message and region not in regions:
                regions.append(region)
                break
        else:
            found.append(([region], message))
    return found
