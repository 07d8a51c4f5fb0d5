"""One region's connection to the others: a thread between protocol and channel.

A `Channel` carries the messages, by sockets or through a store; what it loses is asked
for again by those who need it. Steps are computed by other threads: nothing here holds
them up.
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
from cocodc_jax.elastic.straggler_detector import Silence
from cocodc_jax.elastic.times import Measured

# Regions to leave out, and pairs to send messages on for: `(sender, receiver)`.
Faulty = tuple[frozenset[int], frozenset[tuple[int, int]]]


class Watch(Protocol):
    """Who is told what messages took."""

    def __call__(self, measured: Measured, present: tuple[int, ...]) -> Faulty:
        """Take in one sync; `present` are the regions that take part."""
        ...

    def silent(self, silences: Mapping[int, Silence]) -> None:
        """Take in which regions are silent now."""
        ...


class LeftBehindError(RuntimeError):
    """The other regions go on without this one, which has to begin anew.

    Attributes:
      state: what this region had done by then, if it can be gone on from.
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
        """Listen, and tell the others that this region is there.

        Args:
          place: of the region.
          run: what tells this run from another; who has another one is not listened
            to.
          max_frame_bytes: of the largest row or array that can be right.
          step: of the region's own checkpoint, 0 for none.
          boot: see `Seat`; by default the time.
          is_announced: whether to ask to take part at once, or at `join`.
          watch: is told what messages took, and says who is faulty.

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
        """Nothing to do: it listens."""
        return self

    def __exit__(self, *exception: Any) -> None:
        """Leave, and see that what was said has gone out."""
        self.close()

    @property
    def region(self) -> int:
        """Which region this is."""
        return self.place.region

    @property
    def view(self) -> View:
        """Who takes part, as far as this region knows."""
        with self._lock:
            return self._member.view

    def hears_others(self, seconds: float) -> bool:
        """Listen for so long whether others take part already."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with self._lock:
                if self._member.hears_others():
                    return True
            time.sleep(self.place.timing.beat_s / 4)
        return False

    def close(self) -> None:
        """Leave, and see that what was said has gone out."""
        with self._lock:
            if self._ended:
                return
            self._member.leave()
            self._ended = True
            self._channel.wake()
        self._thread.join()

    def wait_for_step(self, step: int, timeout_s: float) -> bool:
        """Wait until the others have come to a step; tell whether they have.

        Args:
          step: of this region's own checkpoint.
          timeout_s: at most.
        """
        end = time.monotonic() + timeout_s
        while (now := time.monotonic()) < end:
            with self._lock:
                if self._member.have_come_to(step, now):
                    return True
            time.sleep(self.place.timing.beat_s / 4)
        return False

    def leave(self) -> None:
        """Say that this region goes, so that nobody waits for it from now on.

        All that it waits for must be there. It may take its time after that.
        """
        with self._lock:
            self._member.leave()
            self._channel.wake()

    def send(self, sync: SyncId, row: bytes, step_s: float = 0.0) -> Future:
        """Send this region's message; the decision comes as the future's result.

        It is one of nobody's messages, of epoch 0, if the others go on without this
        region, as `at` then says.

        Args:
          sync: which.
          row: the message.
          step_s: seconds of an inner step here, 0 for not measured.
        """
        with self._lock:
            self._member.times.step_s = step_s
            future = self._future(sync)
            self._member.offer(sync, row, time.monotonic())
            self._hand_out()
            self._channel.wake()
        return future

    def expect(self, sync: SyncId) -> Future:
        """Wait for the decision of a sync that this region sends nothing for."""
        with self._lock:
            future = self._future(sync)
            self._member.expect(sync, time.monotonic())
            self._hand_out()
            self._channel.wake()
        return future

    def at(self, oldest_step: int) -> dict[int, int]:
        """Tell how far this region is; return who waits for a copy of it.

        Args:
          oldest_step: all syncs that started before it are applied here.

        Returns:
          Their lives, by region.

        Raises:
          LeftBehindError: if the others go on without this region.
        """
        with self._lock:
            self._check()
            self._member.oldest_step = oldest_step
            return self._member.joiners(time.monotonic())

    def finish(self, timeout_s: float) -> None:
        """Wait, at the end of a run, until the others have all that is known here.

        Args:
          timeout_s: at most.
        """
        end = time.monotonic() + timeout_s
        with self._changed:
            self._member.finish(time.monotonic())
            self._channel.wake()
            while self._member.is_needed(now := time.monotonic()) and now < end:
                self._changed.wait(min(end - now, self.place.timing.beat_s))

    def let_in(self, region: int, boot: int, copy: Snapshot, oldest_step: int) -> None:
        """Send a region a copy to go on from, and propose a view with it."""
        with self._lock:
            self._letters.put((region, copy))
            self._member.admit(region, boot, copy.step, oldest_step)
            self._channel.wake()

    def join(self, timeout_s: float) -> Snapshot | None:
        """Wait until this region takes part.

        Returns:
          What it goes on from; None where a run begins, or goes on from its own
          checkpoint.

        Raises:
          TimeoutError: if nobody lets it in.
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
                    # Copies of one step are alike, whoever has sent them.
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
                        f"region {self.region} was let in by nobody within "
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
        """Own the channel until the end; whoever waits hears of what goes wrong."""
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
        """Have it watched what messages took, and who is silent."""
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
        """Take part in nothing, and have the other one hear of this run too."""
        member = self._member
        if now - self._answered_s >= self.place.timing.beat_s:
            self._answered_s = now
            self._letters.put((sender, Join(0, ())))
        if not member.is_over and not member.is_in:
            member.is_over = (
                f"region {sender} is of another run (method, model, data or code "
                "differ): start all with the same command"
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
