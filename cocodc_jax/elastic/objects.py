"""Messages as objects of a store that all regions reach: nobody opens a port.

The store is a shared folder or a bucket, any URL of fsspec. A message is one object
for all who are to read it, written once under a name of its own:

    SENDER-BOOT-NUMBER-RECEIVERS-TAG

in decimal, but the receivers, one bit each, and the tag in hexadecimal. The tag is the
start of HMAC-SHA256(key, the name before it), so a name that no member made is not even
opened. A region lists the names now and then and reads those that are new and for it;
what is there before it starts it takes for read. The sender removes an object after
three times `dead_after_s` and when it ends, and when it starts what its earlier lives
left.

    HMAC-SHA256(key, name, head) | head | frames
    head = SHA-256(frames) | number of frames | length of each

So only who has the key is listened to, and the lengths are checked before anything but
the first `_FIRST_BYTES` is read. Objects are signed, not encrypted: who may read the
store reads the messages. A call of the store that hangs is given up, as if the message
was lost.
"""

from __future__ import annotations

import collections
import contextlib
import functools
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
from cocodc_jax.elastic.link import Arrived
from cocodc_jax.elastic.messages import MAX_HEADER_BYTES
from cocodc_jax.elastic.place import Place, is_bucket
from cocodc_jax.elastic.stores import Job, Lane, RefusedError, open_store, wait_for
from cocodc_jax.files import TransientError, say

FOLDER_POLL_S = 0.05
BUCKET_POLL_S = 1.0
_KEPT = 3  # Times `dead_after_s`.
_QUEUE = 256  # Messages that wait to be written at most.
_WORKERS = 4  # Threads for what is up to `_FIRST_BYTES` long, and as many for longer.
_FAREWELL_S = 5.0
_REPORT_EVERY_S = 60.0
# How long the last messages can be read, at least.
_STAY_S = 1.0
_STAY_POLLS = 4
_FIRST_BYTES = 1 << 18
_CLIENTS = {"gs": "gcsfs", "s3": "s3fs"}
_NAME = re.compile(
    r"(?P<hidden>\.?)(?P<start>(?P<sender>\d{1,9})-(?P<boot>\d{1,20})-\d{1,20}"
    r"-(?P<receivers>[0-9a-f]{1,200}))-(?P<tag>[0-9a-f]{16})"
)
_TAG_DIGITS = 16
# A call hangs after this share of `dead_after_s`, but no sooner than after `_HANGS_S`,
# and as much longer as its bytes take at the slowest.
_HANGS_SHARE = 0.5
_HANGS_S = 2.0
_SLOWEST_BYTES_S = 1 << 20
# So many times as long as a look takes is the pause after it, if the store is full of
# strange names; and this share of `dead_after_s` at most.
_REST = 9
_LONGEST_PAUSE = 0.1
_MAC_BYTES = hashlib.sha256().digest_size
_COUNT = struct.Struct("<I")


def reach(via: str) -> None:
    """Check that a store can be listed; makes a folder that is missing.

    Raises MissingExtraError if the package for this kind of store is not installed,
    ValueError with what its client says if it cannot be reached or made.
    """
    client = next((x for x in _CLIENTS if via.startswith(f"{x}://")), "")
    with extra(client.replace("gs", "gcs") or "elastic"):
        import fsspec

        try:
            store, root = fsspec.url_to_fs(via, use_listings_cache=False)
            if not is_bucket(via):
                store.makedirs(root, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                store.ls(root, detail=False)
        except Exception as error:  # Clients of stores raise what they like.
            if isinstance(error, ImportError) and client:
                raise ModuleNotFoundError(str(error), name=_CLIENTS[client]) from error

            kind = TransientError if client else ValueError  # Of a folder, a flag.
            raise kind(f"via={via!r} cannot be reached: {error}") from error


class Objects:
    """A `Channel` through a store; see `open_channel`."""

    def __init__(self, place: Place, boot: int, max_frame_bytes: int):
        self._store = open_store(place.via)
        self._root = place.via
        self._poll_s = BUCKET_POLL_S if is_bucket(place.via) else FOLDER_POLL_S
        self._region = place.region
        self._boot = boot

        self._key = key_of(place.key)
        self._keep_s = _KEPT * place.timing.dead_after_s
        self._hangs_s = max(_HANGS_SHARE * place.timing.dead_after_s, _HANGS_S)
        self._longest_pause_s = _LONGEST_PAUSE * place.timing.dead_after_s
        self._limit = max(MAX_HEADER_BYTES, max_frame_bytes)

        self._numbers = itertools.count()
        self._written: collections.deque[tuple[float, str]] = collections.deque()
        self._inbox: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self._last_report_s: dict[str, float] = {}
        # Signs of life do not wait behind what takes long to write or read.
        self._small = Lane(_WORKERS)
        self._large = Lane(_WORKERS)
        self._lists = Lane(1)
        self._writes: set[Job] = set()
        self._seen: set[str] = set()
        self._has_looked = False
        self._ended = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def receive(self, seconds: float) -> list[Arrived]:
        """See `Channel.receive`."""
        arrived = []
        with contextlib.suppress(queue.Empty):
            arrived.append(self._inbox.get(timeout=seconds))
            while len(arrived) < _QUEUE:
                arrived.append(self._inbox.get_nowait())
        return [Arrived(frames) for frames in arrived if frames is not None]

    def wake(self) -> None:
        """See `Channel.wake`."""
        self._inbox.put(None)

    def send(self, regions: Sequence[int], frames: list[bytes]) -> None:
        """See `Channel.send`; what more than `_QUEUE` messages wait for is dropped."""
        self._writes = {write for write in self._writes if not write.done.is_set()}
        now = time.monotonic()
        while self._written and now - self._written[0][0] > self._keep_s:
            self._remove(self._written.popleft()[1])

        if len(self._writes) >= _QUEUE:
            return

        mask = sum(1 << region for region in regions)
        number = next(self._numbers)
        start = f"{self._region:03}-{self._boot:020}-{number:010}-{mask:x}"
        name = f"{start}-{tag(self._key, start)}"
        size = sum(map(len, frames))
        lane = self._large if size > _FIRST_BYTES else self._small
        write = functools.partial(self._write, name, frames)
        self._writes.add(lane.submit(write, self._patience_s(size)))

    def answer(self, way_back: Any, frames: list[bytes]) -> None:
        """Do nothing: a life that can write to the store also reads it."""

    def close(self) -> None:
        """See `Channel.close`; nothing of this region is left in the store."""
        self._ended.set()
        stay_s = max(_STAY_S, _STAY_POLLS * self._poll_s)
        end = time.monotonic() + _FAREWELL_S + stay_s
        wait_for(self._writes, end - stay_s)
        time.sleep(stay_s)
        self._thread.join(max(end - time.monotonic(), 0))

        gone = []
        while self._written:  # Late writes may still add to it.
            gone.append(self._remove(self._written.popleft()[1]))
        wait_for(gone, max(end, time.monotonic() + _STAY_S))

        for lane in (self._small, self._large, self._lists):
            lane.close()

    def _patience_s(self, size: int) -> float:
        """Return how long a call for so many bytes may take."""
        return self._hangs_s + size / _SLOWEST_BYTES_S

    def _remove(self, name: str) -> Job:
        def remove() -> None:
            with contextlib.suppress(Exception):  # It is gone, or will not go.
                self._store.remove(name)

        return self._small.submit(remove, self._hangs_s)

    def _write(self, name: str, frames: list[bytes]) -> None:
        data = seal(self._key, name, frames)
        with self._reporting(f"writing to {self._root}"):
            try:
                self._store.write(name, data)
            except Exception:
                with contextlib.suppress(Exception):
                    self._store.remove(name)  # What fitted on a full disk.
                raise
            self._written.append((time.monotonic(), name))

    def _poll(self) -> None:
        pause_s = self._poll_s
        while not self._ended.wait(pause_s):
            begin_s = time.monotonic()
            self._look()
            for lane in (self._small, self._large):
                self._give_up_hung(lane)
            rest_s = _REST * (time.monotonic() - begin_s)
            pause_s = max(self._poll_s, min(rest_s, self._longest_pause_s))

    def _give_up_hung(self, lane: Lane) -> None:
        if num := lane.give_up_hung():
            self._report(f"calls of {self._root}", f"{num} hang and are given up")

    def _names(self) -> list[str] | None:
        """List the store; None if that fails or hangs, or the channel ends."""
        names: list[list[str]] = []

        def list_all() -> None:
            with self._reporting(f"listing {self._root}"):
                names.append(self._store.list())

        if self._lists.is_stuck:
            return None

        job = self._lists.submit(list_all, self._hangs_s)
        while not wait_for([job], time.monotonic() + self._poll_s):
            self._give_up_hung(self._lists)
            if self._ended.is_set():
                return None

        return names[0] if names else None

    def _look(self) -> None:
        """Read what is new; at first take all for read, but remove what is old.

        A name that no member made costs nothing but its place in `_seen`.
        """
        names = self._names()
        if names is None:
            return

        is_first = not self._has_looked
        self._has_looked = True
        present = set(names)
        new = present - self._seen
        # In place: a thread that failed to read a name discards it at any moment.
        self._seen &= present
        self._seen |= new

        for name in sorted(new):
            match = _NAME.fullmatch(name)
            if match is None:
                continue

            is_own = int(match["sender"]) == self._region
            is_old = is_first and is_own and int(match["boot"]) != self._boot
            is_addressed = int(match["receivers"], 16) >> self._region & 1
            is_for_this = is_addressed and not (is_first or is_own or match["hidden"])
            if not (is_old or is_for_this) or not self._is_tagged(match):
                continue

            if is_old:
                self._remove(name.removeprefix("."))
            else:
                self._small.submit(functools.partial(self._take, name), self._hangs_s)

    def _is_tagged(self, match: re.Match) -> bool:
        return hmac.compare_digest(match["tag"], tag(self._key, match["start"]))

    def _take(self, name: str) -> None:
        with self._reading(name):
            first = self._store.read(name, 0, _FIRST_BYTES)
            lengths, start = unseal(self._key, name, first, self._limit)
            size = start + sum(lengths)
            if size <= len(first):
                self._inbox.put(opened(name, first, lengths, start))
                return
            rest = functools.partial(self._take_rest, name, first, lengths, start)
            self._large.submit(rest, self._patience_s(size))

    def _take_rest(self, name: str, first: bytes, lengths: Any, start: int) -> None:
        with self._reading(name):
            data = first + self._store.read(name, len(first), start + sum(lengths))
            self._inbox.put(opened(name, data, lengths, start))

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
    def _reporting(self, failure: str) -> Iterator[None]:
        """Go on after an error, as if the message was lost."""
        try:
            yield
        except Exception as error:  # Clients of stores raise errors of any type.
            self._report(failure, error)

    def _report(self, failure: str, why: object) -> None:
        """Report a failure; the same one at most once a minute."""
        now = time.monotonic()
        last = self._last_report_s.get(failure, -_REPORT_EVERY_S)
        if now - last >= _REPORT_EVERY_S:
            self._last_report_s[failure] = now
            say(f"{failure}: {why}")


def key_of(shared: bytes) -> bytes:
    """Return the key of a store's objects, derived from the regions' shared key."""
    return hashlib.sha256(b"cocodc_jax objects" + shared).digest()


def tag(key: bytes, start: str) -> str:
    """Return the end of an object's name, which only who has the key can make.

    Args:
      key: see `key_of`.
      start: of the name: sender, boot, number and receivers.
    """
    return _mac(key, start, b"")[: _TAG_DIGITS // 2].hex()


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
