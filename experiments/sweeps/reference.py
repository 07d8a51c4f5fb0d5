"""The cell that the others of a sweep are held against."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from .cells import COLUMNS, PUBLISHED, TUNED, Cell, mean_loss
from .keys import completed
from .rows import Row as Written
from .schedule import FINAL, Plan, cell_of, differing, leaves, rows_of


def find(found: Sequence[Cell], words: str | None) -> Cell:
    """Return the cell that others are held against.

    Args:
      found: all cells.
      words: flags as name=value with commas, such as method=diloco,sync_interval=40;
        None is the one with the worst published loss.

    Raises:
      ValueError: if no cell has these flags, or more than one.
    """
    if words is None:
        held = [
            c for c in found if PUBLISHED in c.columns and c.columns[PUBLISHED].loss
        ]
        first = lambda cell: next(iter(cell.columns.values()))  # noqa: E731
        return max(held or found, key=lambda cell: mean_loss(first(cell)))
    fitting = [cell for cell in found if _has(cell.config, words)]
    if len(fitting) == 1:
        return fitting[0]
    which = "no cell" if not fitting else f"{len(fitting)} cells"
    raise ValueError(
        f"reference={words!r} is {which} of these rows; "
        f"{'give flags of one:' if fitting else 'they are'} "
        f"{', '.join(cell.label for cell in fitting or found)}"
    )


def check(
    words: str | None, column: str, plan: Plan | None, written: Sequence[Written]
) -> None:
    """Refuse a reference that there will be no row of.

    Args:
      words: as `find` takes them.
      column: of the cell, "published" or "tuned".
      plan: what is to be trained; None trains nothing.
      written: rows that are there.

    Raises:
      ValueError: naming the flag, its value and what would be right.
    """
    if column not in COLUMNS:
        raise ValueError(
            f"reference_column={column!r} is unknown; use one of {list(COLUMNS)}"
        )
    if plan is None:
        return
    if column == TUNED and not plan.grid.tuned and not any(r["tuned"] for r in written):
        raise ValueError(
            f"reference_column={column!r} is of grids that tune something, and this "
            f"one does not; use {PUBLISHED!r}"
        )
    if words is None:
        return
    there = (row["config"] for row in written if row["stage"] == FINAL)
    to_be = (
        completed(row.config.to_json())
        for row in rows_of(plan.grid, plan.grid.settings, plan.grid.seeds, FINAL)
    )
    fitting = {
        cell_of(config, plan.grid.tuned): leaves(config)
        for config in itertools.chain(there, to_be)
        if _has(config, words)
    }
    if not fitting:
        raise ValueError(
            f"reference={words!r} is no setting of the grid; give flags of one as "
            f"--list shows them, such as {_example(plan)}"
        )
    if len(fitting) > 1:
        raise ValueError(
            f"reference={words!r} is {len(fitting)} cells; say as well "
            f"{_differing(list(fitting.values()), plan.grid.tuned)}"
        )


def _example(plan: Plan) -> str:
    method = plan.grid.settings[0].config.method
    interval = method.values.get("sync_interval")
    more = "" if interval is None else f",sync_interval={interval}"
    return f"method={method.method}{more}"


def _differing(configs: Sequence[Mapping[str, Any]], tuned: Sequence[str]) -> str:
    """Return the flags that tell configurations apart, with their values."""
    told = []
    for name in differing(configs, tuned):
        values = dict.fromkeys(str(flags.get(name)) for flags in configs)
        told.append(f"{name} ({', '.join(values)})")
    return " or ".join(told)


def _has(config: Mapping[str, Any], words: str) -> bool:
    """Tell whether a configuration, as JSON has it, has these flags."""
    flags = leaves(config)
    parts = (part.partition("=") for part in words.split(","))
    return all(n in flags and str(flags[n]) == value for n, _, value in parts)
