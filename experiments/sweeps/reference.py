"""The reference of a sweep: the cell that the others are compared with."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cocodc_jax.run.config.train_config import flat

from . import report
from .cells import COLUMNS, PUBLISHED, TUNED, Cell, mean_loss
from .rows import Row as Written
from .rows import completed
from .schedule import FINAL, Plan, cell_of, differing, rows_of

# If these differ, losses are of other models or texts; other fields may differ.
SAME = ("model", "data")


def find(
    cells: Sequence[Cell], words: str | None, whose: str = "of these rows"
) -> Cell:
    """Return the cell that the others are compared with."""
    if words is None:
        published = [(cell, cell.columns.get(PUBLISHED)) for cell in cells]
        finished = [cell for cell, column in published if column and column.loss]
        return max(finished or cells, key=_first_loss)

    fitting = [cell for cell in cells if has_flags(cell.config, words)]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        labels = ", ".join(cell.label for cell in cells)
        raise ValueError(f"reference={words!r} is no cell {whose}; they are {labels}")
    labels = ", ".join(cell.label for cell in fitting)
    raise ValueError(
        f"reference={words!r} is {len(fitting)} cells {whose}; give flags of one: "
        f"{labels}"
    )


def _first_loss(cell: Cell) -> float:
    """Return the mean loss of a cell's first column."""
    return mean_loss(next(iter(cell.columns.values())))


def read(
    path: str, words: str | None, column: str, runs: Iterable[Mapping[str, Any]]
) -> Cell:
    """Return the cell of a results file that runs are compared with."""
    try:
        cells = report.load(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"reference_from={path} cannot be read ({reason}); name a cells.json of "
            "another sweep, such as experiments/results/one_bit.json"
        ) from error

    if not cells:
        raise ValueError(f"reference_from={path} has no cell that ended well")
    held = find(cells, words, f"of {path}")
    if column_of(held, column) not in held.columns:
        raise ValueError(
            f"reference_column={column!r} was not run for {held.label} of {path}; it "
            f"has {list(held.columns)}"
        )

    apart = [_apart(held.config, config) for config in runs]
    if apart and all(apart):  # A grid may vary them: one that is the same will do.
        name, theirs, ours = min(apart, key=len)[0]
        raise ValueError(
            f"reference_from={path} has {name}={theirs!r}, where these runs have "
            f"{ours!r}: losses of different models or data cannot be "
            "compared; name results of the same"
        )

    return held


def column_of(held: Cell, column: str) -> str:
    """Return the reference's column; if it has only tuned, that one."""
    return TUNED if column == PUBLISHED and [*held.columns] == [TUNED] else column


def _apart(
    held: Mapping[str, Any], config: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """List the fields of `SAME` that differ, with both values."""
    return [
        (name, value, config[section].get(name))
        for section in SAME
        for name, value in held[section].items()
        if name not in ("seed", "loader_threads") and config[section].get(name) != value
    ]


def check(
    words: str | None, column: str, plan: Plan | None, written: Sequence[Written]
) -> None:
    """Refuse a reference that will have no row."""
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

    cells: dict[str, dict[str, Any]] = {}
    for config in configs(plan, written):  # A cell's first is what `find` looks at.
        cells.setdefault(cell_of(config, plan.grid.tuned), config)
    fitting = [flat(config) for config in cells.values() if has_flags(config, words)]
    if not fitting:
        method = plan.grid.settings[0].config.method
        interval = method.values.get("sync_interval")
        more = "" if interval is None else f",sync_interval={interval}"
        raise ValueError(
            f"reference={words!r} is no setting of the grid; give flags of one as "
            f"--list shows them, such as method={method.method}{more}"
        )
    if len(fitting) > 1:
        named = []
        for name in differing(fitting, plan.grid.tuned):
            values = dict.fromkeys(str(flags.get(name)) for flags in fitting)
            named.append(f"{name} ({', '.join(values)})")
        raise ValueError(
            f"reference={words!r} is {len(fitting)} cells; say as well "
            f"{' or '.join(named)}"
        )


def configs(plan: Plan, written: Sequence[Written]) -> Iterator[dict[str, Any]]:
    """Yield the configurations of final runs, the finished and the planned ones."""
    yield from (row["config"] for row in written if row["stage"] == FINAL)
    final = rows_of(plan.grid, plan.grid.settings, plan.grid.seeds, FINAL)
    yield from (completed(row.config.to_json()) for row in final)


def has_flags(config: dict[str, Any], words: str) -> bool:
    """Return whether a configuration, in JSON's form, has these flags.

    >>> has_flags({"run": {"steps": 480}, "method": {"outer_lr": 1.0}}, "outer_lr=1")
    True
    """
    flags = flat(config)
    parts = (part.partition("=") for part in words.split(","))
    return all(n in flags and value in _texts(flags[n]) for n, _, value in parts)


def _texts(value: Any) -> tuple[str, ...]:
    """Return the texts of a value: a grid may have 1 where the flag is 1.0."""
    return (str(value), f"{value:g}") if type(value) is float else (str(value),)
