"""A region of several processes: process 0 has the link and forwards its answers.

The processes of a region are one JAX job and run the same program, call for call.
Process 0 has a `Speaker`, which forwards the answers of its `Link`, in the order of the
calls, and every decision, by its sync. The others have a `Listener` with the same
methods. So all take the same means at the same steps, and admit regions, fall behind
and end together. If a process dies, JAX ends the job, and the other regions see a dead
region.

ZeroMQ carries these messages too, encrypted with the shared key. They are lost only if
a process dies. They run no device program, so a process that waits delays no step.
"""

from __future__ import annotations

import abc
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self

from cocodc_jax._extras import later
from cocodc_jax.elastic import messages as m
from cocodc_jax.elastic.link import (
    AskedToStopError,
    LeftBehindError,
    Link,
    SupersededError,
)
from cocodc_jax.elastic.place import Place
from cocodc_jax.elastic.sockets import Door, secured

if TYPE_CHECKING:
    import zmq
else:
    zmq = later("zmq", "elastic")

_ENDS = LeftBehindError, AskedToStopError, SupersededError, TimeoutError
_ERRORS = {x.__name__: x for x in _ENDS}
_POLL_MS = 250
_HELLO = b"hello"

# A value that JSON can hold, and frames.
Answer = tuple[Any, Sequence[bytes]]


def _frames_of(message: m.Message, place: Place) -> list[bytes]:
    """Write a message between regions for the processes of this one."""
    return m.pack(m.Letter("", place.region, 0, message))


def _message_in(frames: Sequence[bytes], place: Place) -> Any:
    """Read the message that `_frames_of` wrote."""
    return m.unpack(frames, place.num_regions).message


class Ears:
    """The socket by which process 0 reaches its region's other processes."""

    def __init__(self, place: Place):
        self._context = zmq.Context()
        self._socket = secured(self._context, zmq.ROUTER, place.key, listens=True)
        self._socket.sndhwm = 0  # Nothing is dropped, and nobody waits.
        self._socket.setsockopt(zmq.MAXMSGSIZE, 1024)  # It receives hellos only.
        self._door = Door(self._socket, self._context)
        port = self._socket.bind_to_random_port("tcp://*")

        host = socket.gethostname()
        if place.addresses:
            host = place.addresses[place.region].rpartition(":")[0]
        self.address = f"tcp://{host}:{port}"
        self._others: list[bytes] = []
        self._lock = threading.Lock()

    def wait_for(
        self, num: int, timeout_s: float, should_stop: Callable[[], bool]
    ) -> None:
        """Wait until `num` other processes listen, for `timeout_s` at most."""
        end = time.monotonic() + timeout_s
        self._socket.rcvtimeo = _POLL_MS
        while len(self._others) < num:
            try:
                frames = self._socket.recv_multipart(copy=False)
            except zmq.Again:
                if should_stop():
                    raise AskedToStopError("this region was asked to stop") from None
                if time.monotonic() < end:
                    continue
                raise TimeoutError(
                    f"{num - len(self._others)} processes of this region did not "
                    f"connect to {self.address} within {timeout_s:.0f} s"
                ) from None

            self._door.saw_message(frames[-1])
            name, word = (frame.bytes for frame in frames)
            if word == _HELLO:
                self._others.append(name)

    def tell(self, head: Mapping[str, Any], frames: Sequence[bytes] = ()) -> None:
        """Send to all of them; any thread may call this."""
        message = [json.dumps(head).encode(), *frames]
        with self._lock:
            for name in self._others:
                self._socket.send_multipart([name, *message], copy=False)

    def close(self) -> None:
        """Close, after a few seconds at most for unsent messages."""
        with self._lock:
            self._others = []
        self._socket.close()
        self._door.close()
        self._context.term()


class SharedLink(abc.ABC):
    """A region's `Link` as each of its processes has it."""

    place: Place
    view: m.View  # As of the last call.
    boot: int = 0  # The region's life, in process 0.
    # See `Link.should_stop`. Process 0 ends the waits of all processes.
    should_stop: Callable[[], bool]

    def __enter__(self) -> Self:
        return self

    @abc.abstractmethod
    def _same(self, call: Callable[[Link], Answer]) -> Answer:
        """Return what a call of the link returns, or raise what it raises.

        In process 0 the link is called; the others get its answer.
        """

    def hears_others(self, seconds: float) -> bool:
        """See `Link.hears_others`."""
        return self._same(lambda link: (link.hears_others(seconds), ()))[0]

    def wait_for_step(self, step: int, timeout_s: float) -> int:
        """See `Link.wait_for_step`."""
        return self._same(lambda link: (link.wait_for_step(step, timeout_s), ()))[0]

    def join(self, timeout_s: float) -> m.Snapshot | None:
        """See `Link.join`."""

        def call(link: Link) -> Answer:
            copy = link.join(timeout_s)
            return None, _frames_of(copy, self.place) if copy else ()

        _, frames = self._same(call)
        return _message_in(frames, self.place) if frames else None

    def at(self, oldest_step: int, marks: Sequence[m.Mark] = ()) -> dict[int, int]:
        """See `Link.at`; the marks of process 0 count."""

        def call(link: Link) -> Answer:
            return [*link.at(oldest_step, marks).items()], ()

        return dict(self._same(call)[0])

    def agree(self, value: int) -> int:
        """Return the value that process 0 passes, in all processes."""
        return self._same(lambda link: (value, ()))[0]

    def finish(self, timeout_s: float) -> None:
        """See `Link.finish`."""
        self._same(lambda link: (link.finish(timeout_s), ()))

    @abc.abstractmethod
    def wait_for(self, future: Future) -> Any:
        """See `Link.wait_for`."""


class Speaker(SharedLink):
    """A `Link` that forwards its answers to the other processes of the region."""

    def __init__(self, link: Link, ears: Ears):
        self._link = link
        self._ears = ears
        self._calls = 0
        self.place = link.place
        self.view = link.view
        self.boot = link.boot
        self.leave = link.leave
        self.let_in = link.let_in
        self.should_stop = link.should_stop
        link.should_stop = lambda: self.should_stop()

    def wait_for(self, future: Future) -> Any:
        """See `Link.wait_for`."""
        return self._link.wait_for(future)

    def __exit__(self, *exception: Any) -> None:
        self._link.close()
        self._ears.tell({"ended": str(exception[1] or "")})
        self._ears.close()

    def _same(self, call: Callable[[Link], Answer]) -> Answer:
        self._calls += 1
        value = None
        frames: Sequence[bytes] = ()
        error = None
        try:
            value, frames = call(self._link)
            return value, frames
        except tuple(_ERRORS.values()) as raised:
            error = [type(raised).__name__, str(raised)]
            raise
        finally:
            self.view = self._link.view
            head = {"call": self._calls, "value": value, "error": error}
            (view,) = _frames_of(m.Install(self.view, decisions=()), self.place)
            self._ears.tell(head, [view, *frames])

    def send(self, sync: m.SyncId, row: bytes, step_s: float = 0.0) -> Future:
        """See `Link.send`."""
        return self._decided(self._link.send(sync, row, step_s))

    def expect(self, sync: m.SyncId) -> Future:
        """See `Link.expect`."""
        return self._decided(self._link.expect(sync))

    def _decided(self, future: Future) -> Future:
        """Forward the decision to the other processes when it arrives."""

        def tell(done: Future) -> None:
            self._ears.tell({"decided": True}, _frames_of(done.result(), self.place))

        future.add_done_callback(tell)
        return future


class Listener(SharedLink):
    """The `Link` of a region's other processes; it receives process 0's answers."""

    def __init__(self, place: Place, address: str, process: int):
        self.place = place
        self.view = m.View()
        self._calls = 0
        self.should_stop = lambda: False
        self._lock = threading.Lock()
        self._futures: dict[m.SyncId, Future] = {}
        self._answers: queue.SimpleQueue = queue.SimpleQueue()
        self._ended = False

        self._context = zmq.Context()
        self._socket = secured(self._context, zmq.DEALER, place.key, listens=False)
        self._socket.identity = f"process {process}".encode()
        self._socket.rcvhwm = 0
        self._socket.linger = 0
        self._socket.rcvtimeo = 100
        self._socket.connect(address)
        self._socket.send(_HELLO)

        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __exit__(self, *exception: Any) -> None:
        self._ended = True
        self._thread.join()

    def _serve(self) -> None:
        while not self._ended:
            try:
                head, *frames = self._socket.recv_multipart()
            except zmq.Again:
                continue

            answer = json.loads(head)
            if "decided" in answer:
                decision = _message_in(frames, self.place)
                future = self.expect(decision.sync)
                if not future.done():
                    future.set_result(decision)
            else:
                self._answers.put((answer, frames))

        self._socket.close()
        self._context.term()

    def _same(self, call: Callable[[Link], Answer]) -> Answer:
        del call
        self._calls += 1

        answer, frames = self._answers.get()
        if "ended" in answer:
            self._answers.put((answer, frames))  # For later calls.
            raise ConnectionError(
                f"process 0 of region {self.place.region} has ended: {answer['ended']}"
            )
        if answer["call"] != self._calls:
            raise RuntimeError(
                f"call {self._calls} got the answer to call {answer['call']}: the "
                "processes of this region do not run the same program"
            )

        view, *frames = frames
        self.view = _message_in([view], self.place).view

        if answer["error"]:
            name, text = answer["error"]
            raise _ERRORS[name](text)
        return answer["value"], frames

    def at(self, oldest_step: int, marks: Sequence[m.Mark] = ()) -> dict[int, int]:
        """See `Link.at`."""
        with self._lock:
            for sync in [s for s in self._futures if s[1] < oldest_step]:
                del self._futures[sync]
        return super().at(oldest_step, marks)

    def leave(self) -> None:
        """Do nothing: process 0 leaves for the region."""

    def let_in(
        self, region: int, boot: int, copy: m.Snapshot, oldest_step: int
    ) -> None:
        """Do nothing: process 0 sends the copy."""

    def wait_for(self, future: Future) -> Any:
        """Return what arrives in a future; process 0 ends the wait."""
        return future.result()

    def send(self, sync: m.SyncId, row: bytes, step_s: float = 0.0) -> Future:
        """Return the future of the decision; process 0 sends the region's message."""
        return self.expect(sync)

    def expect(self, sync: m.SyncId) -> Future:
        """Return the future of a decision, for the caller and the receiving thread."""
        with self._lock:
            return self._futures.setdefault(sync, Future())


# The link of one of a region's processes.
ProcessLink = Link | Speaker | Listener


def of_process(
    place: Place,
    process: int,
    num_processes: int,
    make_link: Callable[[], Link],
    gather: Callable[[Any], list[Any]],
    should_stop: Callable[[], bool] = lambda: False,
) -> ProcessLink:
    """Return the link of this process: a `Link`, a `Speaker` or a `Listener`.

    `make_link` is called in process 0 only. `gather` returns the argument that each
    process of the region passes. Raises TimeoutError if one does not connect in time,
    `AskedToStopError` if `should_stop` says so first.
    """
    if num_processes == 1:
        return make_link()

    ears = Ears(place) if process == 0 else None
    address, *_ = gather(ears.address if ears else None)
    if ears is None:
        return Listener(place, address, process)

    try:
        ears.wait_for(num_processes - 1, place.timing.start_s, should_stop)
        return Speaker(make_link(), ears)
    except BaseException as error:  # The others wait for its answers.
        ears.tell({"ended": str(error)})
        ears.close()
        raise
