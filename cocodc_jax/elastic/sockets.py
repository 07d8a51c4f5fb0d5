"""The sockets of one region: ZeroMQ with CURVE, both sides by the shared key.

A peer without the key is refused in the handshake, before any of its bytes is read as a
message. Messages to a region that is gone are dropped.

Every region connects to the addresses of the others, and sends on these connections. An
answer comes back on the connection of the message that it answers (`Channel.answer`),
so it also reaches a life whose address another one has taken over.

ZeroMQ has one limit for the size of what it receives, of a handshake and of a message,
and allocates up to it before it knows the key. A handshake is a few hundred bytes, a
message as large as a model. So frames are cut into pieces of `PIECE_BYTES`, and the
limit is that of a piece:

    number of frames | their lengths, cut into pieces | each frame, cut into pieces

every piece a part of one ZeroMQ message. What nobody has shown the key for takes
`PIECE_BYTES` a connection at most, and `Door` bounds their number.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cocodc_jax._extras import later
from cocodc_jax.elastic.link import Arrived
from cocodc_jax.elastic.messages import MAX_HEADER_BYTES
from cocodc_jax.elastic.place import Place
from cocodc_jax.files import say

if TYPE_CHECKING:
    import zmq
    from zmq.utils import z85
else:
    zmq = later("zmq", "elastic")
    z85 = later("zmq.utils.z85", "elastic")

_QUEUE = 256  # The most messages that wait to be read.
_SENDING = 1 << 14  # And for one region: small ones queue behind a copy for minutes.
_FAREWELL_MS = 5000
PIECE_BYTES = 1 << 14
_COUNT = struct.Struct("<I")
_CURVE_BYTES = 64  # More than encryption adds to a frame (33), which ZeroMQ counts.
# ZeroMQ never retries a connection whose handshake failed, which happens when the other
# side ends. If sending fails for so long, the connection is opened again.
_GIVE_UP_S = 1.5
_PING_MS = 2000
_PONG_MS = 10000
HANDSHAKE_MS = 5000
_MAX_WAITING = 512
_SHARE = 4  # One in so many descriptors; the program itself uses the others.
_WARN_EVERY_S = 60.0


def key_pair(key: bytes) -> tuple[bytes, bytes]:
    """Return the public and the secret CURVE key, derived from the shared `key`."""
    secret = z85.encode(hashlib.sha256(b"cocodc_jax regions" + key).digest())
    return zmq.curve_public(secret), secret


def secured(context: Any, kind: int, key: bytes, listens: bool) -> Any:
    """Return a socket to peers that have the shared `key` too."""
    made = context.socket(kind)
    public, secret = key_pair(key)
    if listens:
        made.curve_server = True
    else:
        made.curve_serverkey = public
    made.curve_publickey = public
    made.curve_secretkey = secret
    made.linger = _FAREWELL_MS
    return made


class Sockets:
    """A `Channel` of sockets; see `open_channel`."""

    def __init__(self, place: Place, max_frame_bytes: int):
        self._place = place
        public_key, _ = key_pair(place.key)
        self._known = z85.decode(public_key)
        self._wake, self._waked = socket.socketpair()
        self._waked.setblocking(False)
        self._context = zmq.Context()
        self._context.max_sockets = 1023

        # ZeroMQ asks here whether to accept a peer, before it passes anything on.
        self._asked = self._context.socket(zmq.REP)
        self._asked.bind("inproc://zeromq.zap.01")

        self._largest = max(max_frame_bytes, MAX_HEADER_BYTES)
        self._in = self._secured(zmq.ROUTER, listens=True)
        self._in.zap_domain = b"regions"
        self._door = Door(self._in, self._context)
        self._out: dict[int, Any] = {}

        port = place.addresses[place.region].rpartition(":")[2]
        try:
            self._in.bind(f"tcp://*:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(
                f"region_addresses: region {place.region} cannot listen on port {port}"
                f" ({error.strerror}); name a free port"
            ) from error

        self._poller = zmq.Poller()
        for readable in (self._in, self._asked, self._waked):
            self._poller.register(readable, zmq.POLLIN)

        self._refused_s: dict[int, float] = {}
        for region in set(range(place.num_regions)) - {place.region}:
            self._connect(region)

    def _secured(self, kind: int, listens: bool) -> Any:
        made = secured(self._context, kind, self._place.key, listens)
        made.sndhwm = _SENDING
        made.rcvhwm = _QUEUE
        made.setsockopt(zmq.MAXMSGSIZE, PIECE_BYTES + _CURVE_BYTES)
        made.ipv6 = any("]" in address for address in self._place.addresses)
        return made

    def _connect(self, region: int) -> None:
        """Open a connection to a region, in the place of one that there was."""
        before = self._out.pop(region, None)
        if before is not None:
            self._poller.unregister(before)
            before.close(linger=0)

        out = self._secured(zmq.DEALER, listens=False)
        out.immediate = True  # No queue for a peer that is not connected.
        out.setsockopt(zmq.RECONNECT_IVL, 100)
        out.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        out.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
        out.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PONG_MS)
        out.connect(f"tcp://{self._place.addresses[region]}")
        self._poller.register(out, zmq.POLLIN)
        self._out[region] = out

    def receive(self, seconds: float) -> list[Arrived]:
        """See `Channel.receive`."""
        self._poller.poll(round(seconds * 1000))
        with contextlib.suppress(BlockingIOError):
            while self._waked.recv(4096):
                pass

        with contextlib.suppress(zmq.Again):
            while True:
                self._admit(self._asked.recv_multipart(zmq.NOBLOCK))

        arrived: list[Arrived] = []
        with contextlib.suppress(zmq.Again):
            while len(arrived) < _QUEUE:
                way_back = self._in.recv(zmq.NOBLOCK)  # Names the connection.
                first = self._in.recv(copy=False)
                self._door.saw_message(first)
                rest = self._in.recv_multipart() if self._in.rcvmore else []
                self._collect(arrived, [first.bytes, *rest], way_back)

        for out in self._out.values():
            with contextlib.suppress(zmq.Again):
                while len(arrived) < _QUEUE:
                    self._collect(arrived, out.recv_multipart(zmq.NOBLOCK), None)

        return arrived

    def _collect(
        self, arrived: list[Arrived], pieces: list[bytes], way_back: bytes | None
    ) -> None:
        with contextlib.suppress(ValueError):  # Nothing that a region sends.
            arrived.append(Arrived(joined(pieces, self._largest), way_back))

    def answer(self, way_back: Any, frames: list[bytes]) -> None:
        """See `Channel.answer`."""
        if way_back is not None:
            with contextlib.suppress(zmq.ZMQError):  # It is gone, or reads nothing.
                self._in.send_multipart([way_back, *cut(frames)], zmq.NOBLOCK)

    def _admit(self, asked: list[bytes]) -> None:
        """Accept a peer that has the run's key pair (ZeroMQ's RFC 27)."""
        version, request, *_ = asked
        is_known = asked[5] == b"CURVE" and asked[6] == self._known
        status = (b"200", b"OK") if is_known else (b"400", b"another key")
        self._asked.send_multipart([version, request, *status, b"", b""])

    def wake(self) -> None:
        """See `Channel.wake`."""
        with contextlib.suppress(OSError):
            self._wake.send(b".")

    def send(self, regions: Sequence[int], frames: list[bytes]) -> None:
        """See `Channel.send`; it is dropped where nobody is."""
        pieces = cut(frames)
        for region in regions:
            try:
                self._out[region].send_multipart(pieces, zmq.NOBLOCK)
                self._refused_s.pop(region, None)
            except zmq.Again:
                now = time.monotonic()
                if now - self._refused_s.setdefault(region, now) > _GIVE_UP_S:
                    del self._refused_s[region]
                    self._connect(region)

    def close(self) -> None:
        """See `Channel.close`."""
        for out in self._out.values():
            out.close()
        self._in.close(linger=0)
        self._door.close()
        self._asked.close(linger=0)
        self._wake.close()
        self._waked.close()
        self._context.term()


def cut(frames: Sequence[bytes]) -> list[bytes | memoryview]:
    """Return frames as the pieces of one ZeroMQ message.

    >>> [len(piece) for piece in cut([b"a", b"", bytes(PIECE_BYTES + 1)])]
    [4, 24, 1, 16384, 1]
    """
    lengths = struct.pack(f"<{len(frames)}Q", *map(len, frames))
    pieces: list[bytes | memoryview] = [_COUNT.pack(len(frames))]
    for data in (lengths, *frames):
        view = memoryview(data)
        pieces += [view[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES)]
    return pieces


def joined(pieces: Sequence[bytes], largest: int) -> list[bytes]:
    """Return the frames of the pieces that `cut` made; a frame has `largest` bytes.

    Raises ValueError if they are no such pieces, or a frame is larger.

    >>> joined([*map(bytes, cut([b"a", b"", b"bcd"]))], 3)
    [b'a', b'', b'bcd']
    """
    head, *rest = pieces
    parts = iter(rest)

    def take(size: int) -> bytes:
        if size <= PIECE_BYTES:
            return next(parts, b"") if size else b""
        num = -(-size // PIECE_BYTES)
        return b"".join(itertools.islice(parts, num))

    if len(head) != _COUNT.size:
        raise ValueError(f"the number of frames has {len(head)} bytes")

    (count,) = _COUNT.unpack(head)
    table = take(8 * count)
    if len(table) != 8 * count:
        raise ValueError(f"{len(table)} bytes are not the lengths of {count} frames")

    lengths = struct.unpack(f"<{count}Q", table)
    if max(lengths, default=0) > largest:
        raise ValueError(f"a frame has {max(lengths)} bytes, more than {largest}")

    frames = [take(length) for length in lengths]
    if [*map(len, frames)] != [*lengths] or next(parts, None) is not None:
        raise ValueError("the pieces are not as long as they say")
    return frames


class Door:
    """Limits the number of connections that have not shown the key yet.

    Each connection takes a file descriptor before its handshake. An attacker who opens
    connections faster than ZeroMQ drops them could take all descriptors. So only a
    share of them may wait for a handshake; beyond it, the oldest waiting connection is
    closed. A handshake takes a few round trips, so members finish theirs during a flood
    too. A peer that has sent a message has shown the key.
    """

    def __init__(self, listener: Any, context: Any):
        """Watch `listener`, a ZeroMQ socket of `context` that is not bound yet."""
        # The peer of each descriptor, oldest first.
        self._waiting: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._limit = min(_MAX_WAITING, most_descriptors() // _SHARE)

        self._closed = 0
        self._last_warning_s = -_WARN_EVERY_S

        listener.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        events_address = f"inproc://door-{id(self)}"
        listener.monitor(events_address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

        self._events = context.socket(zmq.PAIR)
        # ZeroMQ waits for the reader of its events, so it cannot accept far ahead.
        self._events.rcvhwm = 1
        self._events.rcvtimeo = 100
        self._events.connect(events_address)

        self._ended = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def saw_message(self, frame: Any) -> None:
        """Note that the sender of this frame has the key."""
        with self._lock:
            self._waiting.pop(frame.get(zmq.SRCFD), None)

    def close(self) -> None:
        """Stop; the listening socket must be closed already."""
        self._ended = True
        self._thread.join()
        self._events.close(linger=0)

    def _serve(self) -> None:
        while not self._ended:
            try:
                event = self._events.recv_multipart()[0]
            except zmq.Again:
                continue

            kind, descriptor = struct.unpack("=hi", event)
            with self._lock:
                self._waiting.pop(descriptor, None)
                if kind == zmq.EVENT_ACCEPTED:
                    with contextlib.suppress(OSError), _borrowed(descriptor) as new:
                        self._waiting[descriptor] = new.getpeername()

                # Unread events may say that some of the connections are closed.
                too_many = self._limit if not self._events.poll(0) else 2 * self._limit
                if len(self._waiting) > too_many:
                    self._close_oldest()

    def _close_oldest(self) -> None:
        while len(self._waiting) > self._limit:
            descriptor = next(iter(self._waiting))
            peer = self._waiting.pop(descriptor)
            self._closed += 1
            with contextlib.suppress(OSError), _borrowed(descriptor) as oldest:
                if oldest.getpeername() == peer:
                    oldest.shutdown(socket.SHUT_RDWR)  # ZeroMQ closes it then.

        if time.monotonic() - self._last_warning_s > _WARN_EVERY_S:
            self._last_warning_s = time.monotonic()
            say(
                f"more than {self._limit} open connections have not shown the key; "
                f"{self._closed} closed so far"
            )


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Yield the socket of a descriptor that ZeroMQ owns."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def most_descriptors() -> int:
    """Raise the limit of this process's open files as far as allowed; return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft > 0 else sys.maxsize
