r"""Trains with several methods over several emulated networks, and in the simulator.

    python -m experiments.compare_networks --workdir=DIR --networks=100,1000 \
        --methods=diloco,cocodc -- --preset=tiny --eval_batches=4 --step_seconds=0.25

Each run starts a process for each region by `experiments.wan`. Flags after -- are those
of `experiments.train`. The speed of the regions is compared with two others: the same
regions without a network, and the prediction of `cocodc_jax.network.simulator` for the
same links, bytes and step times. The prediction also needs the bytes that a host
prepares in a second. They are measured by data parallel over the fastest network of the
lab, with the usual delay.

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
from collections.abc import Iterator, Sequence
from typing import Any

from absl.flags import FlagValues
from rich.console import Console

from cocodc_jax import methods
from cocodc_jax.files import write_whole
from cocodc_jax.netlab import region
from cocodc_jax.report.plots import save_png
from cocodc_jax.run import flags
from cocodc_jax.run.config import LEAVES, TrainConfig, dumps
from cocodc_jax.run.resume import make_folder

from . import commands, program
from .networks import cases, lab_run, report
from .networks.lab_run import LabRunError, Measured, Pace

APART, EVERY_STEP = "apart", "data_parallel"
WIDTH = 132  # of the table, also where the output is no terminal
# Set here, because the comparison is about speed only.
FIXED = {"warmup_steps": 0, "eval_every": 0, "checkpoint_every": 0}
WITHOUT = ("method", "steps", *FIXED)


def define_flags() -> FlagValues:
    """Return this program's own flags, apart from those of training."""
    return program.own_flags(
        ("workdir", str, "folder for results"),
        (
            *("networks", ["100", "1000", "20", "unequal"]),
            f"Mbit/s of each pair of regions at {cases.LATENCY_MS} ms one way; or "
            "unequal (three regions near, one far); or a YAML file of links "
            "(network/world.py)",
        ),
        ("methods", [*lab_run.USUAL], "methods that processes can run"),
        ("intervals", 4, "sync intervals to measure, after the first two"),
        ("limit_s", 1800.0, "seconds after which a run is aborted"),
        intervals=1,
        limit_s=1,
    )


class Comparison:
    """A checked comparison; `rows` runs it."""

    def __init__(self, values: FlagValues, train: Sequence[str]):
        """Check all flags; run nothing."""
        if not values.workdir:
            raise ValueError("workdir=None is missing; name a folder for the results")
        self._workdir = pathlib.Path(values.workdir)
        self._methods = _distinct("methods", values.methods)
        for name in self._methods:
            lab_run.check(methods.get(name))
        _distinct("networks", values.networks)
        self._base = train_config(train, self._methods)
        self._given = [n for n in LEAVES if n not in WITHOUT and flags.given(n)]
        regions = self._base.run.regions
        if regions < 2:
            raise ValueError(f"regions={regions} has no network; use 2 or more")
        self._networks = [cases.network(word, regions) for word in values.networks]
        self._wide = cases.network(cases.WIDE, regions)
        _distinct("networks", [network.name for network in self._networks])
        self._intervals, self._limit_s = values.intervals, values.limit_s
        if not self._limit_s < threading.TIMEOUT_MAX:
            raise ValueError(
                f"limit_s={self._limit_s} must be at most {threading.TIMEOUT_MAX:g}"
            )
        self._check_folders()

    def _check_folders(self) -> None:
        """Refuse folders that have, or would get, the result of another run."""
        controls = [(self._wide, method) for method in (APART, EVERY_STEP)]
        planned: dict[pathlib.Path, list[str]] = {}
        for each in (*controls, *itertools.product(self._networks, self._methods)):
            command, folder = self._command(*each)
            if planned.setdefault(folder, command) != command:
                raise ValueError(
                    f"networks={each[0].name} is what others are held against, run "
                    f"otherwise with {each[1]}; use another network, or a file of "
                    "another name"
                )
            lab_run.held(command, folder, each[0].links)

    def apart(self) -> Measured:
        """Return the run without a network, also in the lab."""
        return self._measured(self._wide, APART)

    def host_bytes_per_s(self, alone: Measured) -> float:
        """Return the bytes of messages that hosts prepare in a second."""
        run = self._measured(self._wide, EVERY_STEP)
        expected, _ = self._predicted(self._wide, EVERY_STEP, run, alone, math.inf)
        return lab_run.host_bytes_per_s(run, expected)

    def rows(
        self, alone: Measured, host_bytes_per_s: float
    ) -> Iterator[dict[str, Any]]:
        """Run every method over every network."""
        for network, method in itertools.product(self._networks, self._methods):
            try:
                run = self._measured(network, method)
            except LabRunError as error:
                yield report.failure(network.name, method, error)
                continue
            given = network, method, run, alone, host_bytes_per_s
            pace, wire_bytes = self._predicted(*given)
            yield report.row(network.name, method, run, pace, wire_bytes, alone)

    def _predicted(
        self,
        network: cases.Network,
        method: str,
        run: Measured,
        alone: Measured,
        host_bytes_per_s: float,
    ) -> tuple[Pace, float]:
        return lab_run.predict(
            network,
            self._config(network, method).method.build(),
            self._stretch(network, method),
            run,
            alone.region_step_s,
            self._base.run.all_reduce,
            host_bytes_per_s,
        )

    def _measured(self, network: cases.Network, method: str) -> Measured:
        given = *self._command(network, method), self._stretch(network, method)
        return lab_run.measured(*given, self._limit_s, network.links)

    def _stretch(self, network: cases.Network, method: str) -> cases.Stretch:
        config = self._config(network, method)
        given = config.method.build(), config.run.log_every, self._intervals
        return cases.stretch(*given)

    def _command(
        self, network: cases.Network, method: str
    ) -> tuple[list[str], pathlib.Path]:
        """Return the command of a run, and its folder."""
        folder = self._workdir / network.name / method
        last_step = self._stretch(network, method).last_step
        train = self._train_flags(network, method, last_step)
        return lab_run.lab_command(network, folder, train), folder

    def _config(self, network: cases.Network, method: str) -> TrainConfig:
        # The references send nothing, or everything uncompressed.
        is_control = network is self._wide
        base = self._base.where(compress=None) if is_control else self._base
        return base.replace(method=method)

    def _train_flags(
        self, network: cases.Network, method: str, num_steps: int
    ) -> list[str]:
        """Return the given flags that this method takes, and the fixed ones."""
        taken = methods.defaults(method)
        leaves = {"preset": self._base.preset}
        for name in self._given:
            if name == "compress" and network is self._wide:
                continue
            if LEAVES[name].section != "method" or name in taken:
                leaves[name] = flags.value(name)
        leaves |= {"method": method, "steps": num_steps, **FIXED}
        return [f"--{name}={value}" for name, value in leaves.items()]


def train_config(train: Sequence[str], methods: Sequence[str]) -> TrainConfig:
    """Return the configuration that all runs share."""
    flags.define(WITHOUT)
    flags.parse(["experiments.train", *train])
    for name in ("workdir", *flags.PROCESSES):
        if flags.given(name):
            raise ValueError(
                f"{name}={flags.value(name)} is set for each run; leave it out after --"
            )
    return flags.config(WITHOUT, methods)


def _distinct(name: str, words: Sequence[str]) -> list[str]:
    if not words or len(set(words)) < len(words):
        raise ValueError(f"{name}={','.join(words)} must be names, each once")
    return list(words)


def run(comparison: Comparison, workdir: pathlib.Path, command: str) -> int:
    """Run everything and write reports; return the exit code, 1 if a run failed."""
    console = Console(width=WIDTH)
    try:
        alone = comparison.apart()
        host_bytes_per_s = comparison.host_bytes_per_s(alone)
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
    for entry in comparison.rows(alone, host_bytes_per_s):
        rows.append(entry)
        print(*report.cells(entry)[:5], sep="  ", file=sys.stderr)
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
    try:
        if (train := program.parse(values, argv, __doc__)) is None:
            return 0
        comparison = Comparison(values, train)
        if lacks := region.missing():
            raise ValueError(f"the network lab lacks {'; and '.join(lacks)}")
        workdir = pathlib.Path(values.workdir)
        make_folder(workdir)
        command = commands.command_line("compare_networks", argv[1:])
        return run(comparison, workdir, command)
    except program.REFUSED as error:
        return program.refuse(error, {*values, *flags.FLAGS})
    except lab_run.StoppedError:
        print("stopped; the same command resumes", file=sys.stderr)
        return 130


cli = program.with_own_flags(main)

if __name__ == "__main__":
    cli()
