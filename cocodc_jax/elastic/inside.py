"""A region of several processes: process 0 has the link and forwards its answers.

The processes of a region are one JAX job and run the same program, call for call.
Process 0 holds the `Link` to the other regions (`Speaker`). It forwards its answers, in
the order of its calls, and every decision, by its sync, to the other processes. They
have a `Listener` with the same methods as the link. So all processes take the same
means at the same steps, and admit regions, fall behind and end together. If a process
dies, JAX ends the job, and the other regions see a dead region.

ZeroMQ carries these messages too, encrypted with the shared key. They are lost only if
a process dies. They run no device program, so a process that waits for a decision
delays no step.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from cocodc_jax._extras import extra
from cocodc_jax.elastic.door import Door
from cocodc_jax.elastic.link import LeftBehindError, Link
from cocodc_jax.elastic.messages import (
    Decision,
    Seat,
    Snapshot,
    SyncId,
    View,
)
from cocodc_jax.elastic.place import Place
from cocodc_jax.elastic.sockets import key_pair

_ERRORS = {x.__name__: x for x in (LeftBehindError, TimeoutError)}
_FAREWELL_MS = 5000
_HELLO = b"hello"


class Ears:
    """The socket by which process 0 reaches its region's other processes."""

    def __init__(self, place: Place):
        """Listen on any free port, before there is a link."""
        with extra("elastic"):
            import zmq
        self._zmq, self._context = zmq, zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        public, secret = key_pair(place.key)
        self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
        self._socket.linger = _FAREWELL_MS
        self._socket.sndhwm = 0  # Nothing is dropped.
        self._door = Door(self._socket, self._context)
        port = self._socket.bind_to_random_port("tcp://*")
        host = socket.gethostname()
        if place.addresses:
            host = place.addresses[place.region].rpartition(":")[0]
        self.address = f"tcp://{host}:{port}"
        self._others: list[bytes] = []

    def wait_for(self, num: int, timeout_s: float) -> None:
        """Wait until `num` other processes listen.

        Raises:
          TimeoutError: after `timeout_s`.
        """
        self._socket.rcvtimeo = round(timeout_s * 1000)
        while len(self._others) < num:
            try:
                frames = self._socket.recv_multipart(copy=False)
            except self._zmq.Again as error:
                raise TimeoutError(
                    f"{num - len(self._others)} processes of this region did not "
                    f"connect to {self.address} within {timeout_s:.0f} s"
                ) from error
            self._door.saw_message(frames[-1])
            name, word = (frame.bytes for frame in frames)
            if word == _HELLO:
                self._others.append(name)

    def tell(self, frames: Sequence[bytes]) -> None:
        """Send to all of them; call from one thread only."""
        for name in self._others:
            self._socket.send_multipart([name, *frames])

    def close(self) -> None:
        """Close, after a few seconds at most for unsent messages."""
        self._socket.close()
        self._door.close()
        self._context.term()


class Speaker:
    """A `Link` that forwards its answers to the other processes of the region."""

    def __init__(self, link: Link, ears: Ears):
        """Wrap `link`; all processes of the region must be connected to `ears`."""
        self._link, self._ears, self._calls = link, ears, 0
        self.view = link.view
        self._out: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Speaker:
        """Return itself: the link is open already."""
        return self

    def __exit__(self, *exception: Any) -> None:
        """Leave, and end the waits of the other processes."""
        self._link.close()
        self._out.put([_header({"ended": str(exception[1] or "")})])
        self._out.put(None)
        self._thread.join()
        self._ears.close()

    @property
    def place(self) -> Place:
        """The region's place."""
        return self._link.place

    def _serve(self) -> None:
        while (frames := self._out.get()) is not None:
            self._ears.tell(frames)

    def _answer(self, call: Callable[[], Any], write: Callable = lambda x: (x, ())):
        """Call, and forward the result or the error to the other processes."""
        self._calls += 1
        value, frames, error = None, (), None
        try:
            found = call()
            value, frames = write(found)
            return found
        except tuple(_ERRORS.values()) as raised:
            error = [type(raised).__name__, str(raised)]
            raise
        finally:
            self.view = self._link.view
            seats = [[r, *seat] for r, seat in self.view.seats.items()]
            told = {"call": self._calls, "value": value, "error": error}
            told["view"] = [self.view.epoch, seats]
            self._out.put([_header(told), *frames])

    def hears_others(self, seconds: float) -> bool:
        """See `Link.hears_others`."""
        return self._answer(lambda: self._link.hears_others(seconds))

    def wait_for_step(self, step: int, timeout_s: float) -> bool:
        """See `Link.wait_for_step`."""
        return self._answer(lambda: self._link.wait_for_step(step, timeout_s))

    def leave(self) -> None:
        """See `Link.leave`."""
        self._link.leave()

    def join(self, timeout_s: float) -> Snapshot | None:
        """See `Link.join`."""
        return self._answer(lambda: self._link.join(timeout_s), _of_copy)

    def at(self, oldest_step: int) -> dict[int, int]:
        """See `Link.at`."""
        return self._answer(
            lambda: self._link.at(oldest_step), lambda found: (list(found.items()), ())
        )

    def finish(self, timeout_s: float) -> None:
        """See `Link.finish`."""
        self._answer(lambda: self._link.finish(timeout_s))

    def let_in(self, region: int, boot: int, copy: Snapshot, oldest_step: int) -> None:
        """See `Link.let_in`."""
        self._link.let_in(region, boot, copy, oldest_step)

    def send(self, sync: SyncId, row: bytes, step_s: float = 0.0) -> Future:
        """See `Link.send`."""
        return self._decided(self._link.send(sync, row, step_s))

    def expect(self, sync: SyncId) -> Future:
        """See `Link.expect`."""
        return self._decided(self._link.expect(sync))

    def _decided(self, future: Future) -> Future:
        """Forward the decision to the other processes when it arrives."""

        def tell(done: Future) -> None:
            decision: Decision = done.result()
            told = {
                "sync": decision.sync,
                "epoch": decision.epoch,
                "regions": list(decision.rows),
            }
            self._out.put([_header(told), *decision.rows.values()])

        future.add_done_callback(tell)
        return future


class Listener:
    """The `Link` of a region's other processes; it receives process 0's answers."""

    def __init__(self, place: Place, address: str, process: int):
        """Connect to process 0, whose `Ears` have this address."""
        with extra("elastic"):
            import zmq
        self.place, self.view, self._calls = place, View(), 0
        self._lock = threading.Lock()
        self._futures: dict[SyncId, Future] = {}
        self._answers: queue.SimpleQueue = queue.SimpleQueue()
        self._ended = False
        self._zmq, self._context = zmq, zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        public, secret = key_pair(place.key)
        self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
        self._socket.curve_serverkey = public
        self._socket.identity = f"process {process}".encode()
        self._socket.rcvhwm = 0
        self._socket.rcvtimeo = 100
        self._socket.linger = 0
        self._socket.connect(address)
        self._socket.send(_HELLO)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Listener:
        """Return itself: it listens already."""
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop listening."""
        self._ended = True
        self._thread.join()

    def _serve(self) -> None:
        while not self._ended:
            try:
                head, *frames = self._socket.recv_multipart()
            except self._zmq.Again:
                continue
            told = json.loads(head)
            if "sync" in told:
                sync = (told["sync"][0], told["sync"][1])
                rows = dict(zip(told["regions"], frames, strict=True))
                future = self._future(sync)
                if not future.done():
                    future.set_result(Decision(told["epoch"], sync, rows))
            else:
                self._answers.put((told, frames))
        self._socket.close()
        self._context.term()

    def _future(self, sync: SyncId) -> Future:
        """Return the future of a decision, for the caller and the receiving thread."""
        with self._lock:
            return self._futures.setdefault(sync, Future())

    def _answer(self) -> tuple[Any, Sequence[bytes]]:
        """Return the answer that process 0 got to the same call.

        Raises:
          LeftBehindError, TimeoutError: if the link of process 0 raised it.
          ConnectionError: if process 0 has ended.
          RuntimeError: if process 0 has made another call.
        """
        self._calls += 1
        told, frames = self._answers.get()
        if "ended" in told:
            self._answers.put((told, frames))  # For later calls.
            raise ConnectionError(
                f"process 0 of region {self.place.region} has ended: {told['ended']}"
            )
        if told["call"] != self._calls:
            raise RuntimeError(
                f"call {self._calls} got the answer to call {told['call']}: the "
                "processes of this region do not run the same program"
            )
        epoch, seats = told["view"]
        self.view = View(epoch, {r: Seat(boot, since) for r, boot, since in seats})
        if told["error"]:
            name, text = told["error"]
            raise _ERRORS[name](text)
        return told["value"], frames

    def hears_others(self, seconds: float) -> bool:
        """See `Link.hears_others`."""
        del seconds
        return self._answer()[0]

    def wait_for_step(self, step: int, timeout_s: float) -> bool:
        """See `Link.wait_for_step`."""
        del step, timeout_s
        return self._answer()[0]

    def leave(self) -> None:
        """Do nothing: process 0 leaves for the region."""

    def join(self, timeout_s: float) -> Snapshot | None:
        """See `Link.join`."""
        del timeout_s
        value, frames = self._answer()
        return None if value is None else Snapshot(value[0], value[1], tuple(frames))

    def at(self, oldest_step: int) -> dict[int, int]:
        """See `Link.at`."""
        with self._lock:
            past = [s for s in self._futures if s[1] < oldest_step]
            for sync in past:
                del self._futures[sync]
        return {region: boot for region, boot in self._answer()[0]}

    def finish(self, timeout_s: float) -> None:
        """See `Link.finish`."""
        del timeout_s
        self._answer()

    def let_in(self, region: int, boot: int, copy: Snapshot, oldest_step: int) -> None:
        """Do nothing: process 0 sends the copy."""

    def send(self, sync: SyncId, row: bytes, step_s: float = 0.0) -> Future:
        """Return the future of the decision; process 0 sends the region's message."""
        del row, step_s
        return self._future(sync)

    def expect(self, sync: SyncId) -> Future:
        """See `Link.expect`."""
        return self._future(sync)


def _header(told: Mapping[str, Any]) -> bytes:
    return json.dumps(told).encode()


def _of_copy(copy: Snapshot | None) -> tuple[Any, Sequence[bytes]]:
    return (None, ()) if copy is None else ([copy.step, copy.header], copy.arrays)


def of_process(
    place: Place,
    process: int,
    num_processes: int,
    make_link: Callable[[], Link],
    gather: Callable[[Any], list[Any]],
) -> Link | Speaker | Listener:
    """Return the link of this process: a `Link`, a `Speaker` or a `Listener`.

    Args:
      place: the region's place.
      process: index of this process in the region.
      num_processes: processes of the region.
      make_link: makes the region's link; called in process 0 only.
      gather: returns the argument that each process of the region passes.

    Raises:
      TimeoutError: if a process does not connect in time.
    """
    if num_processes == 1:
        return make_link()
    ears = Ears(place) if process == 0 else None
    address, *_ = gather(ears.address if ears else None)
    if ears is None:
        return Listener(place, address, process)
    ears.wait_for(num_processes - 1, place.timing.start_s)
    return Speaker(make_link(), ears)
