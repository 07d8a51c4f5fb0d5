"""The messages between elastic regions: plain values, and the same as frames of bytes.

The first frame is a JSON header: the kind of the message and its plain fields. Rows and
arrays follow as separate frames. Anything else is refused. Nothing is unpickled, and
every field is checked against its annotation.

This file is the wire format: `pack` and `unpack` follow from the fields of the classes
and their types. What the bytes of a row mean is the engine's matter, see
`engine.flat_buffer`.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

Region = Annotated[int, "index of a region"]
SyncId = tuple[int, int]
# A region and its boot: one life of the region. See `lives.py`.
Life = tuple[Region, int]


class Epoch(NamedTuple):
    """The name of a view: no two views ever have the same one.

    A life proposes a view of each round at most, and no two lives are the same.
    """

    round: int = 0  # Grows with every proposal; 0 for no view.
    region: Region = 0  # The region that proposed the view and coordinates it,
    boot: int = 0  # and its life.

    @property
    def coordinator(self) -> Life:
        """The life that decides in the view."""
        return self.region, self.boot


NO_EPOCH = Epoch()


class Seat(NamedTuple):
    """A region's place in a view."""

    boot: int  # The life of the region, a number that grows with every start.
    since_step: int  # The region takes part in syncs that start after this step.
    # The life whose copy at that step the region starts from, itself for none.
    source: Life


@dataclasses.dataclass(frozen=True)
class View:
    """The regions that take part, by agreement of all of them."""

    epoch: Epoch = NO_EPOCH
    # A seat for each region that takes part.
    seats: Mapping[Region, Seat] = dataclasses.field(default_factory=dict)

    def has(self, life: Life) -> bool:
        """Return whether a region has a seat in this life."""
        seat = self.seats.get(life[0])
        return seat is not None and seat.boot == life[1]

    @property
    def rank(self) -> tuple[int, int]:
        """Orders views: of two that learn of each other, the higher rank continues."""
        return len(self.seats), -min(self.seats, default=0)


class Mark(NamedTuple):
    """What a region's outer fragment was after one sync; see `marks.py`."""

    sync: SyncId
    bits: int  # Hash of all bits of the fragment.
    at: float  # A random projection of the fragment,
    scale: float  # and the root mean square of its values.


@dataclasses.dataclass(frozen=True)
class Join:
    """I ask to take part; `step` is that of my own checkpoint.

    `hears` are the lives whose messages I receive, `knows` the last life of every
    region that I know of.
    """

    step: int
    hears: tuple[Life, ...]
    knows: tuple[Life, ...] = ()


@dataclasses.dataclass(frozen=True)
class Beat:
    """I am alive in `view`; I have applied all syncs that started before a step.

    `hears` and `knows` are those of `Join`. `clock_s` is my clock, `marks` are of the
    last syncs that I have applied.
    """

    view: View
    promised: Epoch
    oldest_step: int
    hears: tuple[Life, ...]
    clock_s: float = 0.0
    knows: tuple[Life, ...] = ()
    marks: tuple[Mark, ...] = ()


@dataclasses.dataclass(frozen=True)
class Row:
    """My message of a sync, for all; `clock_s` is my clock when I send it."""

    epoch: Epoch
    sync: SyncId
    row: bytes
    clock_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Want:
    """I miss your decision of a sync; from the coordinator: I miss your message.

    `lacks` are the regions whose messages I miss, if I know your choice.
    """

    epoch: Epoch
    sync: SyncId
    lacks: tuple[Region, ...] = ()


@dataclasses.dataclass(frozen=True)
class Decision:
    """The messages that the mean of a sync is of, by region."""

    epoch: Epoch
    sync: SyncId
    rows: Mapping[Region, bytes]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The mean of a sync is of the messages of these lives.

    `rows` are the messages that you may lack, by region.
    """

    epoch: Epoch
    sync: SyncId
    members: tuple[Life, ...]
    rows: Mapping[Region, bytes]


@dataclasses.dataclass(frozen=True)
class Report:
    """How long each sender's message of a sync took to me, and my inner step.

    Missing regions delivered no message. `step_s` is 0 if it was not measured.
    """

    sync: SyncId
    seconds: tuple[tuple[Region, float], ...]
    step_s: float


@dataclasses.dataclass(frozen=True)
class Propose:
    """Please promise to take no decision of an earlier view.

    I know the decisions of `known`. `base_epoch` is the view that I am in.
    """

    view: View
    base_epoch: Epoch
    known: tuple[SyncId, ...]


@dataclasses.dataclass(frozen=True)
class Promise:
    """I promise. I know the decisions of `known`; you lack `decisions`."""

    epoch: Epoch
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
# Of the messages, and of the classes that are fields of messages.
_FIELDS = {
    kind: typing.get_type_hints(kind, include_extras=True)
    for kind in (*_KINDS.values(), View, Seat, Epoch, Mark)
}


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
    body = {name: _plain(value, data) for name, value in vars(message).items()}
    kind = type(message).__name__
    header = {"run": run, "from": sender, "kind": kind, "body": body}
    return [json.dumps(header).encode(), *data]


def unpack(frames: Sequence[bytes], num_regions: int) -> Letter:
    """Read the frames that `pack` wrote, or raise `WireError`."""
    try:
        if not frames or len(frames[0]) > MAX_HEADER_BYTES:
            raise ValueError("the header is missing or too long")

        header = json.loads(bytes(frames[0]))
        reader = _Reader(frames[1:], num_regions)
        kind = _KINDS[header["kind"]]
        body = header["body"]

        fields = _FIELDS[kind]
        if set(body) != set(fields):
            raise ValueError("wrong fields")

        values = {name: reader.read(x, body[name]) for name, x in fields.items()}
        if len(reader.used) != len(frames) - 1:
            raise ValueError("the header does not name all frames")

        sender, boot = reader.read(Life, header["from"])
        return Letter(reader.read(str, header["run"]), sender, boot, kind(**values))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise WireError(f"not a message of this protocol: {error!r}") from error


def _plain(value: Any, data: list[bytes]) -> Any:
    """Return a value that JSON can hold; bytes become the index of their frame."""
    match value:
        case bytes():
            data.append(value)
            return len(data) - 1
        case tuple():
            return [_plain(x, data) for x in value]

    if dataclasses.is_dataclass(value):
        return _plain(tuple(vars(value).values()), data)
    if isinstance(value, dict) and value and isinstance(next(iter(value)), int):
        return [[r, _plain(x, data)] for r, x in sorted(value.items())]
    return value


class _Reader:
    """Reads fields; every region must exist, and each frame is used exactly once."""

    def __init__(self, frames: Sequence[bytes], num_regions: int):
        self._frames = frames
        self._num_regions = num_regions
        self.used: set[int] = set()  # Indices of the frames that were read.

    def read(self, kind: Any, value: Any) -> Any:
        """Return a value of an annotated type, as `_plain` wrote it."""
        origin = typing.get_origin(kind) or kind
        args = typing.get_args(kind)

        if kind in _FIELDS:
            return kind(*self.read_all(_FIELDS[kind].values(), value))
        if origin is tuple and args[-1] is ...:
            return tuple(self.read(args[0], x) for x in value)
        if origin is tuple:
            return self.read_all(args, value)
        if origin is Mapping:
            return dict(self.read_all(args, pair) for pair in value or ())

        if kind == Region and _count(value) >= self._num_regions:
            raise ValueError(f"region {value} must be below {self._num_regions}")
        if kind in (int, Region):
            return _count(value)
        if kind is bytes:
            if _count(value) in self.used:
                raise ValueError(f"frame {value} is used twice")
            self.used.add(value)
            return bytes(self._frames[value])

        if kind is float and type(value) in (int, float) and abs(value) < 1e15:
            return float(value)
        if kind is float or not isinstance(value, origin):
            raise ValueError(f"{value!r} is not of type {origin.__name__}")
        return value

    def read_all(self, kinds: Iterable[Any], values: Any) -> tuple:
        """Return values of several types."""
        return tuple(self.read(*pair) for pair in zip(kinds, values, strict=True))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a count")
    return value
