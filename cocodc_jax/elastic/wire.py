"""Messages between regions as frames of bytes: a JSON header, then the data.

A header names the kind of the message and its plain fields. Rows and arrays follow as
separate frames. Anything else is refused. Nothing is unpickled, and the type of every
field is checked.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable, Sequence
from typing import Any

from cocodc_jax.elastic import messages as m

MAX_HEADER_BYTES = 1 << 20

_KINDS = {kind.__name__: kind for kind in typing.get_args(m.Message)}


class WireError(ValueError):
    """The frames are not a message of this protocol."""


class Letter(typing.NamedTuple):
    """A message, the region and life that sent it, and the run that it is of.

    `run` identifies method, model, data and code.
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
    """Read the frames that `pack` wrote, or raise `WireError`."""
    try:
        if not frames or len(frames[0]) > MAX_HEADER_BYTES:
            raise ValueError("the header is missing or too long")
        header = json.loads(bytes(frames[0]))
        sender, boot = map(_count, header["from"])
        reader = _Reader(frames[1:], num_regions)
        kind = _KINDS[header["kind"]]
        body = header["body"]
        fields = [field.name for field in dataclasses.fields(kind)]
        if set(body) != set(fields):
            raise ValueError("wrong fields")
        values = {name: _READ[name](reader, body[name]) for name in fields}
        reader.check_all_used()
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
        case m.View(epoch, seats):
            return [epoch, [[r, *seat] for r, seat in sorted(seats.items())]]
        case m.Decision(epoch, sync, rows):
            return [epoch, sync, _plain(rows, data)]
        case tuple():
            return [_plain(x, data) for x in value]
    if isinstance(value, dict) and value and isinstance(next(iter(value)), int):
        return [[r, _plain(row, data)] for r, row in value.items()]
    return value


class _Reader:
    """Reads fields; every region must exist, and each frame is used exactly once."""

    def __init__(self, frames: Sequence[bytes], num_regions: int):
        self._frames, self._used, self._num_regions = frames, set(), num_regions

    def frame(self, index: Any) -> bytes:
        index = _count(index)
        if index in self._used:
            raise ValueError(f"frame {index} is used twice")
        self._used.add(index)
        return bytes(self._frames[index])

    def check_all_used(self) -> None:
        if len(self._used) != len(self._frames):
            raise ValueError("the header does not name all frames")

    def region(self, value: Any) -> int:
        if _count(value) >= self._num_regions:
            raise ValueError(f"region {value} must be below {self._num_regions}")
        return value

    def sync(self, value: Any) -> m.SyncId:
        fragment_id, start_step = map(_count, value)
        return fragment_id, start_step

    def members(self, value: Any) -> tuple[m.Life, ...]:
        return tuple((self.region(r), _count(boot)) for r, boot in value)

    def durations(self, value: Any) -> tuple[tuple[int, float], ...]:
        return tuple((self.region(r), _seconds(s)) for r, s in value)

    def view(self, value: Any) -> m.View:
        epoch, seats = value
        found = {
            self.region(r): m.Seat(_count(boot), _count(since))
            for r, boot, since in seats
        }
        return m.View(_count(epoch), found)

    def rows(self, value: Any) -> dict[int, bytes]:
        return {self.region(r): self.frame(i) for r, i in value or ()}

    def decisions(self, value: Any) -> tuple[m.Decision, ...]:
        return tuple(
            m.Decision(_count(epoch), self.sync(sync), self.rows(rows))
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


_READ: dict[str, Callable[[_Reader, Any], Any]] = {
    **dict.fromkeys(
        ("step", "epoch", "base_epoch", "promised", "oldest_step"),
        lambda _, value: _count(value),
    ),
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
