r"""Trains with several methods over several emulated networks, and in the simulator.

    python -m experiments.compare_networks --workdir=DIR --networks=100,1000 \
        --methods=diloco,cocodc -- --preset=tiny --eval_batches=4 --step_seconds=0.25

Each run starts a process for each region by `experiments.wan`. Flags after -- are those
of `experiments.train`. The speed of the regions is compared with that of the same
regions without a network, and with the prediction of `cocodc_jax.network.simulator` for
the same links, bytes and step times. The prediction also needs the bytes that a host
prepares in a second; data parallel measures them over the fastest network of the lab,
with the usual delay.

Writes networks.json, networks.md and networks.png to DIR, and a folder for each run.
The same command resumes, and skips runs that are done.

The regions of a lab share this machine's cores. With --step_seconds they compute for a
part of each step only, and leave the cores to the network for the rest.
"""

import dataclasses
import itertools
import math
import pathlib
import sys
import threading
from collections.abc import Sequence
from typing import Any

from absl.flags import FlagValues
from rich.console import Console

from cocodc_jax import methods
from cocodc_jax.files import write_whole
from cocodc_jax.netlab import region
from cocodc_jax.report.plots import save_png
from cocodc_jax.run.config import flags
from cocodc_jax.run.config.train_config import LEAVES, TrainConfig, dumps
from cocodc_jax.run.resume import make_folder

from . import commands, program
from .networks import lab_run, report
from .networks.lab_run import LabRunError, Measured, Pace

# The references: without a network, and over the lab's fastest with an exchange a step.
REFERENCES = ("apart", "data_parallel")
WIDTH = 132  # Of the table, also if the output is not a terminal.
# Set here, because the comparison is about speed only.
FIXED = {"warmup_steps": 0, "eval_every": 0, "checkpoint_every": 0}
WITHOUT = ("method", "steps", *FIXED)


def define_flags() -> FlagValues:
    """Return this program's own flags, apart from those of training."""
    return program.own_flags(
        ("workdir", pathlib.Path, "folder for results"),
        (
            "networks",
            ["100", "1000", "20", "unequal"],
            f"Mbit/s of each pair of regions at {lab_run.LATENCY_MS} ms one way; or "
            "unequal (three regions near, one far); or a YAML file of links "
            "(network/world.py)",
        ),
        ("methods", [*lab_run.USUAL], "methods that processes can run"),
        ("intervals", 4, "sync intervals to measure, after the first two"),
        ("limit_s", 1800.0, "seconds after which a run is aborted"),
        intervals=1,
        limit_s=1,
    )


@dataclasses.dataclass(frozen=True)
class Job:
    """One method over one network."""

    network: lab_run.Network
    method: str
    config: TrainConfig  # Without the number of steps.
    stretch: lab_run.Stretch
    folder: pathlib.Path
    command: list[str]
    limit_s: float

    def measured(self) -> Measured:
        """Return the measurements of the run; run it first if necessary."""
        return lab_run.measured(
            self.command, self.folder, self.stretch, self.limit_s, self.network.links
        )

    def predicted(
        self, run: Measured, alone: Measured, host_bytes_per_s: float = math.inf
    ) -> tuple[Pace, float]:
        """Return the predicted pace, and the bytes of the full run."""
        method = self.config.method.build()
        all_reduce = self.config.run.all_reduce
        return lab_run.predict(
            network=self.network,
            method=method,
            stretch=self.stretch,
            run=run,
            step_s=alone.region_step_s,
            all_reduce=all_reduce,
            host_bytes_per_s=host_bytes_per_s,
        )

    def row(self, alone: Measured, host_bytes_per_s: float) -> dict[str, Any]:
        """Run it, and return its row of the results."""
        try:
            run = self.measured()
        except LabRunError as error:
            return report.failure(self.network.name, self.method, error)
        simulated, wire_bytes = self.predicted(run, alone, host_bytes_per_s)
        return report.row(
            self.network.name, self.method, run, simulated, wire_bytes, alone
        )


def read_jobs(values: FlagValues, train: Sequence[str]) -> list[Job]:
    """Check all flags; return the two reference runs, then the others."""
    if not values.workdir:
        raise ValueError("workdir=None is missing; name a folder for the results")
    names = _distinct("methods", values.methods)
    for name in names:
        lab_run.check(methods.get(name))

    _distinct("networks", values.networks)
    flags.define(WITHOUT)
    flags.parse(["experiments.train", *train])

    for name in ("workdir", *flags.PROCESSES, *flags.ELASTIC):
        if flags.given(name):
            raise ValueError(
                f"{name}={flags.value(name)} is set for each run; leave it out after --"
            )

    flags.check_methods(names)
    base = flags.config()  # What all runs share.
    regions = base.run.regions
    limit_s = values.limit_s
    if regions < 2:
        raise ValueError(f"regions={regions} has no network; use 2 or more")

    networks = [lab_run.network(word, regions) for word in values.networks]
    wide = lab_run.network(lab_run.WIDE, regions)
    _distinct("networks", [network.name for network in networks])
    if not limit_s < threading.TIMEOUT_MAX:
        raise ValueError(f"limit_s={limit_s} must be at most {threading.TIMEOUT_MAX:g}")

    # The references send nothing, or everything uncompressed.
    control = base.where(compress=None)
    jobs = [_job(values, wide, control, name, ["compress"]) for name in REFERENCES]
    for network, name in itertools.product(networks, names):
        jobs.append(_job(values, network, base, name))
    flags.check_effects(job.config for job in jobs)

    planned: dict[pathlib.Path, list[str]] = {}
    for job in jobs:
        if planned.setdefault(job.folder, job.command) != job.command:
            raise ValueError(
                f"networks={job.network.name} is the network that others are compared "
                f"with, and {job.method} runs differently there; use another network, "
                "or a file of another name"
            )
        lab_run.held(job.command, job.folder, job.network.links)

    return jobs


def _job(
    values: FlagValues,
    network: lab_run.Network,
    base: TrainConfig,
    method: str,
    without: Sequence[str] = (),
) -> Job:
    """Return a job with the given flags that the method takes, and the fixed ones."""
    config = base.replace(method=method)
    taken = methods.defaults(method)
    stretch = lab_run.stretch(
        config.method.build(), config.run.log_every, values.intervals
    )
    leaves = {"preset": base.preset}

    for name in LEAVES:
        if name in (*WITHOUT, *without) or not flags.given(name):
            continue
        if LEAVES[name].section != "method" or name in taken:
            leaves[name] = flags.value(name)

    leaves |= {"method": method, "steps": stretch.last_step, **FIXED}
    train = [f"--{name}={value}" for name, value in leaves.items()]
    folder = pathlib.Path(values.workdir) / network.name / method
    lab = (*commands.python_m("wan"), *network.flags, f"--logdir={folder / 'net'}")
    run = (*commands.python_m("train"), *train, f"--workdir={folder / 'run'}")
    command = [*lab, "--", *run]

    return Job(network, method, config, stretch, folder, command, values.limit_s)


def _distinct(name: str, words: Sequence[str]) -> list[str]:
    if not words or len(set(words)) < len(words):
        raise ValueError(f"{name}={','.join(words)} must be names, each once")
    return list(words)


def run(jobs: Sequence[Job], workdir: pathlib.Path, command: str) -> int:
    """Run everything and write reports; return the exit code, 1 if a run failed."""
    console = Console(width=WIDTH)
    (apart, every_step, *others) = jobs
    try:
        alone = apart.measured()
        sent = every_step.measured()
        expected, _ = every_step.predicted(sent, alone)
        host_bytes_per_s = lab_run.host_bytes_per_s(sent, expected)
    except LabRunError as error:
        print(f"error: before the comparison: {error}", file=sys.stderr)
        return 1

    rows: list[dict[str, Any]] = []
    result = {
        "command": command,
        "apart": dataclasses.asdict(alone),
        "host_bytes_per_s": host_bytes_per_s if host_bytes_per_s < math.inf else None,
        "rows": rows,
    }

    for job in others:
        rows.append(job.row(alone, host_bytes_per_s))
        print(*report.cells(rows[-1])[:5], sep="  ", file=sys.stderr)
        write_whole(workdir / "networks.json", dumps(result))

    write_whole(workdir / "networks.md", report.markdown(rows, alone, command))
    if any("error" not in entry for entry in rows):
        save_png(report.slowdowns(rows), str(workdir / "networks.png"))
    console.print(report.table(rows))
    console.print(report.note(alone), highlight=False)

    return int(any("error" in entry for entry in rows))


def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit code."""
    values = define_flags()
    with program.usage_errors(values, flags.FLAGS):
        jobs = read_jobs(values, program.parse(values, argv, __doc__))
        if lacks := region.missing():
            raise ValueError(f"the network lab lacks {'; and '.join(lacks)}")
        workdir = pathlib.Path(values.workdir)
        make_folder(workdir)

        command = commands.command_line("compare_networks", argv[1:])
        try:
            return run(jobs, workdir, command)
        except lab_run.StoppedError:
            print("stopped; the same command resumes", file=sys.stderr)
            return flags.STOPPED


cli = program.with_own_flags(main)

if __name__ == "__main__":
    cli()
