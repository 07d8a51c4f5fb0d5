"""Trains regions without exchange and merges them late: an average, and ensembles.

    python -m experiments.studies.merge_experts --preset=tiny --workdir=DIR

Trains method `apart`, or uses the finished run in DIR. Each region has its own sources
unless --partition=iid. Evaluates on the same held-out batches as all programs: each
expert, the average of their parameters, even mixtures, and mixtures weighted by a
router that reads the first --prefix_tokens of a sequence. Writes merge.json and
merge.png to DIR. The same command resumes an interrupted one.
"""

import dataclasses
import functools
import math
import pathlib
import sys

from rich.console import Console

from cocodc_jax.data import load
from cocodc_jax.files import write_whole
from cocodc_jax.methods import METHODS
from cocodc_jax.report import plots
from cocodc_jax.run import flags
from cocodc_jax.run.config import TrainConfig, dumps
from cocodc_jax.run.preparing import prepare
from cocodc_jax.run.session import RUN_ERRORS

from .. import program
from .ensembles import Routing, Row, merge, reference

METHOD = "apart"
WITHOUT = ("method", "partition")


def main() -> None:
    """Read the flags, train, merge, write."""
    console = Console()
    open_text = functools.lru_cache(load)
    with flags.usage_errors():
        count = flags.processes().num_processes
        if count != 1:
            raise ValueError(
                f"num_processes={count} cannot merge: train with experiments.train "
                "--method=apart, then merge that workdir in one process"
            )
        references = _references()
        config = flags.config(WITHOUT, [METHOD, *references]).replace(
            method=METHOD, partition=flags.value("partition")
        )
        routing = _routing(config)
        default = f"runs/merge_{config.preset}_{config.data.partition}"
        workdir = pathlib.Path(flags.value("workdir") or default)
        tracking = flags.tracking()
        sessions = [prepare(config, workdir, open_text, tracking=tracking)]
        for name in references:
            folder = workdir / "references" / name
            other = config.replace(method=name)
            sessions.append(
                prepare(other, folder, open_text, sessions, tracking=tracking)
            )
    try:
        for session in sessions:
            steps = session.train(console)["steps"]
            if steps < session.config.run.steps:
                method = session.config.method.method
                print(f"stopped: {method} at step {steps}; the same command resumes "
                      "there")  # fmt: skip
                sys.exit(0)
        rows = merge(sessions[0], routing)
        rows |= {s.config.method.method: reference(s, routing) for s in sessions[1:]}
    except RUN_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    _write(rows, config, routing, workdir, console)


def _references() -> list[str]:
    names = [name for name in flags.value("references").split(",") if name]
    for name in names:
        if name not in METHODS or name == METHOD:
            raise ValueError(
                f"references={','.join(names)} names {name!r}; use some of "
                f"{sorted(METHODS.keys() - {METHOD})}"
            )
    return names


def _routing(config: TrainConfig) -> Routing:
    prefix = flags.value("prefix_tokens")
    if prefix is None:
        prefix = max(1, config.data.sequence_length // 4)
    routing = Routing(
        flags.value("top_k"),
        prefix,
        flags.value("temperature"),
        flags.value("router_batches"),
    )
    routing.check(config)
    return routing


def _write(
    rows: dict[str, Row],
    config: TrainConfig,
    routing: Routing,
    workdir: pathlib.Path,
    console: Console,
) -> None:
    merged = {
        "preset": config.preset,
        "partition": config.data.partition,
        "seed": config.run.seed,
        "regions": config.run.regions,
        "steps": config.run.steps,
        "routing": dataclasses.asdict(routing),
        "models": {name: dataclasses.asdict(row) for name, row in rows.items()},
    }
    write_whole(workdir / "merge.json", dumps(merged))
    faint = [name for name in rows if "expert" in name]
    figure = plots.losses({name: row.loss for name, row in rows.items()}, faint)
    plots.save_png(figure, str(workdir / "merge.png"))
    heads = ("model", "loss", "perplexity", "loss after prefix", "passes/token")
    lines = [
        (
            name,
            f"{row.loss:.4f}",
            f"{math.exp(row.loss):.3f}",
            f"{row.loss_after_prefix:.4f}",
            f"{row.passes_per_token:.2f}",
        )
        for name, row in rows.items()
    ]
    console.print(program.table(heads, lines))
    console.print(
        f"Held-out text; routers choose from {routing.prefix_tokens} tokens. "
        f"Files: {workdir}",
        highlight=False,
    )


def define() -> None:
    """Define the program's flags."""
    flags.define(WITHOUT, "Folder of the runs and the results; they resume there.")
    flags.define_tracking()
    program.define(
        ("partition", "source", "How regions share the corpus: source or iid."),
        ("top_k", 2, "Experts that a sparse router keeps."),
        ("prefix_tokens", int, "Tokens that a router reads. Default: a quarter."),
        ("temperature", 1.0, "Temperature of the posterior; 1 is Bayes' rule."),
        ("router_batches", 64, "A region's training batches for the linear router."),
        ("references", "", "Methods to compare with, comma-separated."),
    )


cli = program.with_run_flags(main, __doc__, define)

if __name__ == "__main__":
    cli()
