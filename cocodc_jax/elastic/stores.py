"""Where objects of `elastic.objects` are: a folder of files, or any store of fsspec.

Others may write to it too. What is not a regular file (a pipe, a device, a link) is
neither waited for nor followed. A call may hang, as on a dead network file system, so
calls run in a `Lane`, which gives them up after a while.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from cocodc_jax.elastic.place import is_bucket
from cocodc_jax.files import NoRegularFileError, open_regular

_CHUNK_BYTES = 1 << 24
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Threads of a lane whose call hangs, at most: no more calls are begun then.
MOST_LOST = 16


class RefusedError(ValueError):
    """An object is no file, is not signed with the key, or is too long."""


class Store(Protocol):
    """Objects by name; errors are those of its client."""

    def list(self) -> list[str]:
        """Return the names of all objects, in any order."""
        ...

    def read(self, name: str, start: int, end: int) -> bytes:
        """Return bytes of an object, fewer if it is shorter.

        Raises FileNotFoundError if there is no such object, `RefusedError` if it is no
        regular file.
        """
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write an object, which others see once it is complete."""

    def remove(self, name: str) -> None:
        """Remove an object, or what a write that failed has left of it."""


def open_store(via: str) -> Store:
    """Open the store that a folder, or a URL of fsspec, names."""
    import fsspec

    store, root = fsspec.url_to_fs(via, use_listings_cache=False)
    root = root.rstrip("/")
    return Bucket(store, root) if is_bucket(via) else Folder(root)


class Folder:
    """A `Store` of files in a folder of this machine or a network file system."""

    def __init__(self, root: str):
        self._root = root

    def list(self) -> list[str]:
        """See `Store.list`."""
        try:
            return os.listdir(self._root)
        except FileNotFoundError:
            return []

    def read(self, name: str, start: int, end: int) -> bytes:
        """See `Store.read`."""
        try:
            file = open_regular(f"{self._root}/{name}", follows_links=False)
        except NoRegularFileError as error:
            raise RefusedError(f"{name} is not a regular file") from error

        with file:
            parts = []
            at = start
            while at < end:
                part = os.pread(file.fileno(), min(end - at, _CHUNK_BYTES), at)
                if not part:
                    break
                parts.append(part)
                at += len(part)

            return b"".join(parts)

    def write(self, name: str, data: bytes) -> None:
        """See `Store.write`; the file is renamed once it is complete."""
        partial = f"{self._root}/.{name}"
        with open(os.open(partial, _WRITE, 0o666), "wb") as file:
            file.write(data)
        os.replace(partial, f"{self._root}/{name}")

    def remove(self, name: str) -> None:
        """See `Store.remove`."""
        for path in (f"{self._root}/{name}", f"{self._root}/.{name}"):
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass


class Bucket:
    """A `Store` of fsspec, where a put is atomic."""

    def __init__(self, store: Any, root: str):
        self._store = store
        self._root = root

    def list(self) -> list[str]:
        """See `Store.list`."""
        try:
            paths = self._store.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def read(self, name: str, start: int, end: int) -> bytes:
        """See `Store.read`."""
        return self._store.cat_file(f"{self._root}/{name}", start=start, end=end)

    def write(self, name: str, data: bytes) -> None:
        """See `Store.write`."""
        self._store.pipe_file(f"{self._root}/{name}", data)

    def remove(self, name: str) -> None:
        """See `Store.remove`."""
        self._store.rm_file(f"{self._root}/{name}")


class Job:
    """A call of a `Lane`; `done` is set once it has returned, or was given up."""

    def __init__(self, call: Callable[[], None], patience_s: float):
        self.call = call
        self.patience_s = patience_s
        self.began_s = 0.0
        self.is_lost = False
        self.done = threading.Event()


def wait_for(jobs: Iterable[Job], end: float) -> bool:
    """Wait until calls are done, to a time of the monotonic clock; say if all are."""
    return all([job.done.wait(max(end - time.monotonic(), 0)) for job in jobs])


class Lane:
    """Some threads that run calls, in the order in which they come.

    A call that takes longer than its patience is given up: another thread takes the
    place of its own, which ends if the call ever returns. The threads are daemons, so
    that a call that never returns does not keep the process alive.
    """

    def __init__(self, num_threads: int):
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: set[Job] = set()
        self._num_threads = num_threads
        self._num_lost = 0
        for _ in range(num_threads):
            self._start()

    @property
    def is_stuck(self) -> bool:
        """Whether so many calls hang that no more are given up."""
        return self._num_lost >= MOST_LOST

    def submit(self, call: Callable[[], None], patience_s: float) -> Job:
        """Run a call, which handles its errors itself, when a thread is free."""
        job = Job(call, patience_s)
        self._jobs.put(job)
        return job

    def give_up_hung(self) -> int:
        """Replace the threads of calls that hang; return how many."""
        now = time.monotonic()
        with self._lock:
            hung = [
                job
                for job in self._running
                if not job.is_lost and now - job.began_s > job.patience_s
            ]
            hung = hung[: MOST_LOST - self._num_lost]
            for job in hung:
                job.is_lost = True
                job.done.set()
                self._num_lost += 1
                self._start()

        return len(hung)

    def close(self) -> None:
        """Begin no further calls."""
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _start(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                job.began_s = time.monotonic()
                self._running.add(job)

            try:
                job.call()
            finally:
                with self._lock:
                    self._running.discard(job)
                    job.done.set()
                    self._num_lost -= job.is_lost

            if job.is_lost:
                return  # Another thread has its place.
