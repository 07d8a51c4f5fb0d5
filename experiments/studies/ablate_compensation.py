"""Compares every delay compensation, alpha mix and replay, each with its own tuning.

    python -m experiments.studies.ablate_compensation --workdir=DIR

For every delay: choose learning rates and strength on the tuning seeds, train
the test seeds, and report the steps to the perplexity that tuned Streaming DiLoCo
(alpha 0.5) and tuned DiLoCo end with, at equal tokens and equal bytes. Writes to DIR a
file for each rule and delay as it is done, ablate_compensation.json with all of them,
and PNG plots. The same command goes on where an interrupted one stopped.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
from rich import box
from rich.console import Console

from cocodc_jax.files import write_whole
from cocodc_jax.netlab import children
from cocodc_jax.report.page import describe_machine
from cocodc_jax.run import flags
from cocodc_jax.run.config import dumps
from cocodc_jax.run.leaves import attribute_notes
from cocodc_jax.run.resume import make_folder

from .. import commands, program
from .ablation import results, rules
from .ablation.jobs import REFERENCES, Settings, run_job

# The published saving in steps against Streaming DiLoCo, the aim of the ablation.
AIM = 0.21

HEADS = ("rule", "inner", "lr", "str.", "loss", "/streaming", "/DiLoCo", "corr.")
# Columns that the table needs, also where the output is no terminal.
WIDTH = 90

Job = tuple[str, int]


def main() -> None:
    """Read the flags, run what is not yet done, write and print the results."""
    console = Console(width=max(WIDTH, Console().width))
    with flags.usage_errors():
        settings = _settings()
        jobs = _jobs(settings)
        workdir = pathlib.Path(flags.value("workdir"))
        parts = _parts(workdir, settings)
        if flags.value("workers") < 1:
            raise ValueError(f"workers={flags.value('workers')} must be at least 1")
    begin_s = time.perf_counter()
    _run(settings, [job for job in jobs if not _path(parts, job).exists()], parts)
    done = _finished(parts, settings)
    summary = {
        "command": commands.command_line("studies.ablate_compensation", sys.argv[1:]),
        "machine": describe_machine(jax.devices()),
        "settings": dataclasses.asdict(settings),
        "seconds_of_last_call": time.perf_counter() - begin_s,
        "rows": results.summarise(done, settings.steps),
        "jobs": done,
    }
    write_whole(workdir / "ablate_compensation.json", dumps(summary))
    results.write_plots(summary, workdir)
    _print(summary, console)


def _settings() -> Settings:
    """Return the defaults with the flags that were given."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Settings):
        if not flags.given(field.name):
            continue
        value = flags.value(field.name)
        if isinstance(field.default, tuple):
            value = flags.numbers(field.name, value, type(field.default[0]))
        values[field.name] = value
    return Settings(**values)


def _jobs(settings: Settings) -> list[Job]:
    """Return reference first: every other row is a ratio to them."""
    table = rules.table(settings.sync_interval)
    names, delays = rules.asked(list(table), settings.sync_interval)
    if results.STREAMING not in names:
        names = [results.STREAMING, *names]
    return [(name, 0) for name in REFERENCES] + [
        (name, delay)
        for delay in delays
        for name in names
        if delay >= table[name].least_delay
    ]


def _parts(workdir: pathlib.Path, settings: Settings) -> pathlib.Path:
    """Return the folder of finished jobs, which are only good for the same settings."""
    parts = workdir / "parts"
    make_folder(workdir)
    make_folder(parts)
    path, text = parts / "settings.json", dumps(dataclasses.asdict(settings))
    if path.exists() and path.read_text() != text:
        raise ValueError(
            f"workdir={str(workdir)!r} holds an ablation with other settings; name "
            "another folder or delete it"
        )
    write_whole(path, text)
    return parts


def _path(parts: pathlib.Path, job: Job) -> pathlib.Path:
    return parts / f"{job[0]}_delay{job[1]}.json"


def _finished(parts: pathlib.Path, settings: Settings) -> list[dict[str, Any]]:
    """Return what this call and earlier ones did, references first."""
    order = [*REFERENCES, *rules.table(settings.sync_interval)]
    done = [json.loads(path.read_text()) for path in parts.glob("*_delay*.json")]
    return sorted(done, key=lambda job: (job["delay_steps"], order.index(job["rule"])))


def _run(settings: Settings, jobs: list[Job], parts: pathlib.Path) -> None:
    """Run jobs in worker processes: small programs do not fill several cores.

    Where a job fails, those that have begun are ended and kept, and no other begins.
    """
    # Read by XLA when a worker starts JAX: one thread each, no waiting for another.
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    )
    failed, count = [], 0
    with _workers() as pool:
        asked = {pool.submit(run_job, settings, *job): job for job in jobs}
        for future in concurrent.futures.as_completed(asked):
            if future.cancelled():
                continue
            if error := future.exception():
                failed.append(error)
                for other in asked:
                    other.cancel()
                continue
            result, job, count = future.result(), asked[future], count + 1
            write_whole(_path(parts, job), dumps(result))
            took = f"{result['seconds']:.0f} s"
            print(f"{count}/{len(jobs)} {job[0]} delay {job[1]}: {took}", flush=True)
    if failed:
        raise failed[0]


@contextlib.contextmanager
def _workers() -> Iterator[concurrent.futures.Executor]:
    """Yield the pool of processes; what ends this one ends them and their jobs."""
    with concurrent.futures.ProcessPoolExecutor(
        flags.value("workers"),
        multiprocessing.get_context("spawn"),
        # A worker would wait for its next job for ever.
        initializer=children.die_with_parent,
        initargs=(os.getpid(), signal.SIGKILL),
    ) as pool:
        try:
            yield pool
        except BaseException:  # Ctrl-C, a full disk: the pool would do the rest first.
            for worker in multiprocessing.active_children():
                worker.kill()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _print(summary: dict[str, Any], console: Console) -> None:
    settings = summary["settings"]
    for delay in sorted({row["delay_steps"] for row in summary["rows"]}):
        title = (
            f"tau/H = {delay / settings['sync_interval']:g}" if delay else "references"
        )
        rows = [_cells(x) for x in summary["rows"] if x["delay_steps"] == delay]
        looks: dict[str, Any] = {"box": box.SIMPLE, "padding": (0, 1, 0, 0)}
        console.print(program.table(HEADS, rows, title=title, **looks))
    console.print(
        f"{len(settings['test_seeds'])} test seeds, mean and 95 % interval (Student), "
        "paired by seed. /X: steps to the loss that tuned X ends with, over the steps "
        "of X; ≥ where some seeds never reach it. * best at an end of the grid. "
        f"Aim: at most {1 - AIM:.2f} in both columns from tau/H 0.2.",
        highlight=False,
    )


def _cells(row: dict[str, Any]) -> list[str]:
    edge, ratio = row["at_edge"], row["correction_ratio"]
    return [
        row["rule"],
        *(
            "-" if row[name] is None else f"{row[name]:.3g}" + "*" * (name in edge)
            for name in ("inner_lr", "outer_lr", "strength")
        ),
        _with_interval(row["final_loss"], 3),
        _ratio(row["vs_streaming"]),
        _ratio(row["vs_diloco"]),
        "-" if ratio is None else f"{ratio['mean']:.2g}",
    ]


def _with_interval(value: dict[str, float] | None, digits: int) -> str:
    if value is None:
        return "diverged"
    return f"{value['mean']:.{digits}f}±{value['half']:.{digits}f}"


def _ratio(against: dict[str, Any] | None) -> str:
    if against is None or against["ratio"] is None:
        return "-"
    bound = "≥" * (against["reached"] < against["seeds"])
    return bound + _with_interval(against["ratio"], 2)


def define() -> None:
    """Define the program's flags."""
    program.define(
        ("workdir", "runs/ablate_compensation", "Folder of the results, to resume."),
        ("rules", list, "Rules to compare. Default: all of them."),
        ("delays", ["4", "10", "20", "1"], "Delays tau, in inner steps."),
        ("workers", 2, "Processes that train at the same time."),
    )
    notes = attribute_notes(Settings)
    for field in dataclasses.fields(Settings):
        kind = type(field.default) if type(field.default) in (int, str) else list
        text = f"{notes[field.name]} Default: {field.default}."
        flags.define_one(kind, field.name, None, text)


cli = program.with_run_flags(main, __doc__, define)

if __name__ == "__main__":
    cli()
