"""The report of a sweep: report.md, frontier.png and cells.json.

Plans, fits and other sweeps read cells.json.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from cocodc_jax.files import read_table
from cocodc_jax.report.comparison import Point, pareto
from cocodc_jax.report.units import format_bytes

from .cells import (
    COLUMNS,
    PUBLISHED,
    SHOWN,
    TUNED,
    Cell,
    Column,
    Interval,
    difference,
    precision,
    steps_to,
)
from .rows import completed

T = TypeVar("T")
HEADS = ("method", "precision", "H", "tau", "besides", "bytes a step", "bytes")
OF_A_COLUMN = ("loss", "less the reference", "steps to its loss")


@dataclasses.dataclass(frozen=True)
class Report:
    """Cells, compared with a reference."""

    cells: Sequence[Cell]
    reference: Cell  # The cell that others are compared with.
    reference_column: str = PUBLISHED  # Its column, "published" or "tuned".
    # The file of the reference; empty if it is one of the cells.
    reference_from: str = ""

    def __post_init__(self):
        if self.reference_column not in self.reference.columns:
            raise ValueError(
                f"reference_column={self.reference_column!r} was not run for "
                f"{self.reference.label}; it has {list(self.reference.columns)}"
            )

    @property
    def target(self) -> Column:
        """The column that all are compared with."""
        return self.reference.columns[self.reference_column]

    def best(self) -> list[Cell]:
        """Return the cells that no other beats at their bytes, by bytes."""
        shown = [(c, p) for c in self.cells if (p := _point(c, _last(c)))]
        return [shown[i][0] for i in pareto([point for _, point in shown])]

    def heads(self) -> list[str]:
        """Return the heads of the table."""
        heads = [*HEADS]
        if TUNED not in self._columns():
            return [*heads, *OF_A_COLUMN]
        for name in self._columns():
            heads += [f"{name}: {head}" for head in OF_A_COLUMN]
        return [*heads, "tuned values", "tried"]

    def lines(self) -> list[list[str]]:
        """Return the cells of the table, the frontier's in bold."""
        best = self.best()
        return [self._line(cell, cell in best) for cell in self.cells]

    def short_heads(self) -> list[str]:
        """Return the heads of a table for a terminal, after that of the cells."""
        names = self._columns() if TUNED in self._columns() else ["loss"]
        return ["bytes a step", *names, "steps to the reference"]

    def short_lines(self) -> list[list[str]]:
        """Return the lines of that table: losses, and steps to the reference."""
        lines = []
        for cell in self.cells:
            last = _last(cell)
            columns = [cell.columns.get(name) for name in self._columns()]
            losses = [_shown(c and c.loss, "{:.3f}".format) for c in columns]
            steps = _shown(steps_to(last, self.target), "{:.0f}".format)
            sent = _shown(last.bytes_per_step, format_bytes)
            lines.append([cell.label, sent, *losses, steps])
        return lines

    def _columns(self) -> list[str]:
        return [n for n in COLUMNS if any(n in cell.columns for cell in self.cells)]

    def _line(self, cell: Cell, is_best: bool) -> list[str]:
        flags = cell.flags
        last = _last(cell)
        method = f"**{flags['method']}**" if is_best else flags["method"]
        others = {n: v for n, v in flags.items() if n not in SHOWN}
        besides = [f"{n} {v}" for n, v in others.items() if v is not None]

        line = [
            method,
            precision(flags),
            _shown(flags.get("sync_interval")),
            _shown(flags.get("delay_steps")),
            ", ".join(besides) or "-",
            _shown(last.bytes_per_step, format_bytes),
            _shown(last.rows[0]["bytes"] if last.rows else None, format_bytes),
        ]
        for name in self._columns():
            line += self._entries(cell.columns.get(name))

        if TUNED in self._columns():
            tuned = cell.columns.get(TUNED)
            line += [_values(tuned.values) if tuned else "-", str(cell.tried)]

        return line

    def _entries(self, column: Column | None) -> list[str]:
        """Return the entries of a cell's column, see `OF_A_COLUMN`."""
        if column is None:
            return ["-"] * len(OF_A_COLUMN)
        if column.diverged:
            seeds = ", ".join(map(str, column.diverged))
            return [f"diverged (seed {seeds})", "-", "-"]

        loss = _shown(column.loss, "{:.3f}".format)
        if column.chosen_here:
            loss += "*"

        against = "reference"
        if column is not self.target:
            against = _shown(difference(column, self.target), "{:+.3f}".format)

        return [
            loss + self._unusual_extent(column),
            against,
            _shown(steps_to(column, self.target), "{:.0f}".format),
        ]

    def _every(self) -> list[Column]:
        return [column for cell in self.cells for column in cell.columns.values()]

    def _usual(self) -> tuple[int, int]:
        """Return the steps and seeds of the reference, or of the first with a loss."""
        extents = (column.extent for column in (self.target, *self._every()))
        return next(filter(None, extents), (0, 0))

    def _unusual_extent(self, column: Column) -> str:
        """Return a column's steps and seeds; "" if they are the usual ones."""
        extent = column.extent
        if extent is None or column.diverged or extent == self._usual():
            return ""
        return f" ({_count(extent[0], 'step')}, {_count(extent[1], 'seed')})"

    def markdown(self, command: str) -> str:
        """Return the report as text."""
        table = markdown_table(self.heads(), self.lines())
        steps, seeds = self._usual()
        if not seeds:
            return f"Every run diverged.\n\n{table}\n\nBy `{command}`.\n"

        note = (
            f"Loss after {_count(steps, 'step')}, nats per token of held-out text, "
            f"mean of {_count(seeds, 'seed')} with its 95 % interval (Student)"
        )
        if any(map(self._unusual_extent, self._every())):
            note += ", but where other numbers stand beside it"
        note += (
            f". The reference is {self._reference_in_words()}; differences from it are "
            "of the same seeds, pairwise, and steps are those to its last loss with "
            "the same seed. In bold: nothing has less loss for at most as many bytes."
        )
        if any(x.chosen_here and not x.diverged for x in self._every()):
            note += " *: chosen by these very seeds, so too good."

        return (
            f"{note}\n\n{table}\n\n![The frontier](frontier.png)\n\nBy `{command}`.\n"
        )

    def _reference_in_words(self) -> str:
        """Return the reference's cell, with its column and file if these may differ."""
        words = self.reference.label
        if self.reference_from or TUNED in self._columns():
            words += f", {self.reference_column}"
        if self.reference_from:
            words += f", of {self.reference_from}"
        return words

    def figure(self) -> Any:
        """Return the plot of the frontier."""
        points = [p for cell in self.cells if (p := _point(cell, _last(cell)))]
        open_points = [
            p
            for cell in self.cells
            if TUNED in cell.columns and PUBLISHED in cell.columns
            if cell.columns[TUNED].values != cell.columns[PUBLISHED].values
            if (p := _point(cell, cell.columns[PUBLISHED]))
        ]
        from cocodc_jax.report import points as drawn  # Matplotlib, on use.

        return drawn.frontier(points, open_points)


def markdown_table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table as text, without a line's end."""
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _last(cell: Cell) -> Column:
    """Return the tuned column, or the only one."""
    return cell.columns.get(TUNED) or next(iter(cell.columns.values()))


def _point(cell: Cell, column: Column) -> Point | None:
    if column.loss is None or not column.bytes_per_step:
        return None
    loss = column.loss
    method = str(cell.flags["method"])
    sent = column.bytes_per_step
    half = loss.half or 0.0
    return Point(cell.label, method, sent, loss.mean, half)


def _shown(value: Any, form: Callable[[Any], str] = str) -> str:
    return "-" if value is None else form(value)


def _count(number: int, noun: str) -> str:
    """Return a number of things in words.

    >>> _count(1, "seed"), _count(8, "step")
    ('1 seed', '8 steps')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _values(values: Mapping[str, Any]) -> str:
    texts = {n: f"{v:g}" if isinstance(v, float) else v for n, v in values.items()}
    return " ".join(f"{name} {text}" for name, text in texts.items()) or "-"


def to_json(made: Report) -> dict[str, Any]:
    """Return a report as plain values."""
    best = made.best()
    held = {"cell": made.reference.label, "column": made.reference_column}
    if made.reference_from:
        held["from"] = made.reference_from

    return {
        "reference": held,
        "cells": [
            {
                "flags": dict(cell.flags),
                "is_best": cell in best,
                "tried": cell.tried,
                "tuning_steps": cell.tuning_steps,
                "columns": {
                    name: _column_json(column, made.target)
                    for name, column in cell.columns.items()
                },
            }
            for cell in made.cells
        ],
    }


def _column_json(column: Column, target: Column) -> dict[str, Any]:
    first = column.rows[0] if column.rows else {}
    return {
        "values": dict(column.values),
        "seeds": [row["seed"] for row in column.rows],
        "diverged": list(column.diverged),
        "chosen_here": column.chosen_here,
        "losses": [row["loss"] for row in column.rows],
        "loss": _plain(column.loss),
        "difference": _plain(difference(column, target)),
        "steps_to_reference": _plain(steps_to(column, target)),
        **{n: first.get(n) for n in ("steps", "tokens", "parameters", "bytes")},
        "bytes_per_step": column.bytes_per_step,
        "fragment_bytes": first.get("fragment_bytes"),
        **_curves(column),
        "config": first.get("config"),
    }


def _plain(interval: Interval | None) -> dict[str, Any] | None:
    return interval and dataclasses.asdict(interval)


def _curves(column: Column) -> dict[str, list[list[float]]]:
    """Return (step, loss, bytes), means over the seeds, and the losses of each seed.

    They have the steps at which all seeds were evaluated. `curves_outer` has the losses
    of the outer parameters; rows of earlier versions have none.
    """
    if not column.rows:
        return {"curve": [], "curves": []}

    tables = [{step: rest for step, *rest in row["curve"]} for row in column.rows]
    steps = sorted(set.intersection(*map(set, tables)))
    means = [np.mean([table[step] for table in tables], axis=0) for step in steps]
    curves = {
        "curve": [[step, *x.tolist()] for step, x in zip(steps, means, strict=True)],
        "curves": [[table[step][0] for step in steps] for table in tables],
    }

    if all("curve_outer" in row for row in column.rows):
        outer_tables = [dict(row["curve_outer"]) for row in column.rows]
        curves["curves_outer"] = [
            [table[step] for step in steps] for table in outer_tables
        ]
    return curves


def read_cells(
    path: str | pathlib.Path, make: Callable[[Sequence[Mapping[str, Any]]], T]
) -> T:
    """Return `make(cells)` of the cells in a cells.json."""
    table = read_table(path)
    try:
        return make(table["cells"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"{path} is no cells.json of experiments.sweep ({error!r})"
        ) from error


def column_of(cell: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the tuned column of a cell in cells.json, or else the published one.

    None if neither was run to the end.
    """
    columns = cell["columns"]
    return columns.get(TUNED) or columns.get(PUBLISHED)


def load(path: str | pathlib.Path) -> list[Cell]:
    """Return the cells of a cells.json, as references.

    Their rows have seeds and last losses, which differences and steps to a loss need of
    a reference, but no curves.
    """
    return read_cells(path, _cells)


def _cells(kept: Sequence[Mapping[str, Any]]) -> list[Cell]:
    cells = [_cell(entry) for entry in kept]
    return [cell for cell in cells if cell is not None]


def _cell(kept: Mapping[str, Any]) -> Cell | None:
    """Return a cell; None if every seed of every column diverged."""
    columns = {name: _column(column) for name, column in kept["columns"].items()}
    configs = [row["config"] for column in columns.values() for row in column.rows]
    if not configs:
        return None
    return Cell(kept["flags"], columns, kept["tried"], kept["tuning_steps"], configs[0])


def _column(kept: Mapping[str, Any]) -> Column:
    config = kept["config"] and completed(kept["config"])
    same = {name: kept[name] for name in ("steps", "bytes", "bytes_per_step")}
    rows = [
        {**same, "config": config, "seed": seed, "loss": loss, "curve": []}
        for seed, loss in zip(kept["seeds"], kept["losses"], strict=True)
    ]
    return Column(
        tuple(rows), tuple(kept["diverged"]), kept["values"], kept["chosen_here"]
    )
