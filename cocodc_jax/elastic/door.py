"""Limits the number of connections that have not shown the key yet.

Each connection takes a file descriptor before its handshake. An attacker who opens
connections faster than ZeroMQ drops them could take all descriptors, and the region
could open no file. So only a share of the descriptors may wait for a handshake. Beyond
it, the oldest waiting connection is closed. A handshake takes a few round trips, so
members finish theirs during a flood too. A peer that has sent a message has shown the
key, and its connection is never closed here.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

HANDSHAKE_MS = 5000
_MAX_WAITING = 512
_SHARE = 4  # One in so many descriptors; the program itself uses the others.
_SAY_S = 60.0


class Door:
    """Watches a listening socket, from before it is bound until it is closed."""

    def __init__(self, listener: Any, context: Any):
        """Watch `listener`, a ZeroMQ socket of `context` that is not bound yet."""
        import zmq

        limit = min(_MAX_WAITING, most_descriptors() // _SHARE)
        self._zmq, self._limit, self._closed = zmq, limit, 0
        self._said_s = -_SAY_S
        # The peer of each descriptor, oldest first.
        self._waiting: dict[int, Any] = {}
        self._lock = threading.Lock()
        listener.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        # ZeroMQ waits for the reader of its events, so it cannot accept far ahead.
        self._events = context.socket(zmq.PAIR)
        self._events.rcvhwm = 1
        name = f"inproc://door-{id(self)}"
        listener.monitor(name, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._events.connect(name)
        self._events.rcvtimeo = 100
        self._ended = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def saw_message(self, frame: Any) -> None:
        """Note that the sender of this frame has the key."""
        with self._lock:
            self._waiting.pop(frame.get(self._zmq.SRCFD), None)

    def close(self) -> None:
        """Stop; the listening socket must be closed already."""
        self._ended = True
        self._thread.join()
        self._events.close(linger=0)

    def _serve(self) -> None:
        while not self._ended:
            try:
                kind, descriptor = struct.unpack(
                    "=hi", self._events.recv_multipart()[0]
                )
            except self._zmq.Again:
                continue
            with self._lock:
                self._waiting.pop(descriptor, None)
                if kind == self._zmq.EVENT_ACCEPTED:
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
        if time.monotonic() - self._said_s > _SAY_S:
            self._said_s = time.monotonic()
            print(
                f"more than {self._limit} open connections have not shown the key; "
                f"{self._closed} closed so far",
                file=sys.stderr,
                flush=True,
            )


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Yield the socket of a descriptor that ZeroMQ owns."""
    found = socket.socket(fileno=descriptor)
    try:
        yield found
    finally:
        found.detach()


def most_descriptors() -> int:
    """Raise the limit of this process's open files as far as allowed; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft > 0 else sys.maxsize
