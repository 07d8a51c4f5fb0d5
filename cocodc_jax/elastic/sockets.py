"""The sockets of one region: ZeroMQ with CURVE, both sides by the shared key.

A peer without the key is refused in the handshake, before any of its bytes is read as a
message. `door` limits how many peers may wait for the handshake. A frame larger than
any valid one closes the connection before memory is allocated. Messages to a region
that is gone are dropped.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
from collections.abc import Sequence
from typing import Any

from cocodc_jax._extras import extra
from cocodc_jax.elastic import wire
from cocodc_jax.elastic.door import Door
from cocodc_jax.elastic.place import Place

_QUEUE = 256  # The most messages that wait for one region.
_FAREWELL_MS = 5000
_CURVE_BYTES = 64  # More than encryption adds to a frame (33), which ZeroMQ counts.
# ZeroMQ never retries a connection whose handshake failed, which happens when the other
# side ends. If sending fails for so long, the connection is opened again.
_GIVE_UP_S = 1.5
_PING_MS, _PONG_MS = 2000, 10000


def key_pair(key: bytes) -> tuple[bytes, bytes]:
    """Return the public and the secret CURVE key, derived from the shared `key`."""
    with extra("elastic"):
        import zmq
        import zmq.utils.z85
    digest = hashlib.sha256(b"cocodc_jax regions" + key).digest()
    secret = zmq.utils.z85.encode(digest)
    return zmq.curve_public(secret), secret


class Sockets:
    """A `Channel` of sockets; see `open_channel`.

    ZeroMQ (`pip install cocodc_jax[elastic]`) reconnects by itself and has bounded
    queues. CURVE encrypts everything and proves on both sides that they have the key.
    """

    def __init__(self, place: Place, max_frame_bytes: int):
        with extra("elastic"):
            import zmq
            import zmq.utils.z85
        self._zmq = zmq
        self._wake, self._waked = socket.socketpair()
        self._public, self._secret = key_pair(place.key)
        self._raw = zmq.utils.z85.decode(self._public)
        self._context = zmq.Context()
        self._context.max_sockets = 1023
        # ZeroMQ asks here whether to accept a peer, before it passes anything on.
        self._asked = self._context.socket(zmq.REP)
        self._asked.bind("inproc://zeromq.zap.01")
        self._in = self._context.socket(zmq.PULL)
        self._in.curve_server = True
        self._in.zap_domain = b"regions"
        largest = max(max_frame_bytes, wire.MAX_HEADER_BYTES)
        self._in.setsockopt(zmq.MAXMSGSIZE, largest + _CURVE_BYTES)
        self._secure(self._in)
        self._door = Door(self._in, self._context)
        port = place.addresses[place.region].rpartition(":")[2]
        try:
            self._in.bind(f"tcp://*:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(
                f"region_addresses: region {place.region} cannot listen on port {port}"
                f" ({error.strerror}); name a free port"
            ) from error
        self._out = {
            region: self._connect(address)
            for region, address in enumerate(place.addresses)
            if region != place.region
        }
        self._refused_s: dict[int, float] = {}
        self._addresses = place.addresses
        self._poller = zmq.Poller()
        self._poller.register(self._in, zmq.POLLIN)
        self._poller.register(self._asked, zmq.POLLIN)
        self._poller.register(self._waked, zmq.POLLIN)
        self._waked.setblocking(False)

    def _secure(self, where: Any) -> None:
        where.curve_publickey, where.curve_secretkey = self._public, self._secret
        where.linger = _FAREWELL_MS
        where.sndhwm = where.rcvhwm = _QUEUE

    def _connect(self, address: str) -> Any:
        out = self._context.socket(self._zmq.PUSH)
        self._secure(out)
        out.curve_serverkey = self._public
        out.immediate = True  # No queue for a peer that is not connected.
        out.setsockopt(self._zmq.RECONNECT_IVL, 100)
        out.setsockopt(self._zmq.RECONNECT_IVL_MAX, 1000)
        out.setsockopt(self._zmq.HEARTBEAT_IVL, _PING_MS)
        out.setsockopt(self._zmq.HEARTBEAT_TIMEOUT, _PONG_MS)
        out.connect(f"tcp://{address}")
        return out

    def receive(self, seconds: float) -> list[list[bytes]]:
        """See `Channel.receive`."""
        self._poller.poll(round(seconds * 1000))
        with contextlib.suppress(BlockingIOError):
            while self._waked.recv(4096):
                pass
        with contextlib.suppress(self._zmq.Again):
            while True:
                self._answer(self._asked.recv_multipart(self._zmq.NOBLOCK))
        found = []
        while len(found) < _QUEUE:
            try:
                frames = self._in.recv_multipart(self._zmq.NOBLOCK, copy=False)
            except self._zmq.Again:
                break
            self._door.saw_message(frames[0])
            found.append([frame.bytes for frame in frames])
        return found

    def _answer(self, asked: list[bytes]) -> None:
        """Accept a peer that has the run's key pair (ZeroMQ's RFC 27)."""
        version, request, *_ = asked
        is_known = asked[5] == b"CURVE" and asked[6] == self._raw
        status = (b"200", b"OK") if is_known else (b"400", b"another key")
        self._asked.send_multipart([version, request, *status, b"", b""])

    def wake(self) -> None:
        """See `Channel.wake`."""
        with contextlib.suppress(OSError):
            self._wake.send(b".")

    def send(self, regions: Sequence[int], frames: list[bytes]) -> None:
        """See `Channel.send`; it is dropped where nobody is."""
        for region in regions:
            self._send(region, frames)

    def _send(self, region: int, frames: list[bytes]) -> None:
        try:
            self._out[region].send_multipart(frames, self._zmq.NOBLOCK, copy=False)
            self._refused_s.pop(region, None)
        except self._zmq.Again:
            now = time.monotonic()
            if now - self._refused_s.setdefault(region, now) > _GIVE_UP_S:
                del self._refused_s[region]
                self._out[region].close(linger=0)
                self._out[region] = self._connect(self._addresses[region])

    def close(self) -> None:
        """See `Channel.close`."""
        for out in getattr(self, "_out", {}).values():
            out.close()
        self._in.close(linger=0)
        self._door.close()
        self._asked.close(linger=0)
        self._wake.close()
        self._waked.close()
        self._context.term()
