"""Trains in several processes on this machine, which share the regions.

    python -m experiments.launch_local --regions=4 -- --preset=tiny --method=cocodc

The flags after `--` are those of `experiments.train`. Process 0 writes to the terminal,
process N to WORKDIR/process_N/output.log. If a process fails, the others end too, and
its exit code is the program's. SIGINT (Ctrl-C), SIGTERM and SIGHUP end the run after a
checkpoint; a second one ends it at once.

With `--elastic` every region is a separate run (`--exchange=elastic`), writes to
WORKDIR/region_N/output.log, and ends without the others. `--restart` starts it again,
unless it refused its flags or died within a minute five times in a row.
"""

import math
import os
import pathlib
import signal
import time
from collections.abc import Sequence

from cocodc_jax.netlab import children
from cocodc_jax.run import processes
from cocodc_jax.run.bucket import folder_here
from cocodc_jax.run.build import check_elastic
from cocodc_jax.run.config import flags
from cocodc_jax.run.resume import make_folder

from . import commands, program, train

OWN_FLAGS = (
    ("regions", int, "regions that train; default: as the flags after -- say"),
    (
        "processes",
        int,
        "processes that share the regions, or several to a region; default: one per "
        "region",
    ),
    ("grace_s", 60.0, "seconds between asking the processes to end and killing them"),
    ("elastic", False, "every region a run of its own, which may die and come back"),
    ("restart", False, "with --elastic: start regions again that died"),
)


def launch(
    train_flags: Sequence[str], workdir: pathlib.Path, count: int, grace_s: float
) -> int:
    """Start the processes and wait until they end."""
    command = [*commands.python_m("train"), *train_flags]
    environment = {
        processes.ADDRESS: children.free_addresses(1)[0],
        processes.COUNT: str(count),
    }

    group = children.Group(grace_s)
    with children.on_signals(group.stop):
        try:
            for number in range(count):
                log = workdir / f"process_{number}" / "output.log" if number else None
                if log:
                    log.parent.mkdir(parents=True, exist_ok=True)
                env = os.environ | environment | {processes.ID: str(number)}
                group.start(command, env, log)
            return group.wait()
        finally:
            group.kill()


def launch_elastic(
    train_flags: Sequence[str],
    workdir: pathlib.Path,
    count: int,
    restarts: bool,
    grace_s: float,
    num_processes: int = 1,
    via: str | None = None,
) -> int:
    """Start every region as a separate run, and wait until they end."""
    command = [*commands.python_m("train"), *train_flags]
    regions = children.make_regions(command, workdir, count, via, num_processes)
    asked_s: list[float] = []

    def stop(_: int) -> None:
        number = signal.SIGKILL if asked_s else signal.SIGTERM
        asked_s.append(time.monotonic())
        for region in regions:
            region.send(number)

    with children.on_signals(stop):
        for region in regions:
            region.start()
            if asked_s:  # A request to stop came while it was started.
                region.send(signal.SIGTERM)
        return children.wait(
            regions,
            lambda: restarts and not asked_s,
            lambda: asked_s[0] + grace_s if asked_s else math.inf,
        )


def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit code."""
    values = program.own_flags(*OWN_FLAGS, regions=1, processes=1, grace_s=0)
    train.define()
    with flags.usage_errors():
        train_flags = program.parse(values, argv, __doc__)
        if values.regions:
            flags.parse([argv[0], *train_flags])
            if flags.given("regions"):
                raise ValueError(
                    f"regions={flags.value('regions')} after -- is decided before it, "
                    f"by --regions={values.regions}; leave one out"
                )
            train_flags.append(f"--regions={values.regions}")

        # Parsed here too, so that an error is printed once, before any process starts.
        flags.parse([argv[0], *train_flags])
        config, named = train.read_flags(says_plan=False)
        workdir = folder_here(named)  # Of the logs.
        if values.restart and not values.elastic:
            raise ValueError("restart=True goes with --elastic; processes end together")
        if values.elastic:
            check_elastic(config)
            num_regions = config.run.regions
            count = values.processes or num_regions
            if count % num_regions:
                raise ValueError(
                    f"processes={values.processes} with --elastic must be a multiple "
                    f"of regions={num_regions}, each of so many processes"
                )

            make_folder(workdir)
            train_flags.append(f"--workdir={named}")
            return launch_elastic(
                train_flags,
                workdir,
                count=num_regions,
                restarts=values.restart,
                grace_s=values.grace_s,
                num_processes=count // num_regions,
                via=flags.value("via"),
            )

        count = values.processes or config.run.regions
        processes.check_shares(config.run.regions, count, config.run.devices_per_region)
        make_folder(workdir)

    return launch(train_flags, workdir, count, values.grace_s)


cli = program.with_own_flags(main)

if __name__ == "__main__":
    cli()
