"""Tells what a delay costs at each sync, and which part every merge rule gets back.

    python -m experiments.studies.delay_cost --workdir=DIR

Runs without delay are followed; at every sync their regions go two ways for tau steps,
with the mean and without it, and each rule is compared by its distance to the way with
the mean, and by its loss there (experiments/studies/recovery.py). Writes
DIR/delay_cost.json and delay_cost.png, and prints a table for every delay: means over
the second half of the syncs, with intervals over the seeds.
"""

import dataclasses
import pathlib
import sys
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from cocodc_jax.files import read_table, write_whole
from cocodc_jax.report.page import describe_machine
from cocodc_jax.report.plots import COLORS, new_figure, save_png, tidy
from cocodc_jax.run import flags
from cocodc_jax.run.config import dumps
from cocodc_jax.run.resume import make_folder
from cocodc_jax.transforms.numerics import check_rate

from .. import commands, program
from ..sweeps.cells import Interval
from . import recovery
from .recovery import Settings

DRAWN = ("mix_0.5", "replay", "isotropic", "hessian_vector")


def main() -> None:
    """Read the flags, measure, write and print."""
    console = Console(width=max(80, Console().width))
    with flags.usage_errors():
        settings = _settings()
        names, delays = _asked(settings.sync_interval)
        command = commands.command_line("studies.delay_cost", sys.argv[1:])
        path, rows = _results(pathlib.Path(flags.value("workdir")), command)
    for delay in delays:
        if all(row["delay_steps"] != delay for row in rows):
            found = recovery.measure(settings, delay, names)
            rows += _rows(delay, found)
            summary = {
                "command": command,
                "machine": describe_machine(jax.devices()),
                "settings": dataclasses.asdict(settings),
                "rows": rows,
            }
            # After every delay: another one takes minutes.
            write_whole(path, dumps(summary))
        own = [row for row in rows if row["delay_steps"] == delay]
        _print(own, settings, console)
        if left_out := set(names) - {row["rule"] for row in own}:
            console.print(
                f"Not at a delay of {delay}, as they need a longer one: "
                + ", ".join(sorted(left_out)),
                highlight=False,
            )
    save_png(_figure(rows, settings), str(path.with_suffix(".png")))


def _results(
    workdir: pathlib.Path, command: str
) -> tuple[pathlib.Path, list[dict[str, Any]]]:
    """Return the file of results, and the rows that the same command wrote before."""
    make_folder(workdir)
    path = workdir / "delay_cost.json"
    if not path.exists():
        return path, []
    found = read_table(path)
    if found.get("command") != command:
        raise ValueError(
            f"workdir={str(workdir)!r} holds what another command measured; name "
            "another folder or delete it"
        )
    return path, found["rows"]


def _settings() -> Settings:
    values = {x.name: flags.value(x.name) for x in dataclasses.fields(Settings)}
    for name in ("seeds", "sync_interval", "batch_per_region"):
        if values[name] < 1:
            raise ValueError(f"{name}={values[name]} must be at least 1")
    check_rate("outer_lr", values["outer_lr"])
    if values["steps"] < 2 * values["sync_interval"]:
        raise ValueError(
            f"steps={values['steps']} must be at least two sync intervals of "
            f"{values['sync_interval']}"
        )
    return Settings(**values)


def _asked(sync_interval: int) -> tuple[list[str], tuple[int, ...]]:
    """Return the rules of --rules, by default all, and the distinct --delays."""
    known = recovery.rules(sync_interval)
    names = flags.value("rules") or [*known]
    for name in names:
        if name not in known:
            raise ValueError(f"rules={name!r} is unknown; use some of {sorted(known)}")
    if len(set(names)) < len(names):
        raise ValueError(f"rules={','.join(names)} names one twice")
    delays = program.numbers("delays", flags.value("delays"))
    if not delays:
        raise ValueError("delays=() is empty; name at least one")
    for delay in delays:
        if not 1 <= delay <= sync_interval:
            raise ValueError(
                f"delays={delay} must be at least 1 and at most sync_interval="
                f"{sync_interval}"
            )
    return names, tuple(dict.fromkeys(delays))


def _rows(delay: int, found: recovery.Recovery) -> list[dict[str, Any]]:
    """Return a row for each rule and strength, and one for doing nothing.

    What is not finite, of a seed that diverged, is None.
    """
    half = len(found.steps) // 2

    def over_seeds(values: np.ndarray) -> dict[str, float | None] | None:
        means = values[half:].mean(0)
        if not np.isfinite(means).all():
            return None
        return dataclasses.asdict(Interval.of(means.tolist()))

    def finite(values: np.ndarray) -> list[float | None]:
        return [float(x) if np.isfinite(x) else None for x in values]

    shared = {
        "delay_steps": delay,
        "steps": found.steps,
        "cost": over_seeds(found.cost),
        "along": over_seeds(found.along),
    }
    zero = {(recovery.KEEP, None): np.zeros_like(found.cost)}
    return [
        shared
        | {
            "rule": name,
            "strength": strength,
            "recovered": over_seeds(values),
            "recovered_at": finite(values.mean(1)),
            "loss": over_seeds(found.loss[name, strength]),
        }
        for (name, strength), values in (zero | found.recovered).items()
    ]


def _print(rows: list[dict[str, Any]], settings: Settings, console: Console) -> None:
    first = rows[0]
    cost, along = (_text(first[name], 2) for name in ("cost", "along"))
    title = (
        f"tau/H = {first['delay_steps'] / settings.sync_interval:g}: doing nothing is "
        f"{cost} |D| away; {along} of what replay leaves lies along D"
    )
    heads = ("rule", "strength", "recovered", "loss less that without delay")
    lines = [
        (
            row["rule"],
            "-" if row["strength"] is None else f"{row['strength']:.3g}",
            _text(row["recovered"], 3),
            _text(row["loss"], 4),
        )
        for row in rows
    ]
    console.print(program.table(heads, lines, title=title, is_ruled=True))


def _text(value: dict[str, Any] | None, digits: int) -> str:
    if value is None:
        return "diverged"
    return format(Interval(**value), f".{digits}f")


def _figure(rows: list[dict[str, Any]], settings: Settings) -> Figure:
    """One panel a delay: what rules leave at each sync, at their best strengths."""
    delays = list(dict.fromkeys(row["delay_steps"] for row in rows))
    figure = new_figure(3.6, 4.2 * len(delays))
    panels = figure.subplots(1, len(delays), squeeze=False, sharey=True)[0]
    for axes, delay in zip(panels, delays, strict=True):
        for color, name in zip(COLORS, DRAWN, strict=False):
            own = [
                row
                for row in rows
                if (row["rule"], row["delay_steps"]) == (name, delay)
                and row["recovered"] is not None
            ]
            if own:
                best = max(own, key=lambda row: row["recovered"]["mean"])
                left = 1 - np.array(best["recovered_at"], float)
                axes.plot(best["steps"], left, color=color, label=name)
        axes.set_title(f"tau/H = {delay / settings.sync_interval:g}", fontsize="medium")
        axes.set_xlabel("inner steps")
        axes.set_yscale("log")
        axes.axhline(1, color="#999999", linewidth=0.8)
        tidy(axes)
    panels[0].set_ylabel("left of the delay's cost")
    panels[-1].legend(frameon=False, fontsize="small")
    return figure


def define() -> None:
    """Define the program's flags."""
    program.define(
        ("workdir", pathlib.Path("runs/delay_cost"), "Folder of the results."),
        ("rules", list, "Rules to judge. Default: all of them."),
        ("delays", ["2", "10", "20"], "Delays tau, in inner steps."),
        ("seeds", Settings.seeds, "Runs, each with a seed of its own."),
        ("steps", Settings.steps, "Inner steps of a run."),
        ("sync_interval", Settings.sync_interval, "H, steps between syncs."),
        (
            *("batch_per_region", Settings.batch_per_region),
            "Sequences of a region's step; more leave less noise.",
        ),
        ("outer_lr", Settings.outer_lr, "Of the outer Nesterov optimizer."),
    )


cli = program.with_run_flags(main, __doc__, define)

if __name__ == "__main__":
    cli()
