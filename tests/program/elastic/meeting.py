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
    """Places of as many regions."""
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


class Name:
    """A port that stands for another one, as a name does that can be changed.

    Use as a context manager.
    """

    def __init__(self, address):
        self.target = address
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._open = []
        self._lock = threading.Lock()

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self._server.close()
        self.change("")

    def change(self, address):
        """Let the name stand for another address; connections to the former end."""
        with self._lock:
            self.target = address
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._open = []

    def _accept(self):
        with contextlib.suppress(OSError):  # It is closed.
            while True:
                near, _ = self._server.accept()

                with self._lock:
                    host, _, port = self.target.rpartition(":")
                    try:
                        far = socket.create_connection((host, int(port)), timeout=1)
                    except (OSError, ValueError):
                        near.close()
                        continue
                    far.settimeout(None)
                    self._open += [near, far]

                for ends in ((near, far), (far, near)):
                    threading.Thread(target=_copy, args=ends, daemon=True).start()


def _copy(source, target):
    with contextlib.suppress(OSError), source:
        while part := source.recv(1 << 16):
            target.sendall(part)
        target.shutdown(socket.SHUT_RDWR)
