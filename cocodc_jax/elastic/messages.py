"""The messages between elastic regions.

Plain values: `wire.py` writes them as bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
