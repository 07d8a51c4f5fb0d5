"""What rows are for, by the grid that is asked for now.

A folder outlives its grid: rows are added, halving is given up, a flag is tuned that
was not. A run is the same run then, but what it was trained as no longer says which
column of which cell it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .grid import Grid
from .rows import Row as Written
from .runs import Row
from .schedule import FINAL, rows_of, rung_name


def assign(written: Sequence[Written], grid: Grid | None) -> list[Written]:
    """Return rows with the roles that a grid has for them."""
    if grid is None:
        return list(written)
    roles = {row.row_id: row.role for row in _every(grid)}
    return [{**row, **roles.get(row["row"], {})} for row in written]


def _every(grid: Grid) -> Iterator[Row]:
    """Yield every row that a grid may train, final ones last."""
    if grid.halving:
        seeds = grid.halving.tuning_seeds
        for number, steps in enumerate(grid.halving.rungs):
            yield from rows_of(grid, grid.settings, seeds, rung_name(number), steps)
    yield from rows_of(grid, grid.settings, grid.seeds, FINAL)
