"""Messages between regions as frames of bytes: a JSON header, then the data.

A header names the kind of the message and its plain fields. Rows and arrays follow as
separate frames. Anything else is refused. Nothing is unpickled, and the type of every
field is checked.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from cocodc_jax.elastic import messages as m

MAX_HEADER_BYTES = 1 << 20

_KINDS = {
    kind.__name__: kind
    for kind in (
        m.Join,
        m.Beat,
        m.Row,
        m.Want,
        m.Decision,
        m.Choice,
        m.Report,
        m.Propose,
        m.Promise,
        m.Install,
        m.Leave,
        m.Snapshot,
    )
}


class WireError(ValueError):
    """The frames are not a message of this protocol."""


@dataclasses.dataclass(frozen=True)
class Letter:
    """A message and its sender.

    Attributes:
      run: identifies the run: method, model, data and code.
      sender: index of the region.
      boot: its life.
      message: of any kind.
    """

    run: str
    sender: int
    boot: int
    message: m.Message


def pack(letter: Letter) -> list[bytes]:
    """Write a letter as frames."""
    data: list[bytes] = []
    body = {
        field.name: _plain(getattr(letter.message, field.name), data)
        for field in dataclasses.fields(letter.message)
    }
    header = {
        "run": letter.run,
        "from": [letter.sender, letter.boot],
        "kind": type(letter.message).__name__,
        "body": body,
    }
    return [json.dumps(header).encode(), *data]


def unpack(frames: Sequence[bytes], num_regions: int) -> Letter:
    """Read the frames that `pack` wrote.

    Args:
      frames: the received frames.
      num_regions: M; every region's index must be below.

    Raises:
      WireError: if the frames are not a message of this protocol.
    """
    try:
        if not frames or len(frames[0]) > MAX_HEADER_BYTES:
            raise ValueError("the header is missing or too long")
        header = json.loads(bytes(frames[0]))
        sender, boot = map(_count, header["from"])
        data = _Data(frames[1:], num_regions)
        kind = _KINDS[header["kind"]]
        body = header["body"]
        fields = [field.name for field in dataclasses.fields(kind)]
        if set(body) != set(fields) or sender >= num_regions:
            raise ValueError("wrong fields, or an unknown sender")
        values = {name: _READ[name](body[name], data) for name in fields}
        data.check_all_used()
        return Letter(_text(header["run"]), sender, boot, kind(**values))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise WireError(f"not a message of this protocol: {error!r}") from error


def _plain(value: Any, data: list[Any]) -> Any:
    """Return a value that JSON can hold; bytes become the index of their frame."""
    match value:
        case bytes() | bytearray() | memoryview():
            data.append(value if isinstance(value, bytes) else bytes(value))
            return len(data) - 1
        case m.View(epoch, seats):
            return [epoch, [[r, *seat] for r, seat in sorted(seats.items())]]
        case m.Decision(epoch, sync, rows):
            return [epoch, sync, [[r, _plain(row, data)] for r, row in rows.items()]]
        case tuple():
            return [_plain(x, data) for x in value]
    if isinstance(value, dict) and value and isinstance(next(iter(value)), int):
        return [[r, _plain(row, data)] for r, row in value.items()]
    return value


class _Data:
    """The frames of a message; each is used exactly once."""

    def __init__(self, frames: Sequence[bytes], num_regions: int):
        self._frames, self._used, self.num_regions = frames, set(), num_regions

    def take(self, index: Any) -> bytes:
        index = _count(index)
        if index in self._used:
            raise ValueError(f"frame {index} is used twice")
        self._used.add(index)
        return bytes(self._frames[index])

    def check_all_used(self) -> None:
        if len(self._used) != len(self._frames):
            raise ValueError("the header does not name all frames")

    def region(self, value: Any) -> int:
        if _count(value) >= self.num_regions:
            raise ValueError(f"region {value} must be below {self.num_regions}")
        return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a count")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e15:
        raise ValueError(f"{value!r} is not a time")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


def _sync(value: Any, data: _Data) -> m.SyncId:
    del data
    fragment_id, start_step = map(_count, value)
    return fragment_id, start_step


def _view(value: Any, data: _Data) -> m.View:
    epoch, seats = value
    found = {
        data.region(r): m.Seat(_count(boot), _count(since)) for r, boot, since in seats
    }
    return m.View(_count(epoch), found)


def _rows(value: Any, data: _Data) -> dict[int, bytes]:
    return {data.region(r): data.take(i) for r, i in value or ()}


def _decisions(value: Any, data: _Data) -> tuple[m.Decision, ...]:
    return tuple(
        m.Decision(_count(epoch), _sync(sync, data), _rows(rows, data))
        for epoch, sync, rows in value
    )


def _table(value: Any, data: _Data) -> dict[str, Any]:
    del data
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a table")
    return value


_READ = {
    "clock_s": lambda value, data: _seconds(value),
    "step_s": lambda value, data: _seconds(value),
    "seconds": lambda value, data: tuple(
        (data.region(r), _seconds(s)) for r, s in value
    ),
    "members": lambda value, data: tuple((data.region(r), _count(b)) for r, b in value),
    "step": lambda value, data: _count(value),
    "epoch": lambda value, data: _count(value),
    "base_epoch": lambda value, data: _count(value),
    "promised": lambda value, data: _count(value),
    "oldest_step": lambda value, data: _count(value),
    "hears": lambda value, data: tuple(data.region(r) for r in value),
    "view": _view,
    "sync": _sync,
    "row": lambda value, data: data.take(value),
    "rows": _rows,
    "known": lambda value, data: tuple(_sync(each, data) for each in value),
    "decisions": _decisions,
    "header": _table,
    "arrays": lambda value, data: tuple(data.take(i) for i in value),
}
