r"""Kills elastic regions at random moments while they train, and checks the run.

    python -m experiments.chaos --regions=3 --kills=8 --seed=0 --workdir=DIR -- \
        --preset=smoke --steps=600 --step_seconds=0.2

Every region trains in a process of its own (`--exchange=elastic`). Repeatedly a random
region is sent SIGKILL, and restarted once all others take part again. With
`--noonly_members` regions that are still starting are killed too, as long as another
one takes part and has the run in memory. Then the records must show that

- survivors did every step: a region's steps have gaps only while it was dead;
- outer parameters were equal, bit for bit, in all regions after every merge;
- every killed region returned, and all reached the end;
- the last loss is near that of a run of one process without kills.

A region that ends by itself is restarted too, and reported. The result is printed and
written to DIR/chaos.json. Goodput is the share of all regions' steps that were done.
The prediction of `network.goodput` for the same times between kills and returns is
printed with it. Ctrl-C or SIGTERM stops all regions with checkpoints, and the same
command resumes with the remaining kills.

With `--scenario` no region is killed. Instead the network between the regions has a
fault for a while, and the regions must name it within five syncs
(`faults/scenarios.py`).
"""

import json
import os
import pathlib
import random
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from cocodc_jax.files import write_whole
from cocodc_jax.netlab import children
from cocodc_jax.run import flags
from cocodc_jax.run.build import check_elastic
from cocodc_jax.run.config import TrainConfig, dumps
from cocodc_jax.run.help import options, render
from cocodc_jax.run.resume import make_folder
from cocodc_jax.run.taking_part import JOINS_FILE, SYNCS_FILE

from . import commands
from .faults import scenarios
from .faults.killed import is_good, judge, lines
from .faults.options import check_kills, check_own, define_flags
from .faults.unbroken import unbroken_loss
from .train import read_flags

# No kills after this share of the steps: the last region to return needs time.
_LAST_KILL = 0.85
_POLL_S, _SAY_S = 0.1, 30.0
# Lives of a region in a row that end by themselves before the region takes part.
_VAIN_LIVES = 5
KILLS_FILE, PARTS_FILE, ENDS_FILE = "kills.jsonl", "parts.jsonl", "ends.jsonl"


class RefusedError(Exception):
    """A region cannot run: it refuses its flags, or ends again and again."""


class Chaos:
    """The regions of a run, which it kills and restarts."""

    def __init__(self, workdir: pathlib.Path, regions: Sequence[children.Region]):
        """Take the regions of the run in `workdir`, which are not started yet."""
        self._workdir, self.regions = workdir, list(regions)
        self.kills = lines(workdir / KILLS_FILE)
        self.ends = lines(workdir / ENDS_FILE)
        self.is_stopped = False
        self._vain = [0] * len(self.regions)

    def stop(self, code: int) -> None:
        """Ask all regions to write checkpoints and leave; for signal handlers."""
        del code
        number = signal.SIGKILL if self.is_stopped else signal.SIGTERM
        self.is_stopped = True
        for region in self.regions:
            region.send(number)

    def is_in(self, region: int) -> bool:
        """Return whether the present life of a region takes part."""
        return self.regions[region].is_running and self._took_part(region)

    def _took_part(self, region: int) -> bool:
        joins = lines(self._workdir / f"region_{region}" / JOINS_FILE)
        return any(join["time"] > self.born_s[region] for join in joins)

    def step(self) -> int:
        """Return the latest step at which any region has merged."""
        syncs = (
            lines(self._workdir / f"region_{r}" / SYNCS_FILE)
            for r in range(len(self.regions))
        )
        return max((each[-1]["apply_step"] for each in syncs if each), default=0)

    def run(
        self,
        num: int,
        last_step: int,
        seed: int,
        gap_s: float,
        restart_s: float,
        only_members: bool = True,
    ) -> None:
        """Kill and restart regions, then wait until all have ended.

        Raises:
          RefusedError: with the region's last output; the others are killed.
        """
        # If the run was stopped, draw other numbers than for the kills before.
        rng = random.Random(f"{seed} {len(self.kills)}")
        self.born_s, said_s = {}, time.time()
        for region in range(len(self.regions)):
            self._start(region)
        start_at: dict[int, float] = {}
        next_kill = None
        while not self._is_over():
            now = time.time()
            if now - said_s > _SAY_S:
                said_s = now
                print(
                    f"{len(self.kills)} kills, step {self.step()}",
                    file=sys.stderr,
                    flush=True,
                )
            if self.is_stopped:
                time.sleep(_POLL_S)
                continue
            for region in [r for r, at in start_at.items() if at <= now]:
                del start_at[region]
                self._start(region)
            for region, each in enumerate(self.regions):
                if each.code == flags.USAGE_ERROR:
                    self._kill_all()
                    raise RefusedError(f"region {region} ended with {each.end()}")
                if each.code not in (None, 0) and region not in start_at:
                    self._ended_by_itself(region)
                    start_at[region] = now + restart_s
            inside = [r for r in range(len(self.regions)) if self.is_in(r)]
            are_in = len(inside) == len(self.regions)
            if next_kill is None and are_in:
                next_kill = now + rng.uniform(0.2, 1.8) * gap_s
            is_due = next_kill is not None and now >= next_kill
            if is_due and len(self.kills) < num and (are_in or not only_members):
                alive = [r for r, each in enumerate(self.regions) if each.is_running]
                victim = rng.choice(alive) if alive else None
                if victim is not None and set(inside) - {victim}:
                    if self.step() > last_step:
                        num = len(self.kills)
                        continue
                    self._kill(victim, victim in inside)
                    start_at[victim] = time.time() + restart_s
                    next_kill = None
                    if not only_members:
                        next_kill = now + rng.uniform(0.2, 1.8) * gap_s
            time.sleep(_POLL_S)

    def _is_over(self) -> bool:
        if self.is_stopped:
            return not any(each.is_running for each in self.regions)
        return all(each.code == 0 for each in self.regions)

    def _start(self, region: int) -> None:
        self.born_s[region] = time.time()
        self.regions[region].start()
        if self.is_stopped:  # Told to while it was started.
            self.regions[region].send(signal.SIGTERM)

    def _ended_by_itself(self, region: int) -> None:
        took_part, told = self._took_part(region), self.regions[region].end()
        self.ends.append({"region": region, "took_part": took_part, "ended": told})
        self._write(ENDS_FILE, self.ends[-1])
        print(f"region {region} ended by itself with {told}", file=sys.stderr)
        self._vain[region] = 0 if took_part else self._vain[region] + 1
        if self._vain[region] == _VAIN_LIVES:
            self._kill_all()
            raise RefusedError(
                f"region {region} ended {_VAIN_LIVES} times before it took part, at "
                f"last with {told}"
            )

    def _write(self, name: str, entry: dict[str, Any]) -> str:
        line = json.dumps(entry)
        with (self._workdir / name).open("a") as file:
            file.write(line + "\n")
        return line

    def _kill_all(self) -> None:
        for region in self.regions:
            region.send(signal.SIGKILL)
            region.wait()

    def _kill(self, region: int, was_in: bool) -> None:
        folder = self._workdir / f"region_{region}"
        told = lines(folder / JOINS_FILE)[-1:] + lines(folder / SYNCS_FILE)[-1:]
        epoch = max((each["epoch"] for each in told), default=0)
        self.regions[region].send(signal.SIGKILL)
        self.regions[region].wait()
        self.kills.append(
            {
                "region": region,
                "was_in": was_in,
                "coordinated": was_in and epoch % len(self.regions) == region,
                "after_step": self.step(),
                "time": time.time(),
            }
        )
        line = self._write(KILLS_FILE, self.kills[-1])
        print(f"killed region {region} {line}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Run the program; return 0 if the run passes all checks."""
    own = define_flags()
    flags.define()
    with flags.usage_errors():
        train_flags = [*own(argv)[1:]]
        if own.help:
            print(render(commands.shown(__doc__), {"Flags": options(own)}))
            return 0
        if not own.workdir:
            raise ValueError("workdir=None is missing; name a folder")
        check_own(own)
        if own.scenario:
            scenarios.check_regions(own.scenario, own.regions)
            scenarios.check_folder(pathlib.Path(own.workdir))
        else:
            check_kills(own.kills, own.regions)
        flags.parse([argv[0], *train_flags])
        of_sockets = ("via",) if own.scenario else ()  # The lab has no folder.
        flags.check_not_given(
            ("regions", "workdir"), nowhere=("log_every", *of_sockets)
        )
        train_flags += [f"--regions={own.regions}", "--log_every=1"]
        flags.parse([argv[0], *train_flags])
        config, _ = read_flags()
        check_elastic(config)
        workdir = pathlib.Path(own.workdir)
        make_folder(workdir)
    if own.scenario:
        with flags.usage_errors():
            result = scenarios.run(own, config, train_flags, workdir)
        write_whole(workdir / scenarios.RESULT_FILE, dumps(result))
        print(dumps(result), end="")
        return 0 if result["named"] else 1
    return wreck(own, config, train_flags, workdir)


def wreck(own: Any, config: TrainConfig, train_flags: list[str], workdir) -> int:
    """Run the training with its kills or fault; return 0 if it passes all checks."""
    loss = None
    if own.unbroken:  # It goes on, or is there already.
        with flags.usage_errors():
            loss = unbroken_loss(train_flags, workdir / "unbroken")
    told = children.region_commands(
        [*commands.python_m("train"), *train_flags, "--outer_digests"],
        workdir,
        own.regions,
        flags.value("via") or "",
    )
    logs = children.region_logs(workdir, own.regions)
    # Each life compiles the same programs.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(workdir / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    chaos = Chaos(
        workdir, [children.Region(*each) for each in zip(told, logs, strict=True)]
    )
    began_s, steps = time.time(), config.run.steps
    last_step = int(_LAST_KILL * steps)
    try:
        with children.on_signals(chaos.stop):
            chaos.run(
                own.kills,
                last_step,
                own.seed,
                own.gap_s,
                own.restart_s,
                own.only_members,
            )
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        return flags.USAGE_ERROR
    seconds = time.time() - began_s
    if chaos.is_stopped:
        with (workdir / PARTS_FILE).open("a") as file:
            file.write(json.dumps({"seconds": seconds}) + "\n")
        print(f"stopped after {len(chaos.kills)} kills; the same command resumes")
        return 1
    seconds += sum(part["seconds"] for part in lines(workdir / PARTS_FILE))
    result = {
        **judge(workdir, own.regions, steps, chaos.kills, seconds),
        "kills_asked": own.kills,
        "unbroken_loss": loss,
        "seconds": seconds,
        "regions": own.regions,
        "steps": steps,
        "seed": own.seed,
        "flags": train_flags,
        "each_kill": chaos.kills,
        "ended_by_themselves": chaos.ends,
    }
    result["kept"] = is_good(result, own.regions, own.tolerance)
    write_whole(workdir / "chaos.json", dumps(result))
    print(dumps(result), end="")
    return 0 if result["kept"] else 1


def cli() -> None:
    """Run the program as a command."""
    commands.end_with(main)


if __name__ == "__main__":
    cli()
