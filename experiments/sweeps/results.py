"""Cells as cells.json keeps them: what plans, fits and other sweeps are made from."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from cocodc_jax.files import read_table

from .cells import PUBLISHED, TUNED, Cell, Column, Interval, difference, steps_to
from .report import Report
from .rows import completed

T = TypeVar("T")


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
        "steps": first.get("steps"),
        "tokens": first.get("tokens"),
        "parameters": first.get("parameters"),
        "bytes": first.get("bytes"),
        "bytes_per_step": column.bytes_per_step,
        "fragment_bytes": first.get("fragment_bytes"),
        **_curves(column),
        "config": first.get("config"),
    }


def _plain(interval: Interval | None) -> dict[str, Any] | None:
    return interval and dataclasses.asdict(interval)


def _curves(column: Column) -> dict[str, list[list[float]]]:
    """Return (step, loss, bytes), means over the seeds, and the losses of each seed.

    Both are of the steps at which all were evaluated.
    """
    if not column.rows:
        return {"curve": [], "curves": []}
    tables = [{step: rest for step, *rest in row["curve"]} for row in column.rows]
    steps = sorted(set.intersection(*map(set, tables)))
    means = [np.mean([table[step] for table in tables], axis=0) for step in steps]
    return {
        "curve": [[step, *x.tolist()] for step, x in zip(steps, means, strict=True)],
        "curves": [[table[step][0] for step in steps] for table in tables],
    }


def read_cells(
    path: str | pathlib.Path, make: Callable[[Sequence[Mapping[str, Any]]], T]
) -> T:
    """Return what `make` makes of the cells in a cells.json."""
    try:
        return make(read_table(path)["cells"])
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"{path} is no cells.json of experiments.sweep ({error!r})"
        ) from error


def column_of(cell: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the tuned column of a cell as cells.json has it, or else the published.

    None is a cell that was not run to the end of either.
    """
    columns = cell["columns"]
    return columns.get(TUNED) or columns.get(PUBLISHED)


def load(path: str | pathlib.Path) -> list[Cell]:
    """Return the cells of a cells.json, to hold others against.

    Their rows have seeds and last losses, which is what differences and steps to a loss
    need of a reference, and no curves.
    """
    return read_cells(path, lambda found: list(filter(None, map(_cell, found))))


def _cell(kept: Mapping[str, Any]) -> Cell | None:
    """Return a cell; None if every seed of every column diverged."""
    columns = {name: _column(column) for name, column in kept["columns"].items()}
    configs = [row["config"] for column in columns.values() for row in column.rows]
    given = kept["flags"], columns, kept["tried"], kept["tuning_steps"]
    return Cell(*given, configs[0]) if configs else None


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
