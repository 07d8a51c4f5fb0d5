r"""Kills elastic regions at random moments while they train, and checks the run.

    python -m experiments.chaos --regions=3 --kills=8 --seed=0 --workdir=DIR -- \
        --preset=smoke --steps=600 --eval_batches=6 --step_seconds=0.2

Every region trains in a process of its own (`--exchange=elastic`). Repeatedly a random
region is sent SIGKILL, and restarted once all others take part again. With
`--noonly_members` regions that are still starting are killed too, as long as another
one takes part and has the run in memory. Then the records must show that

- survivors did every step: a region's steps have gaps only while it was dead;
- outer parameters were equal, bit for bit, in all regions after every merge;
- every killed region returned, and all reached the end;
- the last loss is near that of a run of one process without kills.

A region that ends by itself is restarted too, and reported. The result is printed, with
the goodput that `network.goodput` predicts, and written to DIR/chaos.json. Goodput is
the share of all regions' steps that were done: while the others wait for a killed
region (up to `--dead_after_s`), no region misses a step. Ctrl-C or SIGTERM stops all
regions with checkpoints, and the same command resumes with the remaining kills.

With `--scenario` the network has a temporary fault instead, which the regions must name
within five syncs (`faults/scenarios.py`).

    python -m experiments.chaos --plan=experiments/faults/sockets.toml \
        --workdir=DIR -- --preset=smoke --steps=100000 --step_seconds=0.1

With `--plan` a file sets the number of faults of each kind: kills, freezes, cuts of the
network (for root), clocks that jump, damage to the folder of `--via`, and second lives
of a region (`faults/plans.py` has the format). Its seed draws their order and times. A
plan may name another program that trains a region: `experiments/faults/plain_loop.toml`
names a plain Optax loop with `cc.RegionSync`. After each fault all regions must merge
with one another again. At the end all are asked to stop; outer parameters must have
been equal after every merge, and DIR/report.md is a report.
"""

import math
import os
import pathlib
import sys
import time
from collections.abc import Sequence

from absl.flags import FlagValues

from cocodc_jax.files import append_line, write_whole
from cocodc_jax.netlab import LabError, children
from cocodc_jax.run.build import check_elastic
from cocodc_jax.run.config import flags
from cocodc_jax.run.config.train_config import TrainConfig, dumps
from cocodc_jax.run.resume import make_folder

from . import commands, program
from .faults import judged, plans, scenarios, story
from .faults.kills import Chaos, RefusedError, is_good, judge, lines, unbroken_loss

# No kills after this share of the steps: the last region to return needs time.
_LAST_KILL = 0.85
PARTS_FILE = "parts.jsonl"

# Flags that have a meaning only with or only without --scenario.
_OF_KILLS = ("kills", "gap_s", "restart_s", "tolerance", "unbroken", "only_members")
_OF_SCENARIOS = ("at_s", "fault_s")
OWN_FLAGS = (
    ("regions", 4, "regions that train"),
    ("kills", 8, "how many times to kill a region"),
    ("seed", 0, "seed of the choice of regions and moments"),
    ("gap_s", 8.0, "seconds between two kills, on average"),
    ("restart_s", 1.0, "seconds after which a killed region is restarted"),
    ("tolerance", 0.1, "largest difference from the unbroken run's loss, in nats"),
    (
        "scenario",
        (None, *scenarios.SCENARIOS),
        "a fault of the network in place of kills",
    ),
    (
        "at_s",
        20.0,
        "with --scenario: seconds from the first merge that all regions have to the "
        "fault",
    ),
    ("fault_s", 60.0, "with --scenario: seconds that the fault lasts"),
    ("plan", pathlib.Path, "file (TOML) with the faults of a run, in place of kills"),
    ("workdir", pathlib.Path, "folder of the run"),
    ("unbroken", True, "also train a run without kills"),
    ("only_members", True, "wait with a kill until all regions take part"),
)


def check_own(values: FlagValues) -> None:
    """Refuse numbers out of range, and flags that would have no effect."""
    if values.plan:
        for name in ("regions", "seed", "scenario", *_OF_KILLS, *_OF_SCENARIOS):
            if values[name].present:
                raise ValueError(
                    f"--{name}={str(values[name].value).lower()} has no meaning with "
                    "--plan; say it in the plan, or leave it out"
                )
        return

    for name in ("gap_s", "restart_s", "tolerance", "at_s", "fault_s"):
        number = getattr(values, name)
        if not 0 <= number < math.inf:
            raise ValueError(f"--{name}={number} must be 0 or more, and finite")

    if values.kills < 0:
        raise ValueError(f"--kills={values.kills} must be 0 or more")
    if values.kills and values.regions < 2 and not values.scenario:
        raise ValueError(
            f"regions={values.regions} leaves no region when one is killed; use 2 or "
            "more, or --kills=0"
        )

    unused = _OF_KILLS if values.scenario else _OF_SCENARIOS
    why = "with" if values.scenario else "without"
    for name in unused:
        if values[name].present:
            raise ValueError(
                f"--{name}={str(values[name].value).lower()} has no meaning {why} "
                "--scenario; leave it out"
            )


def main(argv: Sequence[str]) -> int:
    """Run the program; return 0 if the run passes all checks."""
    values = program.own_flags(*OWN_FLAGS)
    flags.define()
    with flags.usage_errors():
        train_flags = program.parse(values, argv, __doc__)
        if not values.workdir:
            raise ValueError("workdir=None is missing; name a folder")
        check_own(values)
        workdir = pathlib.Path(values.workdir)

        if values.plan:
            plan = checked_plan(values.plan, argv[0], train_flags, workdir)
            return follow(plan, argv, train_flags, workdir)

        if values.scenario:
            scenarios.check(values.scenario, values.regions, workdir)
        flags.parse([argv[0], *train_flags])
        of_sockets = ("via",) if values.scenario else ()  # The lab has no folder.
        flags.check_not_given(
            ("regions", "workdir"), nowhere=("log_every", *of_sockets)
        )
        train_flags += [f"--regions={values.regions}", "--log_every=1"]
        flags.parse([argv[0], *train_flags])
        config = flags.config()
        check_elastic(config)
        make_folder(workdir)

    if values.scenario:
        try:
            with flags.usage_errors():
                result = scenarios.run(values, config, train_flags, workdir)
        except LabError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1

        if result["exit_code"] <= 128:  # Else it was stopped, and may go on.
            write_whole(workdir / scenarios.RESULT_FILE, dumps(result))
        print(dumps(result), end="")
        return 0 if result["named"] else 1

    return wreck(values, config, train_flags, workdir)


def checked_plan(
    path: str, name: str, train_flags: list[str], workdir: pathlib.Path
) -> plans.Plan:
    """Return the plan; refuse one that does not fit the training's flags."""
    plan = plans.read(path)
    plan.check_possible()
    if (workdir / story.RESULT_FILE).exists():
        raise ValueError(
            f"workdir={str(workdir)!r} has the result of a plan; name another folder "
            "or delete it"
        )
    if plan.program:  # Its flags are its own.
        make_folder(workdir)
        return plan

    flags.parse([name, *train_flags])
    of_plan = ("regions", "via", "dead_after_s", "min_regions", "outer_digests")
    flags.check_not_given(("workdir",), nowhere=("log_every", *of_plan))
    flags.parse([name, *train_flags, f"--regions={plan.regions}"])
    check_elastic(flags.config())
    make_folder(workdir)

    return plan


def follow(
    plan: plans.Plan, argv: Sequence[str], train_flags: list[str], workdir: pathlib.Path
) -> int:
    """Run the plan's story; return 0 if all its checks passed."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(workdir / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    command = commands.command_line("chaos", argv[1:])
    try:
        result = story.run(plan, train_flags, workdir, command)
    except (RefusedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    print(judged.report(result), end="")
    return 0 if result["held"] else 1


def wreck(
    values: FlagValues,
    config: TrainConfig,
    train_flags: list[str],
    workdir: pathlib.Path,
) -> int:
    """Run the training with its kills or fault; return 0 if all checks passed."""
    loss = None
    if values.unbroken:  # It goes on, or is there already.
        with flags.usage_errors():
            loss = unbroken_loss(train_flags, workdir / "unbroken")

    train = [*commands.python_m("train"), *train_flags, "--outer_digests"]
    train.append(f"--workdir={workdir}")
    regions = children.make_regions(train, workdir, values.regions, flags.value("via"))
    chaos = Chaos(workdir, regions)
    # Each life compiles the same programs.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(workdir / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    began_s = time.time()

    steps = config.run.steps
    try:
        with children.on_signals(chaos.stop):
            chaos.run(
                num=values.kills,
                last_step=int(_LAST_KILL * steps),
                seed=values.seed,
                gap_s=values.gap_s,
                restart_s=values.restart_s,
                only_members=values.only_members,
            )
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        return flags.USAGE_ERROR

    append_line(workdir / PARTS_FILE, {"seconds": time.time() - began_s})
    if chaos.is_stopped:
        print(f"stopped after {len(chaos.kills)} kills; the same command resumes")
        return flags.STOPPED

    seconds = sum(part["seconds"] for part in lines(workdir / PARTS_FILE))
    result = {
        **judge(
            workdir,
            values.regions,
            steps,
            chaos.kills,
            seconds,
            flags.elastic().dead_after_s,
        ),
        "kills_asked": values.kills,
        "unbroken_loss": loss,
        "seconds": seconds,
        "regions": values.regions,
        "steps": steps,
        "seed": values.seed,
        "flags": train_flags,
        "each_kill": chaos.kills,
        "ended_by_themselves": chaos.ends,
    }
    result["kept"] = is_good(result, values.regions, values.tolerance)
    write_whole(workdir / "chaos.json", dumps(result))
    print(dumps(result), end="")

    return 0 if result["kept"] else 1


cli = program.with_own_flags(main)

if __name__ == "__main__":
    cli()
