"""Trains one model with several methods on the same data, and shows the difference.

    python -m experiments.compare --preset=tiny

Every method gets the same model, data, seeds, tokens and evaluation. Some methods bring
an inner optimizer. `method+optimizer` runs another method with it, which separates the
two effects:

    python -m experiments.compare --methods=muloco,diloco,diloco+muon,data_parallel+muon

`recipe` is not a method but the setting that this project recommends: Streaming DiLoCo
with one bit a value, a fragment at every step and twice the preset's inner learning
rate. The methods have the hyperparameters of their papers.

Writes to the workdir: a folder for each run, comparison.json, PNG plots, and
report.html with all of it. The same command resumes an interrupted comparison.
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from rich.console import Console

from cocodc_jax.data import load
from cocodc_jax.files import write_whole
from cocodc_jax.methods import METHODS
from cocodc_jax.report.comparison import DamagedRunError, Run, compare, load_run
from cocodc_jax.report.units import format_bytes
from cocodc_jax.report.winner import versions, won
from cocodc_jax.run.attend import Tracking
from cocodc_jax.run.config import flags
from cocodc_jax.run.config.optimizer_config import OPTIMIZERS
from cocodc_jax.run.config.train_config import TrainConfig, dumps
from cocodc_jax.run.preparing import prepare
from cocodc_jax.run.session import RUN_ERRORS, Session
from cocodc_jax.train.finite import NonFiniteLossError

from . import commands, program, recipe

WITHOUT = ("method", "seed")
_PRINTED = (
    "eval_loss",
    "eval_loss_outer",
    "bytes_sent_per_region",
    "outer_bytes",
    "region_drift",
)


def main() -> None:
    """Read the flags, train every method with every seed, write the report."""
    console = Console()
    open_text = functools.lru_cache(load)
    with flags.usage_errors():
        base = flags.config()
        methods = _methods(base)
        target = flags.value("target_method")
        seeds = flags.value("seeds")
        if target is not None and target not in methods:
            raise ValueError(
                f"target_method={target!r} must be one of methods={','.join(methods)}"
            )
        if seeds < 1:
            raise ValueError(f"seeds={seeds} must be at least 1")

        flags.check_methods([leaves["method"] for leaves in methods.values()])
        workdir = pathlib.Path(flags.value("workdir") or f"runs/compare_{base.preset}")
        configs = {
            workdir / f"{name}_seed{seed}": base.replace(seed=seed, **leaves)
            for seed in range(seeds)
            for name, leaves in methods.items()
        }
        flags.check_effects(configs.values())
        flags.check_one_process()
        flags.check_processes(configs.values(), 1)
        tracking = flags.read(Tracking)

        # Check all runs before the first trains, so that a wrong flag is found at once.
        ready: list[Session] = []
        for folder, config in configs.items():
            ready.append(prepare(config, folder, open_text, ready, tracking=tracking))

    runs: list[Run] = []
    diverged: dict[str, str] = {}
    for session, name in zip(ready, [*methods] * seeds, strict=True):
        outcome = _train(session, console)
        if isinstance(outcome, Run):
            runs.append(dataclasses.replace(outcome, method=name))
        else:
            diverged.setdefault(name, outcome)

    # A mean over some of the seeds is not comparable with the others.
    runs = [run for run in runs if run.method not in diverged]
    if runs:
        settings = {
            name: described(base.replace(**leaves)) for name, leaves in methods.items()
        }
        _write_report(runs, diverged, base, settings, workdir, console)
    if diverged:
        sys.exit(1)


def _methods(base: TrainConfig) -> dict[str, dict[str, Any]]:
    """Return the names as passed, each with the leaves that it sets."""
    names = [name.strip() for name in flags.value("methods").split(",") if name.strip()]
    if not names:
        raise ValueError(f"methods='' is empty; use some of {sorted(METHODS)}")
    if "all" in names:
        at = names.index("all")
        names[at : at + 1] = [
            name
            for name, make in METHODS.items()
            if make().num_regions in (None, base.run.regions)
        ]

    for name in names:
        method, _, optimizer = name.partition("+")
        if method not in METHODS and name != recipe.NAME:
            raise ValueError(
                f"methods={','.join(names)} names {name!r}, which is unknown; "
                f"use some of {sorted(METHODS)}, or {recipe.NAME}"
            )
        if name != method and optimizer not in OPTIMIZERS:
            raise ValueError(
                f"methods={','.join(names)} names {name!r}, with an inner optimizer "
                f"that is unknown; use one of {OPTIMIZERS} after the +"
            )

    if len(set(names)) < len(names):
        raise ValueError(f"methods={','.join(names)} names one twice")
    keys = ("method", "inner_optimizer")
    return {
        name: _recipe(base)
        if name == recipe.NAME
        else dict(zip(keys, name.split("+"), strict=False))
        for name in names
    }


def _recipe(base: TrainConfig) -> dict[str, Any]:
    """Return the leaves of the recommended setting, without those that flags set."""
    streaming = base.replace(method=recipe.METHOD).method.build()
    chosen = recipe.setting(streaming.num_fragments).flags
    chosen["inner_lr"] = recipe.INNER_LR_FACTOR * base.optimizer.inner_lr

    return {name: x for name, x in chosen.items() if not flags.given(name)}


def described(config: TrainConfig) -> dict[str, str]:
    """Return the settings of a run's exchange and its rates; a dash if it has none.

    H is the interval in steps, K the number of fragments, and tau the delay in steps.
    """
    values = config.method.values
    method = config.method.build()
    keys = {
        "H": "sync_interval",
        "tau": "delay_steps",
        "compressor": "compress",
        "alpha": "mixing_alpha",
        "outer rate": "outer_lr",
        "outer momentum": "outer_momentum",
    }
    columns = {head: values.get(key) for head, key in keys.items()}
    if "compress" in values and columns["compressor"] in (None, "none"):
        columns["compressor"] = "float32"

    optimizer = config.optimizer
    settings = {
        "method": config.method.method,
        "H": columns.pop("H"),
        "K": method.num_fragments if values.get("num_fragments") else None,
        **columns,
        "inner optimizer": optimizer.name(method),
        "inner rate": optimizer.inner_lr,
    }
    return {head: "–" if x is None else f"{x}" for head, x in settings.items()}


def _train(session: Session, console: Console) -> Run | str:
    """Return the finished run, or the error if it diverged; exit on other errors."""
    method = session.config.method.method
    run = session.config.run
    try:
        summary = session.train(console)
        if summary["steps"] == run.steps:
            return load_run(session.workdir)
    except (*RUN_ERRORS, DamagedRunError) as error:
        print(f"error: {method}, seed {run.seed}: {error}", file=sys.stderr)
        if isinstance(error, NonFiniteLossError):
            return f"seed {run.seed}: {error}"
        sys.exit(1)

    print(
        f"stopped: {method}, seed {run.seed}, at step {summary['steps']}; "
        "the same command resumes there"
    )
    sys.exit(flags.STOPPED)


def _write_report(
    runs: Sequence[Run],
    diverged: Mapping[str, str],
    base: TrainConfig,
    settings: Mapping[str, Mapping[str, str]],
    workdir: pathlib.Path,
    console: Console,
) -> None:
    from cocodc_jax.report import experts, page, plots  # Matplotlib, on use.

    target = flags.value("target_method")
    if target in diverged:
        print(
            f"warning: target_method={target!r} diverged; the target is the worst loss "
            "of the others",
            file=sys.stderr,
        )
        target = None

    comparison = compare(runs, target, diverged)
    write_whole(workdir / "comparison.json", dumps(comparison))
    figures = {
        "loss_by_steps": (plots.loss_by_steps(runs), "Loss against inner steps."),
    }

    if any(run.summary["bytes_sent_per_region"] for run in runs):
        figures["loss_by_bytes"] = (
            plots.loss_by_bytes(runs),
            "Loss against bytes sent.",
        )

    if any(run.of_kind("sync") for run in runs):
        figures["fragments_in_flight"] = (
            plots.fragments_in_flight(runs),
            "When each fragment was in flight; a mark is a sync without delay.",
        )

    figures |= experts.figures(runs)
    pictures = {}
    for name, (figure, caption) in figures.items():
        plots.save_png(figure, str(workdir / f"{name}.png"))
        pictures[caption] = plots.png_bytes(figure)

    text = page.render(
        comparison,
        pictures,
        command=commands.command_line("compare", sys.argv[1:]),
        config=base.to_json(),
        machine=page.describe_machine(jax.devices()),
        winner=won(comparison),
        settings=settings,
        versions=versions(),
    )
    write_whole(workdir / "report.html", text)
    _print_table(comparison, target, console)
    console.print(won(comparison), highlight=False)
    console.print(f"Report: {workdir / 'report.html'}", highlight=False)


def _print_table(comparison: dict, target: str | None, console: Console) -> None:
    heads = ("method", "loss", "outer", "sent/region", "kept", "drift", "to target")
    rows = []
    for name, row in comparison["methods"].items():
        loss, outer, sent, kept, drift = (row[key]["mean"] for key in _PRINTED)
        sizes = map(format_bytes, (sent, kept))
        steps = row["steps_to_target"]
        reached = row["seeds_at_target"]
        num = len(row["seeds"])
        to_target = "-" if steps is None else f"{steps:.0f} steps"
        to_target += f" ({reached} of {num} seeds)" * (0 < reached < num)
        losses = (f"{loss:.4f}", f"{outer:.4f}")
        rows.append((name, *losses, *sizes, f"{drift:.1e}", to_target))

    rows += [(name, "diverged") for name in comparison["diverged"]]
    console.print(program.table(heads, rows))
    whose = target or "the worst"
    console.print(
        "Loss: of the regions' mean, on held-out text. Outer: of the outer model. "
        "Sent: float32, unless the method has a compressor or --compress sets one "
        "(Streaming DiLoCo as published sends FP4: --compress=fp4). Kept: outer state, "
        "messages in flight and error feedback, over all regions. Drift: RMS distance "
        "of the regions from their mean, over its length. To target: steps to the loss "
        f"{comparison['target_loss']:.4f} of {whose}.",
        highlight=False,
    )


def define() -> None:
    """Define the program's flags."""
    flags.define(
        WITHOUT,
        "Folder of the runs and the report; they resume there. Default: "
        "runs/compare_PRESET.",
    )
    flags.define_fields(Tracking)
    program.define(
        (
            *("methods", "data_parallel,diloco,streaming_diloco,cocodc,recipe"),
            "Methods to compare, comma-separated; all: every method that --regions "
            "allows. diloco+muon: with another inner optimizer. recipe: what this "
            "project recommends.",
        ),
        ("target_method", str, "Whose final loss is the target. Default: the worst."),
        ("seeds", 1, "Seeds of each method: 0, 1, ..."),
    )


cli = program.with_run_flags(main, __doc__, define)

if __name__ == "__main__":
    cli()
