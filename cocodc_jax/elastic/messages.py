"""What elastic regions tell one another.

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
    """A region's place in a view.

    Attributes:
      boot: which life of the region: a number that grows with every start.
      since_step: it sends messages of the syncs that start after this step.
    """

    boot: int
    since_step: int


@dataclasses.dataclass(frozen=True)
class View:
    """Who takes part, by agreement of all of them.

    Attributes:
      epoch: round * M + the region that proposed it, which coordinates it; 0 for none.
      seats: by region.
    """

    epoch: int = 0
    seats: Mapping[int, Seat] = dataclasses.field(default_factory=dict)

    @property
    def rank(self) -> tuple[int, int]:
        """Which of two views goes on when both come to know of each other."""
        return len(self.seats), -min(self.seats, default=0)


@dataclasses.dataclass(frozen=True)
class Join:
    """I am there and take no part yet; `step` is that of my own checkpoint."""

    step: int
    hears: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Beat:
    """I am alive in `view`; I have applied all syncs that started before a step.

    `hears` are the regions that I hear, so that they know whether I do. `clock_s` is
    what my clock says.
    """

    view: View
    promised: int
    oldest_step: int
    hears: tuple[int, ...]
    clock_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Row:
    """My message of a sync, for all; `clock_s` is what my clock says as it leaves."""

    epoch: int
    sync: SyncId
    row: bytes
    clock_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Want:
    """I miss your decision, or as the coordinator your message, of a sync."""

    epoch: int
    sync: SyncId


@dataclasses.dataclass(frozen=True)
class Decision:
    """All messages that the mean of a sync is of, by region."""

    epoch: int
    sync: SyncId
    rows: Mapping[int, bytes]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The mean of a sync is of the messages of these lives.

    `rows` are those of them that you may not have, by region.
    """

    epoch: int
    sync: SyncId
    members: tuple[Life, ...]
    rows: Mapping[int, bytes]


@dataclasses.dataclass(frozen=True)
class Report:
    """What the messages of a sync took to me, by sender, and an inner step of mine.

    Who is not there sent nothing that came; `step_s` is 0 where nothing was measured.
    """

    sync: SyncId
    seconds: tuple[tuple[int, float], ...]
    step_s: float


@dataclasses.dataclass(frozen=True)
class Propose:
    """Promise to take no decision of an earlier view; `known` I have already.

    `base_epoch` is of the view that I am in.
    """

    view: View
    base_epoch: int
    known: tuple[SyncId, ...]


@dataclasses.dataclass(frozen=True)
class Promise:
    """I promise, and these decisions you do not have; `known` I have."""

    epoch: int
    known: tuple[SyncId, ...]
    decisions: tuple[Decision, ...]


@dataclasses.dataclass(frozen=True)
class Install:
    """All have promised: the view holds; these decisions you do not have."""

    view: View
    decisions: tuple[Decision, ...]


@dataclasses.dataclass(frozen=True)
class Leave:
    """I leave on purpose."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a region that joins goes on from.

    Attributes:
      step: inner steps done when it was taken.
      header: plain values.
      arrays: as bytes, in the order that the header tells of.
    """

    step: int
    header: dict[str, Any]
    arrays: tuple[bytes, ...]


Message = (
    Join
    | Beat
    | Row
    | Want
    | Decision
    | Choice
    | Report
    | Propose
    | Promise
    | Install
    | Leave
    | Snapshot
)
