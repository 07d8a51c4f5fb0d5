"""Which rows of a grid are trained, in which order, by which shard."""

import collections
import dataclasses
import json
import operator
import statistics
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

from cocodc_jax.report.units import format_duration
from cocodc_jax.run.config.train_config import flat

from .grid import Grid, Setting, best
from .rows import Row as Written
from .runs import Row

FINAL = "final"
# Fields that do not change the cell of a run, besides the tuned ones.
BESIDES = ("seed", "log_every", "eval_every", "checkpoint_every")


def cell_of(config: dict[str, Any], tuned: Sequence[str]) -> str:
    """Return a key that runs share which differ only in seed and tuned flags."""
    without = {*BESIDES, *tuned}
    same = {n: v for n, v in flat(config).items() if n not in without}
    return json.dumps(same, sort_keys=True)


def differing(configs: Sequence[Mapping[str, Any]], tuned: Sequence[str]) -> list[str]:
    """List the flags that put configurations into different cells."""
    without = {*BESIDES, *tuned}
    names = dict.fromkeys(name for flags in configs for name in flags)
    return [
        name
        for name in names
        if name not in without
        and any(flags.get(name) != configs[0].get(name) for flags in configs)
    ]


def rows_of(
    grid: Grid,
    settings: Sequence[Setting],
    seeds: Sequence[int],
    stage: str,
    steps: int | None = None,
) -> list[Row]:
    """Return the rows of some settings of a grid, with the seeds of each together."""
    at = [s.at(steps) if steps else s for s in settings]
    return [Row(s, seed, stage, grid.tuned) for s in at for seed in seeds]


def assign(written: Sequence[Written], grid: Grid | None) -> list[Written]:
    """Return rows with the roles that they have in the present grid.

    A folder may be used with a changed grid: with more rows, without halving, or with
    another tuned flag. The runs are the same, but the role that is written in a row no
    longer tells its column and its cell.
    """
    if grid is None:
        return list(written)
    rows: list[Row] = []
    if halving := grid.halving:
        for number, steps in enumerate(halving.rungs, 1):
            rows += rows_of(
                grid, grid.settings, halving.tuning_seeds, f"rung {number}", steps
            )

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

    def _key(self, setting: Setting) -> Hashable:
        """Return the key under which a setting competes."""
        config = setting.config.to_json()
        halving = self.grid.halving
        if halving is None or not halving.by:
            return cell_of(config, self.grid.tuned)
        flags = flat(config)
        return tuple(str(flags.get(name)) for name in halving.by)

    def stages(
        self, results: Callable[[], Mapping[str, Written]]
    ) -> Iterator[list[Row]]:
        """Yield the rows of each stage; call for the next when all are written."""
        settings = list(self.grid.settings)
        halving = self.grid.halving
        for rung in range(len(halving.rungs)) if halving else ():
            assert halving is not None
            seeds = halving.tuning_seeds
            steps = halving.rungs[rung]
            num_rivals = collections.Counter(map(self._key, settings))
            rivals = [s for s in settings if num_rivals[self._key(s)] > halving.winners]
            rows = rows_of(self.grid, rivals, seeds, f"rung {rung + 1}", steps)
            yield rows

            written = results()
            num = len(seeds)
            in_order = [written[row.row_id]["loss"] for row in rows]
            losses = [in_order[i : i + num] for i in range(0, len(in_order), num)]
            keys = [self._key(s) for s in rivals]
            kept = {s.key for s in best(halving, rung, rivals, keys, losses)}

            entries = [
                {"name": s.name, "setting": s.key, "loss": loss, "kept": s.key in kept}
                for s, loss in zip(rivals, losses, strict=True)
            ]
            self.history.append(
                {"steps": steps, "seeds": list(seeds), "settings": entries}
            )
            settings = [s for s in settings if s not in rivals or s.key in kept]

        self.chosen = {s.key for s in settings}
        if halving:
            settings = [
                s for s in self.grid.settings if s.published or s.key in self.chosen
            ]

        yield rows_of(self.grid, settings, self.grid.seeds, FINAL)

    def own(self, rows: Sequence[Row]) -> list[Row]:
        """Return this shard's rows of a stage; a setting's seeds stay together."""
        keys = list(dict.fromkeys(row.setting.key for row in rows))
        of_shard = keys[self.shard - 1 :: self.num_shards]
        return [row for row in rows if row.setting.key in of_shard]

    def total(self) -> tuple[int, float]:
        """Return the number of rows of all stages and shards, and their cost."""
        final = rows_of(self.grid, self.grid.settings, self.grid.seeds, FINAL)
        costs = [row.cost for row in final]
        halving = self.grid.halving
        if halving is None:
            return len(final), sum(costs)

        groups: dict[Hashable, list[Setting]] = {}
        for setting in self.grid.settings:
            groups.setdefault(self._key(setting), []).append(setting)

        num_final = 0
        cost = 0.0
        count = 0
        seeds = len(halving.tuning_seeds)
        for group in groups.values():
            per_step = statistics.fmean(s.cost_per_step for s in group)
            counts = halving.counts(len(group))
            count += sum(counts) * seeds
            steps = sum(map(operator.mul, counts, halving.rungs))
            cost += steps * seeds * per_step

            # Fewer where what is published wins.
            published = sum(s.published for s in group)
            num = min(halving.winners + published, len(group))
            num_final += num * len(self.grid.seeds)

        return count + num_final, cost + num_final * statistics.fmean(costs)

    def to_json(self, others: Collection[str] = ()) -> dict[str, Any]:
        """Return the finished rungs, and the winners once all are finished."""
        return {"rungs": self.history, "chosen": sorted({*self.chosen, *others})}


class Progress:
    """The progress of a sweep, and the time left at the pace of this process."""

    def __init__(self, plan: Plan, clock: Callable[[], float] = time.monotonic):
        self._plan = plan
        self._clock = clock
        self._num, self._cost = plan.total()
        self._num_done = 0
        self._cost_done = 0.0
        self._own_cost = 0.0
        self._began_s = clock()

    def found(self, row: Row) -> None:
        """Count a row that another process or an earlier run has written."""
        self._num_done += 1
        self._cost_done += row.cost

    def trained(self, row: Row) -> None:
        """Count a row that this process has trained."""
        self.found(row)
        self._own_cost += row.cost

    def line(self, row: Row) -> str:
        """Return the line to print as a row begins."""
        left = ""
        if self._own_cost:
            pace = (self._clock() - self._began_s) / self._own_cost
            rest = max(self._cost - self._cost_done, row.cost) / self._plan.num_shards
            left = f"; {format_duration(pace * rest)} left"
        return (
            f"row {self._num_done + 1}/{self._num}, {row.stage}: {row.setting.name}, "
            f"seed {row.seed}{left}"
        )
