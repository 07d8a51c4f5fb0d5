"""The results of a sweep's rows: a cell for each method, precision and interval.

The runs of a cell differ only in seed and tuned flags. A cell has two columns:
"published", with the tuned flags as the method, the preset and the base flags have
them, and "tuned", the setting that won. Intervals are Student's at 95 % over the seeds;
a difference from the reference is of the same seeds, pairwise.
"""

import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from cocodc_jax.report.comparison import steps_to_loss
from cocodc_jax.run.config.train_config import flat

from .rows import Row
from .schedule import FINAL, cell_of, differing

PUBLISHED = "published"
TUNED = "tuned"
COLUMNS = (PUBLISHED, TUNED)
# Flags with their own column in the table.
SHOWN = ("method", "compress", "sync_interval", "delay_steps")
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean and half of its interval; None for a single value."""

    mean: float
    half: float | None

    def __format__(self, form: str) -> str:
        """Format both in the same form, with a sign only for the mean.

        >>> f"{Interval(1.5, 0.25):+.2f}, {Interval(1.5, None):.1f}"
        '+1.50 ± 0.25, 1.5'
        """
        half = "" if self.half is None else f" ± {format(self.half, form.strip('+'))}"
        return format(self.mean, form) + half

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return Student's interval of a mean.

        >>> Interval.of([1.0, 2.0, 3.0])
        Interval(mean=2.0, half=2.4841377117...)
        """
        mean = statistics.fmean(values)
        num = len(values)
        if num < 2:
            return cls(mean, None)
        from scipy import stats  # Takes a second to import.

        quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, num - 1))
        return cls(mean, quantile * statistics.stdev(values) / math.sqrt(num))


@dataclasses.dataclass(frozen=True)
class Column:
    """One setting of a cell, over its seeds."""

    rows: tuple[Row, ...]  # Of the seeds that did not diverge.
    diverged: tuple[int, ...]  # Seeds that did.
    values: Mapping[str, Any]  # Of the tuned flags.
    # Whether these very seeds chose it, so that its loss is too good.
    chosen_here: bool = False

    @property
    def loss(self) -> Interval | None:
        """Loss of the last evaluation; None if a seed diverged."""
        if self.diverged or not self.rows:
            return None
        return Interval.of([row["loss"] for row in self.rows])

    @property
    def extent(self) -> tuple[int, int] | None:
        """Steps of each run, and the number of runs that finished; None for none."""
        return (self.rows[0]["steps"], len(self.rows)) if self.rows else None

    @property
    def bytes_per_step(self) -> float | None:
        """Bytes that a region sends a step, the mean over the run and the seeds."""
        sent = [row["bytes_per_step"] for row in self.rows]
        return statistics.fmean(sent) if sent else None


@dataclasses.dataclass(frozen=True)
class Cell:
    """One line of the table."""

    # Those in `SHOWN`, and those that distinguish it from other cells of its method.
    flags: Mapping[str, Any]
    columns: Mapping[str, Column]  # By name; one that is missing was not run.
    # Settings that were compared: those of halving, or without it all that were
    # trained; 0 if there was no choice.
    tried: int
    tuning_steps: int  # Steps of these comparisons, over the seeds.
    config: dict[str, Any]  # Of one of its runs.

    @property
    def label(self) -> str:
        """The flags in short, for tables and plots."""
        return label(self.flags)


def label(flags: Mapping[str, Any]) -> str:
    """Return flags in a few words.

    >>> label({"method": "diloco", "sync_interval": 8, "K": 2, "rank": None})
    'diloco H 8 float32 K=2'
    >>> label({"method": "cocodc", "merge_feedback": True, "exact": False})
    'cocodc float32 merge_feedback'
    """
    interval = flags.get("sync_interval")
    delay = flags.get("delay_steps")
    words = [flags["method"]]
    if interval is not None:
        words.append(f"H {interval}")
    if delay is not None:
        words.append(f"tau {delay}")
    words.append(precision(flags))

    # None is what a method takes where nothing is given; what is off says nothing.
    for name, value in flags.items():
        if name not in SHOWN and value is not None and value is not False:
            words.append(name if value is True else f"{name}={value}")

    return " ".join(words)


def precision(flags: Mapping[str, Any]) -> str:
    """Return how messages are written."""
    written = flags.get("compress")
    return "float32" if written in (None, "none") else str(written)


def cells(rows: Sequence[Row], chosen: Collection[str] | None = None) -> list[Cell]:
    """Sort rows into cells, in the order of their first rows."""
    finals: dict[str, list[Row]] = {}
    rungs: dict[str, list[Row]] = {}  # Of any number of steps.
    for row in rows:
        if row["stage"] == FINAL:
            key = cell_of(row["config"], row["tuned"])
            finals.setdefault(key, []).append(row)
        else:
            key = cell_of(row["config"], (*row["tuned"], "steps"))
            rungs.setdefault(key, []).append(row)

    every = [flat(group[0]["config"]) for group in finals.values()]
    cells = []
    for group in finals.values():
        key = cell_of(group[0]["config"], (*group[0]["tuned"], "steps"))
        flags = flat(group[0]["config"])
        settings = {row["setting"] for row in group}
        # Rungs chose for runs of one length: other lengths may be in the folder too.
        is_tuned = chosen is None or not settings.isdisjoint(chosen)

        tuning = rungs.get(key, []) if is_tuned else []
        if is_tuned and not tuning and group[0]["tuned"] and len(settings) > 1:
            tuning = group

        # What tells a cell from others of its method, besides `SHOWN`.
        rivals = [other for other in every if other["method"] == flags["method"]]
        differ = {*differing(rivals, group[0]["tuned"])} - {*SHOWN}
        names = [*SHOWN, *(name for name in flags if name in differ)]
        cell = Cell(
            flags={name: flags[name] for name in names if name in flags},
            columns=_columns(group, chosen),
            tried=len({row["name"] for row in tuning}),
            tuning_steps=sum(row["steps"] for row in tuning),
            config=group[0]["config"],
        )
        cells.append(cell)

    return [cell for cell in cells if cell.columns]  # Else nothing has won yet.


def _columns(group: Sequence[Row], chosen: Collection[str] | None) -> dict[str, Column]:
    by_setting: dict[str, list[Row]] = {}
    for row in group:
        by_setting.setdefault(row["setting"], []).append(row)

    columns = {}
    for setting in by_setting.values():
        if setting[0]["published"]:
            columns[PUBLISHED] = _column(setting)

    if not group[0]["tuned"]:
        return columns

    won = [s for key, s in by_setting.items() if chosen is None or key in chosen]
    best = min(map(_column, won), key=mean_loss, default=None)
    if best is not None:
        columns[TUNED] = dataclasses.replace(best, chosen_here=len(won) > 1)
    return columns


def _column(rows: Sequence[Row]) -> Column:
    flags = flat(rows[0]["config"])
    rows = sorted(rows, key=lambda row: row["seed"])
    return Column(
        tuple(row for row in rows if row["loss"] is not None),
        tuple(row["seed"] for row in rows if row["loss"] is None),
        {name: flags[name] for name in rows[0]["tuned"] if name in flags},
    )


def mean_loss(column: Column) -> float:
    """Return the mean of a column's last losses; infinity if a seed diverged."""
    return column.loss.mean if column.loss else math.inf


def difference(column: Column, reference: Column) -> Interval | None:
    """Return the loss minus that of a reference, over the seeds that both have."""
    values = [row["loss"] - loss for row, loss in _pairs(column, reference)]
    return Interval.of(values) if values else None


def steps_to(column: Column, reference: Column) -> Interval | None:
    """Return the steps to a reference's last loss, that of the same seed."""
    steps = [
        steps_to_loss([(step, loss) for step, loss, _ in row["curve"]], target)
        for row, target in _pairs(column, reference)
    ]
    known = [step for step in steps if step is not None]
    return Interval.of(known) if known and len(known) == len(steps) else None


def _pairs(column: Column, reference: Column) -> list[tuple[Row, float]]:
    """Return rows with the reference's loss of their seed; none if a seed diverged."""
    if column.diverged or reference.diverged:
        return []
    theirs = {row["seed"]: row["loss"] for row in reference.rows}
    return [(r, theirs[r["seed"]]) for r in column.rows if r["seed"] in theirs]
