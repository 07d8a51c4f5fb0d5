"""Which rows of a grid are trained, in which order, by which shard."""

import dataclasses
import json
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from cocodc_jax.report.units import format_duration
from cocodc_jax.run.config import TrainConfig

from .grid import Grid, Setting
from .halving import best
from .rows import Row as Written
from .runs import Row

FINAL = "final"
# What does not change which cell of a table a run belongs to, besides what is tuned.
BESIDES = ("seed", "log_every", "eval_every", "checkpoint_every")


def leaves(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of a configuration as JSON has it, by name."""
    sections = (value for value in config.values() if isinstance(value, Mapping))
    return {name: value for section in sections for name, value in section.items()}


def cell_of(config: Mapping[str, Any], tuned: Sequence[str]) -> str:
    """Return what runs have in common that differ in seed and what is tuned."""
    without = {*BESIDES, *tuned}
    same = {n: v for n, v in leaves(config).items() if n not in without}
    return json.dumps(same, sort_keys=True)


def differing(configs: Sequence[Mapping[str, Any]], tuned: Sequence[str]) -> list[str]:
    """List the flags by which configurations are of different cells."""
    without = {*BESIDES, *tuned}
    names = dict.fromkeys(name for flags in configs for name in flags)
    return [
        name
        for name in names
        if name not in without
        and any(flags.get(name) != configs[0].get(name) for flags in configs)
    ]


def rung_name(number: int) -> str:
    """Return the stage of a rung, counted from 0."""
    return f"rung {number + 1}"


def rows_of(
    grid: Grid,
    settings: Sequence[Setting],
    seeds: Sequence[int],
    stage: str,
    steps: int | None = None,
) -> list[Row]:
    """Return the rows of some of a grid's settings, all seeds of each together."""
    at = [s.at(steps) if steps else s for s in settings]
    return [Row(s, seed, stage, grid.tuned) for s in at for seed in seeds]


def assign(written: Sequence[Written], grid: Grid | None) -> list[Written]:
    """Return rows with the roles that the grid asked for now has for them.

    A folder outlives its grid: rows are added, halving is given up, a flag is tuned
    that was not. A run is the same run then, but what it was trained as no longer says
    which column of which cell it belongs to.
    """
    if grid is None:
        return list(written)
    rows: list[Row] = []
    if halving := grid.halving:
        for number, steps in enumerate(halving.rungs):
            stage = rung_name(number), steps
            rows += rows_of(grid, grid.settings, halving.tuning_seeds, *stage)
    rows += rows_of(grid, grid.settings, grid.seeds, FINAL)
    roles = {row.row_id: row.role for row in rows}
    return [{**row, **roles.get(row["row"], {})} for row in written]


@dataclasses.dataclass
class Plan:
    """The rows of a grid, stage by stage."""

    grid: Grid
    shard: int = 1  # Of this process, from 1.
    num_shards: int = 1  # That share the rows.
    # What the rungs that are over came to.
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # Keys of the settings that won, once the last rung is over.
    chosen: set[str] = dataclasses.field(default_factory=set)

    def __post_init__(self):
        """Sort the settings by what they compete under."""
        self._keys = {s.key: self._key(s.config) for s in self.grid.settings}

    def _key(self, config: TrainConfig) -> Hashable:
        halving = self.grid.halving
        if halving is None or not halving.by:
            return cell_of(config.to_json(), self.grid.tuned)
        found = leaves(config.to_json())
        return tuple(str(found.get(name)) for name in halving.by)

    def stages(
        self, results: Callable[[], Mapping[str, Written]]
    ) -> Iterator[list[Row]]:
        """Yield the rows of each stage; the next is asked for when all are written."""
        settings = list(self.grid.settings)
        halving = self.grid.halving
        for rung in range(len(halving.rungs)) if halving else ():
            assert halving is not None
            rivals = [s for s in settings if self._num(s, settings) > halving.winners]
            rows = rows_of(self.grid, rivals, halving.tuning_seeds, rung_name(rung),
                           halving.rungs[rung])  # fmt: skip
            yield rows
            written, num = results(), len(halving.tuning_seeds)
            losses = [written[row.row_id]["loss"] for row in rows]
            each = [losses[i : i + num] for i in range(0, len(losses), num)]
            keys = [self._keys[s.key] for s in rivals]
            kept = {s.key for s in best(halving, rung, rivals, keys, each)}
            self._remember(rung, rivals, each, kept)
            settings = [s for s in settings if s not in rivals or s.key in kept]
        self.chosen = {s.key for s in settings}
        if halving:
            settings = [
                s for s in self.grid.settings if s.published or s.key in self.chosen
            ]
        yield rows_of(self.grid, settings, self.grid.seeds, FINAL)

    def is_own(self, number: int) -> bool:
        """Tell whether a setting of a stage is this shard's: all seeds of it are."""
        return number % self.num_shards == self.shard - 1

    def own(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of a stage that are this shard's."""
        order = {
            key: i for i, key in enumerate(dict.fromkeys(r.setting.key for r in rows))
        }
        return [row for row in rows if self.is_own(order[row.setting.key])]

    def total(self) -> tuple[int, float]:
        """Return the rows of all stages, of all shards, and what they cost."""
        halving, cost, count = self.grid.halving, 0.0, 0
        finals = len(self.grid.settings)
        groups: dict[Hashable, list[Setting]] = {}
        for setting in self.grid.settings:
            groups.setdefault(self._keys[setting.key], []).append(setting)
        if halving:
            finals = 0
            for group in groups.values():
                per_step = sum(_cost_per_step(s) for s in group) / len(group)
                seeds = len(halving.tuning_seeds)
                for steps, num in zip(
                    halving.rungs, halving.counts(len(group)), strict=True
                ):
                    count += num * seeds
                    cost += num * seeds * steps * per_step
                # Fewer where what is published wins.
                published = sum(s.published for s in group)
                finals += min(halving.winners + published, len(group))
        per_row = sum(
            _cost_per_step(s) * s.config.run.steps for s in self.grid.settings
        )
        per_row *= len(self.grid.seeds) / len(self.grid.settings)
        return count + finals * len(self.grid.seeds), cost + finals * per_row

    def to_json(self) -> dict[str, Any]:
        """Return the rungs that are over, and what won once all are."""
        return {"rungs": self.history, "chosen": sorted(self.chosen)}

    def _num(self, setting: Setting, among: Sequence[Setting]) -> int:
        key = self._keys[setting.key]
        return sum(self._keys[other.key] == key for other in among)

    def _remember(self, rung, settings, losses, kept) -> None:
        assert self.grid.halving is not None
        self.history.append(
            {
                "steps": self.grid.halving.rungs[rung],
                "seeds": list(self.grid.halving.tuning_seeds),
                "settings": [
                    {
                        "name": s.name,
                        "setting": s.key,
                        "loss": loss,
                        "kept": s.key in kept,
                    }
                    for s, loss in zip(settings, losses, strict=True)
                ],
            }
        )


def _cost_per_step(setting: Setting) -> float:
    return Row(setting, 0, FINAL, ()).cost / setting.config.run.steps


class Progress:
    """How far a sweep is, and how long the rest takes at the pace of this process."""

    def __init__(self, plan: Plan, clock: Callable[[], float] = time.monotonic):
        """Begin the clock."""
        self._plan, self._clock = plan, clock
        self._num, self._cost = plan.total()
        self._num_done, self._cost_done, self._own_cost = 0, 0.0, 0.0
        self._began_s = clock()

    def found(self, row: Row) -> None:
        """Count a row that was written by another process, or before."""
        self._num_done += 1
        self._cost_done += row.cost

    def trained(self, row: Row) -> None:
        """Count a row that this process has trained."""
        self.found(row)
        self._own_cost += row.cost

    def line(self, row: Row) -> str:
        """Return what to say as a row begins."""
        left = ""
        if self._own_cost:
            pace = (self._clock() - self._began_s) / self._own_cost
            rest = max(self._cost - self._cost_done, row.cost) / self._plan.num_shards
            left = f"; {format_duration(pace * rest)} left"
        return (
            f"row {self._num_done + 1}/{self._num}, {row.stage}: {row.setting.name}, "
            f"seed {row.seed}{left}"
        )
