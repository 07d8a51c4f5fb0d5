"""Messages as objects of a store that all regions reach: nobody opens a port.

The store is a shared folder or a bucket, any URL of fsspec. A message is one object
for all who are to read it, written once under a name of its own:

    SENDER-BOOT-NUMBER-RECEIVERS

in decimal, but the receivers, one bit each, in hexadecimal. A region lists the names
now and then and reads those that are new and for it; what is there before it starts it
takes for read. The sender removes an object after three times `dead_after_s` and when
it ends, and when it starts what its earlier lives left.

    HMAC-SHA256(key, name, head) | head | frames
    head = SHA-256(frames) | number of frames | length of each

So only who has the key is listened to, and the lengths are checked before anything but
the first `_FIRST_BYTES` is read. Objects are signed, not encrypted: who may read the
store reads the messages.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import hashlib
import hmac
import itertools
import queue
import re
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from cocodc_jax._extras import extra
from cocodc_jax.elastic.messages import MAX_HEADER_BYTES
from cocodc_jax.elastic.place import Place, is_bucket
from cocodc_jax.files import TransientError, say

FOLDER_POLL_S, BUCKET_POLL_S = 0.05, 1.0
_KEPT = 3  # Times `dead_after_s`.
_QUEUE = 256  # Messages that wait to be written at most.
_WORKERS = 4  # Threads for what is up to `_FIRST_BYTES` long, and as many for longer.
_FAREWELL_S, _SAY_S = 5.0, 60.0
_STAY_S, _STAY_POLLS = 1.0, 4  # How long the last messages can be read, at least.
_FIRST_BYTES = 1 << 18
_CLIENTS = {"gs": "gcsfs", "s3": "s3fs"}
_NAME = re.compile(r"\.?(\d{1,9})-(\d{1,20})-\d{1,20}-([0-9a-f]{1,200})")
_MAC_BYTES = hashlib.sha256().digest_size
_COUNT = struct.Struct("<I")


class RefusedError(ValueError):
    """An object is not signed with the key, or not as long as it may be."""


def reach(via: str) -> None:
    """Check that a store can be listed; makes a folder that is missing.

    Raises MissingExtraError if the package for this kind of store is not installed,
    ValueError with what its client says if it cannot be reached or made.
    """
    client = next((x for x in _CLIENTS if via.startswith(f"{x}://")), "")
    with extra(client.replace("gs", "gcs") or "elastic"):
        import fsspec  # noqa: F401

        try:
            store, root = _open(via)
            if not is_bucket(via):
                store.makedirs(root, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                store.ls(root, detail=False)
        except Exception as error:  # Clients of stores raise what they like.
            if isinstance(error, ImportError) and client:
                raise ModuleNotFoundError(str(error), name=_CLIENTS[client]) from error
            kind = TransientError if client else ValueError  # Of a folder, a flag.
            raise kind(f"via={via!r} cannot be reached: {error}") from error


def _open(via: str) -> tuple[Any, str]:
    """Return a file system of fsspec, which lists anew each time, and a path in it."""
    import fsspec

    store, root = fsspec.url_to_fs(via, use_listings_cache=False)
    return store, root.rstrip("/")


class Objects:
    """A `Channel` through a store; see `open_channel`."""

    def __init__(self, place: Place, boot: int, max_frame_bytes: int):
        self._store, self._root = _open(place.via)
        self._puts = is_bucket(place.via)  # A put is atomic; a file is renamed.
        self._poll_s = BUCKET_POLL_S if self._puts else FOLDER_POLL_S
        self._region, self._boot = place.region, boot
        self._key = hashlib.sha256(b"cocodc_jax objects" + place.key).digest()
        self._keep_s = _KEPT * place.timing.dead_after_s
        self._limit = max(MAX_HEADER_BYTES, max_frame_bytes)
        self._numbers = itertools.count()
        self._written: collections.deque[tuple[float, str]] = collections.deque()
        self._inbox: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self._said_s: dict[str, float] = {}
        # Signs of life do not wait behind what takes long to write or read.
        self._small = concurrent.futures.ThreadPoolExecutor(_WORKERS)
        self._large = concurrent.futures.ThreadPoolExecutor(_WORKERS)
        self._writes: set[concurrent.futures.Future] = set()
        self._seen: set[str] = set()
        self._has_looked = False
        self._look()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def receive(self, seconds: float) -> list[list[bytes]]:
        """See `Channel.receive`."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._inbox.get(timeout=seconds))
            while len(found) < _QUEUE:
                found.append(self._inbox.get_nowait())
        return [frames for frames in found if frames is not None]

    def wake(self) -> None:
        """See `Channel.wake`."""
        self._inbox.put(None)

    def send(self, regions: Sequence[int], frames: list[bytes]) -> None:
        """See `Channel.send`; what more than `_QUEUE` messages wait for is dropped."""
        self._writes = {write for write in self._writes if not write.done()}
        now = time.monotonic()
        while self._written and now - self._written[0][0] > self._keep_s:
            self._small.submit(self._remove, self._written.popleft()[1])
        if len(self._writes) >= _QUEUE:
            return
        mask = sum(1 << region for region in regions)
        number = next(self._numbers)
        name = f"{self._region:03}-{self._boot:020}-{number:010}-{mask:x}"
        is_large = sum(map(len, frames)) > _FIRST_BYTES
        lane = self._large if is_large else self._small
        self._writes.add(lane.submit(self._write, name, frames))

    def close(self) -> None:
        """See `Channel.close`; nothing of this region is left in the store."""
        self._ended.set()
        concurrent.futures.wait(self._writes, _FAREWELL_S)
        time.sleep(max(_STAY_S, _STAY_POLLS * self._poll_s))
        self._thread.join(_FAREWELL_S)
        gone = []
        while self._written:  # Late writes may still add to it.
            _, name = self._written.popleft()
            gone.append(self._small.submit(self._remove, name))
        concurrent.futures.wait(gone, _FAREWELL_S)
        for lane in (self._small, self._large):
            lane.shutdown(wait=False, cancel_futures=True)

    def _list(self) -> list[str]:
        try:
            paths = self._store.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(Exception):  # It is gone, or will not go.
            self._store.rm_file(f"{self._root}/{name}")

    def _write(self, name: str, frames: list[bytes]) -> None:
        data = seal(self._key, name, frames)
        first = name if self._puts else f".{name}"
        with self._reporting(f"writing to {self._root}"):
            try:
                self._store.pipe_file(f"{self._root}/{first}", data)
                if first != name:
                    self._store.mv(f"{self._root}/{first}", f"{self._root}/{name}")
            except Exception:
                self._remove(first)  # What fitted on a full disk.
                raise
            self._written.append((time.monotonic(), name))

    def _poll(self) -> None:
        while not self._ended.wait(self._poll_s):
            self._look()

    def _look(self) -> None:
        """Read what is new; at first take all for read, but remove what is old."""
        with self._reporting(f"listing {self._root}"):
            names = self._list()
            is_first, self._has_looked = not self._has_looked, True
            self._seen.intersection_update(names)
            for name in names:
                match = _NAME.fullmatch(name)
                if name in self._seen or not match:
                    continue
                self._seen.add(name)
                is_own = int(match[1]) == self._region
                is_for_this = int(match[3], 16) >> self._region & 1
                if is_first and is_own and int(match[2]) != self._boot:
                    self._small.submit(self._remove, name)
                elif is_for_this and not (is_first or is_own or name.startswith(".")):
                    self._small.submit(self._take, name)

    def _take(self, name: str) -> None:
        with self._reading(name):
            first = self._read(name, 0, _FIRST_BYTES)
            lengths, start = unseal(self._key, name, first, self._limit)
            if start + sum(lengths) <= len(first):
                self._inbox.put(opened(name, first, lengths, start))
            else:
                self._large.submit(self._take_rest, name, first, lengths, start)

    def _take_rest(self, name: str, first: bytes, lengths: Any, start: int) -> None:
        with self._reading(name):
            data = first + self._read(name, len(first), start + sum(lengths))
            self._inbox.put(opened(name, data, lengths, start))

    def _read(self, name: str, start: int, end: int) -> bytes:
        return self._store.cat_file(f"{self._root}/{name}", start=start, end=end)

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        with self._reporting(f"reading from {self._root}"):
            try:
                yield
            except FileNotFoundError:
                pass  # Its writer removed it.
            except Exception as error:
                if not isinstance(error, RefusedError):
                    self._seen.discard(name)  # The next look reads it again.
                raise

    @contextlib.contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        """Go on after an error, as if the message was lost."""
        try:
            yield
        except Exception as error:  # Clients of stores raise what they like.
            now = time.monotonic()
            if now - self._said_s.get(what, -_SAY_S) >= _SAY_S:
                self._said_s[what] = now
                say(f"{what}: {error}")


def seal(key: bytes, name: str, frames: Sequence[bytes]) -> bytes:
    """Return the object of a message."""
    body = b"".join(frames)
    lengths = struct.pack(f"<{len(frames)}Q", *map(len, frames))
    head = hashlib.sha256(body).digest() + _COUNT.pack(len(frames)) + lengths
    return _mac(key, name, head) + head + body


def unseal(
    key: bytes, name: str, first: bytes, limit: int
) -> tuple[tuple[int, ...], int]:
    """Return how long the frames of an object are, and where they start.

    `first` are its first `_FIRST_BYTES`, or all; a frame has `limit` bytes at most.
    """
    table_at = 2 * _MAC_BYTES + _COUNT.size
    count = _COUNT.unpack_from(first, 2 * _MAC_BYTES)[0] if first[table_at - 1 :] else 0
    start = table_at + 8 * count
    mac = _mac(key, name, first[_MAC_BYTES:start])
    is_signed = hmac.compare_digest(mac, first[:_MAC_BYTES])
    if not count or start > len(first) or not is_signed:
        raise RefusedError(f"{name} is not signed with the key of this run")
    lengths = struct.unpack_from(f"<{count}Q", first, table_at)
    longest = max(lengths)
    if longest > limit:
        raise RefusedError(f"{name} has a frame of {longest} bytes, more than {limit}")
    return lengths, start


def opened(name: str, data: bytes, lengths: Sequence[int], start: int) -> list[bytes]:
    """Return the frames of an object that `unseal` has accepted."""
    end = start + sum(lengths)
    body = memoryview(data)[start:end]
    signed = data[_MAC_BYTES : 2 * _MAC_BYTES]
    if len(data) < end or hashlib.sha256(body).digest() != signed:
        raise RefusedError(f"{name} is not what was signed")
    ends = itertools.accumulate(lengths)
    return [bytes(body[end - n : end]) for n, end in zip(lengths, ends, strict=True)]


def _mac(key: bytes, name: str, head: bytes) -> bytes:
    return hmac.digest(key, name.encode() + b"\0" + head, "sha256")
