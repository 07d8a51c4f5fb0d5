"""The messages between elastic regions: plain values, and the same as frames of bytes.

The first frame is a JSON header: the kind of the message and its plain fields. Rows and
arrays follow as separate frames. Anything else is refused. Nothing is unpickled, and
the type of every field is checked.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

SyncId = tuple[int, int]
# A region and its boot, see `Seat`.
Life = tuple[int, int]


class Seat(NamedTuple):
    """A region's place in a view."""

    boot: int  # The life of the region, a number that grows with every start.
    since_step: int  # The region takes part in syncs that start after this step.


@dataclasses.dataclass(frozen=True)
class View:
    """The regions that take part, by agreement of all of them."""

    # Round * M + the region that proposed the view and coordinates it; 0 for no view.
    epoch: int = 0
    # A seat for each region that takes part.
    seats: Mapping[int, Seat] = dataclasses.field(default_factory=dict)

    def has(self, life: Life) -> bool:
        """Return whether a region has a seat in this life."""
        seat = self.seats.get(life[0])
        return seat is not None and seat.boot == life[1]

    @property
    def rank(self) -> tuple[int, int]:
        """Orders views: of two that learn of each other, the higher rank continues."""
        return len(self.seats), -min(self.seats, default=0)


@dataclasses.dataclass(frozen=True)
class Join:
    """I ask to take part; `step` is that of my own checkpoint."""

    step: int
    hears: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Beat:
    """I am alive in `view`; I have applied all syncs that started before a step.

    `hears` are the regions whose messages I receive. `clock_s` is my clock.
    """

    view: View
    promised: int
    oldest_step: int
    hears: tuple[int, ...]
    clock_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Row:
    """My message of a sync, for all; `clock_s` is my clock when I send it."""

    epoch: int
    sync: SyncId
    row: bytes
    clock_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Want:
    """I miss your decision of a sync; from the coordinator: I miss your message."""

    epoch: int
    sync: SyncId


@dataclasses.dataclass(frozen=True)
class Decision:
    """The messages that the mean of a sync is of, by region."""

    epoch: int
    sync: SyncId
    rows: Mapping[int, bytes]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The mean of a sync is of the messages of these lives.

    `rows` are the messages that you may lack, by region.
    """

    epoch: int
    sync: SyncId
    members: tuple[Life, ...]
    rows: Mapping[int, bytes]


@dataclasses.dataclass(frozen=True)
class Report:
    """How long each sender's message of a sync took to me, and my inner step.

    Missing regions delivered no message. `step_s` is 0 if it was not measured.
    """

    sync: SyncId
    seconds: tuple[tuple[int, float], ...]
    step_s: float


@dataclasses.dataclass(frozen=True)
class Propose:
    """Please promise to take no decision of an earlier view.

    I know the decisions of `known`. `base_epoch` is the view that I am in.
    """

    view: View
    base_epoch: int
    known: tuple[SyncId, ...]


@dataclasses.dataclass(frozen=True)
class Promise:
    """I promise. I know the decisions of `known`; you lack `decisions`."""

    epoch: int
    known: tuple[SyncId, ...]
    decisions: tuple[Decision, ...]


@dataclasses.dataclass(frozen=True)
class Install:
    """All have promised, so the view holds; you lack `decisions`."""

    view: View
    decisions: tuple[Decision, ...]


@dataclasses.dataclass(frozen=True)
class Leave:
    """I leave on purpose."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The copy of the state that a joining region starts from."""

    step: int  # Inner steps done at the copy.
    header: dict[str, Any]  # Plain values, among them the order of the arrays.
    arrays: tuple[bytes, ...]  # Arrays as bytes.


_OfViews = Join | Beat | Propose | Promise | Install | Leave | Snapshot
_OfSyncs = Row | Want | Decision | Choice | Report
Message = _OfViews | _OfSyncs

MAX_HEADER_BYTES = 1 << 20

_KINDS = {kind.__name__: kind for kind in typing.get_args(Message)}


class WireError(ValueError):
    """The frames are not a message of this protocol."""


class Letter(NamedTuple):
    """A message, the region and life that sent it, and the run that it is of."""

    run: str  # Identifies method, model, data and code.
    sender: int
    boot: int
    message: Message


def pack(letter: Letter) -> list[bytes]:
    """Write a letter as frames."""
    run, *sender, message = letter
    data: list[bytes] = []
    names = [field.name for field in dataclasses.fields(message)]
    body = {name: _plain(getattr(message, name), data) for name in names}
    kind = type(message).__name__
    header = {"run": run, "from": sender, "kind": kind, "body": body}
    return [json.dumps(header).encode(), *data]


def unpack(frames: Sequence[bytes], num_regions: int) -> Letter:
    """Read the frames that `pack` wrote, or raise `WireError`."""
    try:
        if not frames or len(frames[0]) > MAX_HEADER_BYTES:
            raise ValueError("the header is missing or too long")
        header = json.loads(bytes(frames[0]))
        sender, boot = map(_count, header["from"])
        reader = _Reader(frames[1:], num_regions)
        kind, body = _KINDS[header["kind"]], header["body"]
        names = [field.name for field in dataclasses.fields(kind)]
        if set(body) != set(names):
            raise ValueError("wrong fields")
        values = {name: _READ[name](reader, body[name]) for name in names}
        if len(reader.used) != len(frames) - 1:
            raise ValueError("the header does not name all frames")
        run = _of_type(header["run"], str)
        return Letter(run, reader.region(sender), boot, kind(**values))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise WireError(f"not a message of this protocol: {error!r}") from error


def _plain(value: Any, data: list[bytes]) -> Any:
    """Return a value that JSON can hold; bytes become the index of their frame."""
    match value:
        case bytes():
            data.append(value)
            return len(data) - 1
        case View(epoch, seats):
            return [epoch, [[r, *seat] for r, seat in sorted(seats.items())]]
        case Decision(epoch, sync, rows):
            return [epoch, sync, _plain(rows, data)]
        case tuple():
            return [_plain(x, data) for x in value]
    if isinstance(value, dict) and value and isinstance(next(iter(value)), int):
        return [[r, _plain(row, data)] for r, row in value.items()]
    return value


class _Reader:
    """Reads fields; every region must exist, and each frame is used exactly once."""

    def __init__(self, frames: Sequence[bytes], num_regions: int):
        self._frames, self.used, self._num_regions = frames, set(), num_regions

    def frame(self, index: Any) -> bytes:
        if _count(index) in self.used:
            raise ValueError(f"frame {index} is used twice")
        self.used.add(index)
        return bytes(self._frames[index])

    def region(self, value: Any) -> int:
        if _count(value) >= self._num_regions:
            raise ValueError(f"region {value} must be below {self._num_regions}")
        return value

    def sync(self, value: Any) -> SyncId:
        fragment_id, start_step = map(_count, value)
        return fragment_id, start_step

    def members(self, value: Any) -> tuple[Life, ...]:
        return tuple((self.region(r), _count(boot)) for r, boot in value)

    def durations(self, value: Any) -> tuple[tuple[int, float], ...]:
        return tuple((self.region(r), _seconds(s)) for r, s in value)

    def view(self, value: Any) -> View:
        epoch, seats = value
        found = {self.region(r): Seat(*map(_count, seat)) for r, *seat in seats}
        return View(_count(epoch), found)

    def rows(self, value: Any) -> dict[int, bytes]:
        return {self.region(r): self.frame(i) for r, i in value or ()}

    def decisions(self, value: Any) -> tuple[Decision, ...]:
        return tuple(
            Decision(_count(epoch), self.sync(sync), self.rows(rows))
            for epoch, sync, rows in value
        )


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a count")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e15:
        raise ValueError(f"{value!r} is not a time")
    return float(value)


def _of_type(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{value!r} is not of type {kind.__name__}")
    return value


_COUNTS = "step", "epoch", "base_epoch", "promised", "oldest_step"
_READ: dict[str, Callable[[_Reader, Any], Any]] = {
    **dict.fromkeys(_COUNTS, lambda _, value: _count(value)),
    **dict.fromkeys(("clock_s", "step_s"), lambda _, value: _seconds(value)),
    "view": _Reader.view,
    "hears": lambda reader, value: tuple(map(reader.region, value)),
    "sync": _Reader.sync,
    "known": lambda reader, value: tuple(map(reader.sync, value)),
    "members": _Reader.members,
    "row": _Reader.frame,
    "rows": _Reader.rows,
    "arrays": lambda reader, value: tuple(map(reader.frame, value)),
    "seconds": _Reader.durations,
    "decisions": _Reader.decisions,
    "header": lambda _, value: _of_type(value, dict),
}
