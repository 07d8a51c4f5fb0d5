"""Regions that meet at ports of this machine, or in a store."""

import contextlib
import socket
import threading

from cocodc_jax.elastic.place import Place, Timing
from cocodc_jax.netlab.children import free_addresses
from tests.waiting import wait_until

KEY = b"k" * 32
# A machine that is busy is not to be taken for a dead one.
TIMING = Timing(beat_s=0.05, dead_after_s=60, grace_s=300, start_s=60)


def places(num, via=None, **options):
    """Return a place for each region."""
    if via is None:
        where = {"addresses": free_addresses(num)}
    else:
        where = {"addresses": (), "via": str(via), "regions": num}
    options = where | {"key": KEY, "timing": TIMING} | options
    return [Place(region, **options) for region in range(num)]


def join(*links):
    assert [link.join(30) for link in links] == [None] * len(links)


def let_in(first, copy):
    """Send a copy to region 1, once it asks to take part."""
    wait_until(lambda: first.at(copy.step))
    first.let_in(1, first.at(copy.step)[1], copy, copy.step)


def mean(links, step, rows=(b"a", b"b")):
    """Send a message of each region; all take the mean of all."""
    futures = [x.send((0, step), row) for x, row in zip(links, rows, strict=True)]
    for future in futures:
        assert dict(future.result(30).rows) == dict(enumerate(rows))


class MovableAddress:
    """An address whose connections are forwarded to another one, which can be changed.

    Behaves as a host name that a scheduler lets point to another machine. Use as a
    context manager.
    """

    def __init__(self, target):
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._open = []
        self._lock = threading.Lock()  # Of the target, and the connections to it.

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self._server.close()
        self.move(None)

    def move(self, target):
        """Forward new connections to another address; end those to the former."""
        with self._lock:
            self._target = target
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._open = []

    def _accept(self):
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:  # The server was closed.
                return

            far = self._connect(near)
            if far is None:
                near.close()
                continue

            for ends in ((near, far), (far, near)):
                threading.Thread(target=_copy, args=ends, daemon=True).start()

    def _connect(self, near):
        """Connect to the target, unless its port is closed or it moves meanwhile."""
        target = self._target
        if target is None:
            return None

        host, _, port = target.rpartition(":")
        try:
            far = socket.create_connection((host, int(port)), timeout=1)
        except OSError:
            return None
        far.settimeout(None)

        with self._lock:
            if self._target != target:
                far.close()
                return None
            self._open += [near, far]
        return far


def _copy(source, target):
    with contextlib.suppress(OSError), source:
        while part := source.recv(1 << 16):
            target.sendall(part)
        target.shutdown(socket.SHUT_RDWR)
