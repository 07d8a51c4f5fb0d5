r"""Trains a grid of configurations, finds the best of each, and shows the frontier.

    python -m experiments.sweep --grid=experiments/grids/example.toml --workdir=DIR

A grid is a TOML file: flags of every run, groups of products of flags, seeds, and the
flags to tune, all at once or by successive halving on seeds of its own. Every row is
checked before the first trains. Each finished run is a line of DIR/rows.jsonl, with its
full configuration. The same command resumes: it skips finished rows, and continues an
interrupted one from its newest checkpoint (checkpoint_every), or from the start without
one. The folder of a run is deleted once its line is written; --keep_runs keeps it.

At the end, or with --report at any time, DIR gets report.md, cells.json and
frontier.png. They have, for each method, precision, H and tau, the loss with published
and with tuned hyperparameters, intervals over the seeds, the bytes, and the settings
that no other beats. With --reference_from=FILE the reference is a cell of another
sweep, seed by seed.

Several processes, or machines with one DIR, share the rows: --shard=1/3, 2/3, 3/3.
"""

import collections
import contextlib
import dataclasses
import fcntl
import functools
import math
import pathlib
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from cocodc_jax.files import open_regular, read_table, write_whole
from cocodc_jax.report import plots
from cocodc_jax.report.units import format_bytes, format_duration
from cocodc_jax.run.config import flags
from cocodc_jax.run.config.train_config import dumps
from cocodc_jax.run.resume import check_folder, make_folder, unwritable
from cocodc_jax.run.session import RUN_ERRORS
from cocodc_jax.run.stopping import stop_signal

from . import commands, program
from .sweeps import (
    batched,
    cells,
    grid,
    networks,
    reference,
    report,
    rows,
    runs,
    schedule,
)
from .sweeps.schedule import Plan, Progress
from .trials import StoppedError

GRID_FILE = "grid.toml"
HALVING_FILE = "halving.json"
_say = functools.partial(print, flush=True)
POLL_S = 5.0  # Between two reads of the rows of other shards.


def main() -> None:
    """Read the flags, train the missing rows, write the report."""
    console = Console()
    with flags.usage_errors():
        if not flags.value("workdir") and not flags.value("list"):
            raise ValueError("workdir=None is missing; name a folder for the rows")
        workdir = pathlib.Path(flags.value("workdir") or ".")
        check_folder(workdir)
        plan = _plan()
        if plan is None and not flags.value("report"):
            raise ValueError("grid=None is missing; name a grid file")
        _check_report(plan, workdir)

    if plan is not None and flags.value("list"):
        for setting in plan.grid.settings:
            note = "  (published)" if setting.published and plan.grid.tuned else ""
            _say(setting.name + note)
        num = len(plan.grid.settings)
        num_rows = plan.total()[0]
        _say(f"{num} settings, at most {num_rows} rows in all")
        return

    if plan is not None and not flags.value("report"):
        with flags.usage_errors():
            make_folder(workdir)
            runs.check_data(plan.grid.settings, plan.grid.seeds[0])
            try:
                text = pathlib.Path(flags.value("grid")).read_bytes()
                write_whole(workdir / GRID_FILE, text)
            except OSError as error:
                raise unwritable(workdir, error) from error
        _train(plan, workdir, console)

    with flags.usage_errors():
        of_grid = plan and plan.grid
        kept = workdir / GRID_FILE
        if of_grid is None and kept.exists():
            of_grid = grid.read(kept)
        _report(workdir, console, of_grid)


def _check_report(plan: Plan | None, workdir: pathlib.Path) -> None:
    """Refuse flags that prevent a report, before any row trains."""
    step_s = flags.value("step_seconds")
    if not 0 < step_s < math.inf:
        raise ValueError(f"step_seconds={step_s} must be above 0")
    if flags.value("networks"):
        networks.networks(flags.value("networks"))

    written = []
    if plan and flags.value("workdir"):
        written = _written(workdir, plan.grid)
    words = flags.value("reference")
    column = flags.value("reference_column")

    if not flags.value("reference_from"):
        reference.check(words, column, plan, written)
    elif plan:
        _other_file(reference.configs(plan, written))


def _written(workdir: pathlib.Path, of_grid: grid.Grid | None) -> list[rows.Row]:
    """Return the finished rows that have the flags of --only."""
    written = schedule.assign(rows.read(workdir), of_grid)
    if words := flags.value("only"):
        # Rungs, of fewer steps, are those of the final rows that are left.
        return [
            row
            for row in written
            if row["stage"] != schedule.FINAL
            or reference.has_flags(row["config"], words)
        ]

    return written


def _other_file(configs: Iterable[Mapping[str, Any]]) -> cells.Cell:
    """Return the reference from another file; it must be comparable with these runs."""
    column = flags.value("reference_column")
    path = flags.value("reference_from")
    return reference.read(path, flags.value("reference"), column, configs)


def _plan() -> Plan | None:
    """Return the rows to train, after checking all; None without a grid."""
    path = flags.value("grid")
    if path is None:
        return None
    try:
        of_grid = _only(grid.read(path))
    except OSError as error:
        raise ValueError(f"grid={path} cannot be read ({error.strerror})") from error

    shard, num_shards = _shard()
    plan = Plan(of_grid, shard, num_shards)
    most = flags.value("batch_trials")
    if most < 0:
        raise ValueError(
            f"batch_trials={most} must be at least 0: trials of a batch at most, or 0 "
            "for one row after another"
        )
    if most and flags.value("keep_runs"):
        raise ValueError(
            f"keep_runs=True keeps folders of runs, which batch_trials={most} does not "
            "make; leave one of them out"
        )

    settings = of_grid.settings
    runs.check(batched.first_of_groups(settings) if most else settings)
    return plan


def _only(of_grid: grid.Grid) -> grid.Grid:
    """Return a grid with only the settings that have the flags of --only."""
    words = flags.value("only")
    if not words:
        return of_grid

    fitting = tuple(
        setting
        for setting in of_grid.settings
        if reference.has_flags(setting.config.to_json(), words)
    )
    if not fitting:
        raise ValueError(
            f"only={words!r} is no setting of the grid; give flags of some as --list "
            "shows them, such as method=diloco"
        )

    return dataclasses.replace(of_grid, settings=fitting)


def _shard() -> tuple[int, int]:
    text = flags.value("shard")
    if re.fullmatch(r"\d+/\d+", text):
        shard, num_shards = map(int, text.split("/"))
        if 1 <= shard <= num_shards:
            return shard, num_shards
    raise ValueError(f"shard={text!r} must be i/n with 1 <= i <= n, such as 2/3")


def _train(plan: Plan, workdir: pathlib.Path, console: Console) -> None:
    """Train every row of this process's shard; exit if one cannot be trained."""
    trainer = runs.Trainer(workdir, flags.value("keep_runs"), console)
    progress = Progress(plan)
    most = flags.value("batch_trials")
    batches = batched.BatchTrainer()

    here = [_of_today(setting) for setting in plan.grid.settings]

    def written() -> dict[str, rows.Row]:
        with flags.usage_errors():
            rows.check_texts([*here, *rows.read(workdir)])
        return {row["row"]: row for row in rows.read(workdir)}

    for stage in plan.stages(written):
        # A rung has one row of settings that differ in their length alone.
        stage = list({row.row_id: row for row in stage}.values())
        if plan.history:
            _note_halving(plan, workdir / HALVING_FILE)
        of_shard = {row.row_id for row in plan.own(stage)}
        finished = written()

        done = set()
        if most:
            todo = [
                row
                for row in stage
                if row.row_id in of_shard and row.row_id not in finished
            ]
            done = _train_batches(batches, todo, most, workdir, progress)

        for row in stage:
            if row.row_id in done:
                continue
            if row.row_id in finished:
                trainer.forget(row)  # Where a kill came between the two.
                progress.found(row)
            elif row.row_id in of_shard:
                _say(progress.line(row))
                with _exits(row):
                    record = trainer.train(row)
                rows.append(workdir, record | {"text": runs.text_of(row.config)})
                trainer.forget(row)
                progress.trained(row)
                _say(_came_to(record))
            else:
                progress.found(row)  # Another shard is about as far.

        # Of other shards too: a choice needs all of them.
        wanted = {row.row_id for row in stage}
        if missing := wanted - written().keys():
            _say(f"waiting for {len(missing)} rows of other shards")
        while wanted - written().keys():
            time.sleep(POLL_S)


def _of_today(setting: schedule.Setting) -> rows.Row:
    """Return what a row of a setting would say of its text."""
    config = setting.config
    return {
        "row": "of today",
        "config": config.to_json(),
        "text": runs.text_of(config),
    }


def _note_halving(plan: Plan, path: pathlib.Path) -> None:
    """Write the choices of the rungs, with those of other parts (--only)."""
    of_part = {setting.key for setting in plan.grid.settings}
    # Parts may be beside this one.
    with open_regular(path.with_suffix(".lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        others: set[str] = set()
        if path.exists():
            others = set(read_table(path)["chosen"]) - of_part
        write_whole(path, dumps(plan.to_json(others)))


def _train_batches(
    trainer: batched.BatchTrainer,
    todo: Sequence[runs.Row],
    most: int,
    workdir: pathlib.Path,
    progress: Progress,
) -> set[str]:
    """Train rows in batches of `most` trials; return those that were."""
    batches, alone = batched.batches(todo, most)
    for why, num in collections.Counter(alone.values()).items():
        _say(f"{num} rows are trained one by one: {why}")

    done = set()
    for number, batch in enumerate(batches, 1):
        row = batch.rows[0]
        text = f"batch {number}/{len(batches)}, {len(batch.rows)} trials with "
        _say(text + progress.line(row))

        with _exits(row), stop_signal() as should_stop:
            records = trainer.train(batch, should_stop)
        for row, record in zip(batch.rows, records, strict=True):
            rows.append(workdir, record | {"text": runs.text_of(row.config)})
            progress.trained(row)
            done.add(row.row_id)
            _say(f"{row.setting.name}, seed {row.seed}: {_came_to(record)}")

    return done


def _report(workdir: pathlib.Path, console: Console, of_grid: grid.Grid | None) -> None:
    halving = workdir / HALVING_FILE
    chosen = None
    if halving.exists() and (of_grid is None or of_grid.halving):
        chosen = read_table(halving)["chosen"]

    written = _written(workdir, of_grid)
    rows.check_texts(written)
    of_rows = cells.cells(written, chosen)
    if not of_rows:
        where = f"workdir={str(workdir)!r}"
        if words := flags.value("only"):
            raise ValueError(
                f"only={words!r} is no final row of {where}; give flags of some"
            )
        raise ValueError(f"{where} has no final rows yet")
    if chosen and not {row["setting"] for row in written}.intersection(chosen):
        raise ValueError(
            f"{halving} chose settings that no row has; run the sweep's command again, "
            "which rebuilds the file from the finished rows"
        )

    if other := flags.value("reference_from"):
        held = _other_file(cell.config for cell in of_rows)
    else:
        held = reference.find(of_rows, flags.value("reference"))

    column = reference.column_of(held, flags.value("reference_column"))
    made = report.Report(of_rows, held, column, other)
    write_whole(workdir / "cells.json", dumps(report.to_json(made)))
    plots.save_png(made.figure(), str(workdir / "frontier.png"))
    text = made.markdown(commands.command_line("sweep", sys.argv[1:]))
    write_whole(workdir / "report.md", text)

    if words := flags.value("networks"):
        step_s = flags.value("step_seconds")
        arrived = list(networks.arrivals(made, networks.networks(words), step_s))
        write_whole(workdir / "networks.json", dumps(networks.to_json(arrived, step_s)))
        text += "\n" + networks.markdown(made, arrived, step_s)
        write_whole(workdir / "report.md", text)

    table = program.table(("cell", *made.short_heads()), made.short_lines())
    for column in table.columns:
        column.no_wrap = True
    # On a narrow terminal names give way.
    table.columns[0].no_wrap = False
    table.columns[0].overflow = "fold"
    console.print(table)
    _say(f"Report: {workdir / 'report.md'}")


@contextlib.contextmanager
def _exits(row: runs.Row) -> Iterator[None]:
    """Exit with one line if training fails or is stopped."""
    try:
        yield
    except StoppedError as stopped:
        print(f"stopped: {stopped}; the same command resumes", file=sys.stderr)
        sys.exit(flags.STOPPED)
    except (ValueError, *RUN_ERRORS) as error:
        name = f"{row.setting.name}, seed {row.seed}"
        print(f"error: {name}: {error}", file=sys.stderr)
        sys.exit(1)


def _came_to(record: rows.Row) -> str:
    if record["loss"] is None:
        return f"diverged: {record['diverged']}"
    return (
        f"loss {record['loss']:.4f}, {format_bytes(record['bytes'])} sent, "
        f"{format_duration(record['seconds'])}"
    )


def define() -> None:
    """Define the program's flags."""
    program.define(
        ("grid", pathlib.Path, "Grid file, see experiments/grids."),
        ("workdir", pathlib.Path, "Folder for the rows and the report."),
        ("shard", "1/1", "Which share of the rows, as i/n."),
        (
            "only",
            "",
            "Train and report the rows alone that have these flags, as "
            "method=diloco,steps=480.",
        ),
        ("list", False, "Print the settings of the grid and exit."),
        ("report", False, "Train nothing; report on the finished rows."),
        (
            "reference",
            str,
            "Cell to compare others with, as method=diloco,sync_interval=40. "
            "Default: the worst published one.",
        ),
        (
            "reference_column",
            "published",
            "Column of the reference: published or tuned. If it has only tuned, that "
            "one.",
        ),
        (
            "reference_from",
            pathlib.Path,
            "cells.json of another sweep, of the same model and data, that has the "
            "reference, as in experiments/results. Default: these rows.",
        ),
        (
            "networks",
            "",
            "With the report, simulated seconds to the reference's loss, on networks "
            "of Mbit/s x milliseconds one way, as 20x50,1000x10; or all.",
        ),
        ("step_seconds", 0.25, "Seconds of an inner step on these networks."),
        (
            "batch_trials",
            0,
            "Train up to so many rows at once, as inputs of one program, where they "
            "differ in seed, learning rates, momentum, weight decay, strength or "
            "mixing alone; 0 trains one row after another.",
        ),
        ("keep_runs", False, "Keep the folders of finished runs."),
    )


cli = program.with_run_flags(main, __doc__, define)

if __name__ == "__main__":
    cli()
