"""Kills regions while they train, and checks the records of the run.

The reference is the same training in one process without kills.
"""

import json
import math
import pathlib
import random
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from cocodc_jax.files import append_line, read_lines, read_table
from cocodc_jax.netlab import children
from cocodc_jax.network import goodput
from cocodc_jax.run.config import flags
from cocodc_jax.run.config.elastic_flags import NOT_ELASTIC
from cocodc_jax.run.taking_part import JOINS_FILE, SYNCS_FILE

from .. import commands

_POLL_S = 0.1
_SAY_S = 30.0
# Lives of a region in a row that end by themselves before the region takes part.
_VAIN_LIVES = 5
Return = tuple[int, float, float]  # Region, time of a kill, time of its next return.
KILLS_FILE = "kills.jsonl"
ENDS_FILE = "ends.jsonl"


def lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the lines of a file, without incomplete ones that a kill left."""
    return read_lines(path, dict, skips_damaged=True)


class RefusedError(Exception):
    """A region cannot run: it refuses its flags, or ends again and again."""


class Chaos:
    """The regions of a run, which it kills and restarts."""

    def __init__(self, workdir: pathlib.Path, regions: Sequence[children.Region]):
        self._workdir = workdir
        self.regions = list(regions)
        self.kills = lines(workdir / KILLS_FILE)
        self.ends = lines(workdir / ENDS_FILE)
        self.is_stopped = False
        self._vain = [0] * len(self.regions)

    def stop(self, _: int = 0) -> None:
        """Ask all regions to write checkpoints and leave; for signal handlers."""
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
        folders = (self._workdir / f"region_{r}" for r in range(len(self.regions)))
        syncs = (lines(folder / SYNCS_FILE) for folder in folders)
        return max(
            (of_region[-1]["apply_step"] for of_region in syncs if of_region), default=0
        )

    def run(
        self,
        num: int,
        last_step: int,
        seed: int,
        gap_s: float,
        restart_s: float,
        only_members: bool = True,
    ) -> None:
        """Kill and restart regions, then wait until all have ended."""
        # If the run was stopped, draw other numbers than for the kills before.
        rng = random.Random(f"{seed} {len(self.kills)}")
        self.born_s = {}
        said_s = time.time()

        for region in range(len(self.regions)):
            self._start(region)
        start_at: dict[int, float] = {}

        next_kill = None
        while not self._is_over():
            now = time.time()
            if now - said_s > _SAY_S:
                said_s = now
                done = f"{len(self.kills)} kills, step {self.step()}"
                print(done, file=sys.stderr, flush=True)

            if self.is_stopped:
                time.sleep(_POLL_S)
                continue

            for region in [r for r, at in start_at.items() if at <= now]:
                del start_at[region]
                self._start(region)

            for region, process in enumerate(self.regions):
                if process.code == flags.USAGE_ERROR:
                    self._kill_all()
                    raise RefusedError(f"region {region} {process.end()}")
                if process.code not in (None, 0) and region not in start_at:
                    self._ended_by_itself(region)
                    start_at[region] = now + restart_s

            inside = [r for r in range(len(self.regions)) if self.is_in(r)]
            are_in = len(inside) == len(self.regions)
            if next_kill is None and are_in:
                next_kill = now + rng.uniform(0.2, 1.8) * gap_s

            is_due = next_kill is not None and now >= next_kill
            if is_due and len(self.kills) < num and (are_in or not only_members):
                alive = [r for r, x in enumerate(self.regions) if x.is_running]
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
            return not any(region.is_running for region in self.regions)
        return all(region.code == 0 for region in self.regions)

    def _start(self, region: int) -> None:
        self.born_s[region] = time.time()
        self.regions[region].start()
        if self.is_stopped:  # A request to stop came while it was started.
            self.regions[region].send(signal.SIGTERM)

    def _ended_by_itself(self, region: int) -> None:
        took_part = self._took_part(region)
        how = self.regions[region].end()
        end = {"region": region, "took_part": took_part, "ended": how}
        self.ends.append(end)
        append_line(self._workdir / ENDS_FILE, end)
        print(f"region {region} by itself {how}", file=sys.stderr)

        self._vain[region] = 0 if took_part else self._vain[region] + 1

        if self._vain[region] == _VAIN_LIVES:
            self._kill_all()
            raise RefusedError(
                f"region {region} ended {_VAIN_LIVES} times before it took part: at "
                f"last it {how}"
            )

    def _kill_all(self) -> None:
        for region in self.regions:
            region.send(signal.SIGKILL)
            region.wait()

    def _kill(self, region: int, was_in: bool) -> None:
        folder = self._workdir / f"region_{region}"
        last = lines(folder / JOINS_FILE)[-1:] + lines(folder / SYNCS_FILE)[-1:]
        epoch = max((line["epoch"] for line in last), default=0)

        self.regions[region].send(signal.SIGKILL)
        self.regions[region].wait()
        kill = {
            "region": region,
            "was_in": was_in,
            "coordinated": was_in and epoch % len(self.regions) == region,
            "after_step": self.step(),
            "time": time.time(),
        }
        self.kills.append(kill)
        append_line(self._workdir / KILLS_FILE, kill)
        line = json.dumps(kill)
        print(f"killed region {region} {line}", file=sys.stderr, flush=True)


def judge(
    workdir: pathlib.Path,
    num_regions: int,
    steps: int,
    kills: Sequence[dict[str, Any]],
    seconds: float,
    dead_after_s: float,
) -> dict[str, Any]:
    """Return the results of a run from its records."""
    done = 0
    gaps = 0
    digests: dict[tuple[int, int], dict[str, list[int]]] = {}
    losses = []
    joins = []
    unexplained: list[str] = []

    for region in range(num_regions):
        folder = workdir / f"region_{region}"
        records = lines(folder / "metrics.jsonl")
        trained = [r["step"] for r in records if r["kind"] == "train"]
        own_joins = lines(folder / JOINS_FILE)
        begun = {join["step"] for join in own_joins}
        joins += [{"region": region, **join} for join in own_joins]
        done += len(set(trained))

        for before, after in zip([0, *trained], trained, strict=False):
            if after != before + 1:
                gaps += 1
                if after - 1 not in begun or after <= before:
                    unexplained.append(f"region {region}: step {before} to {after}")

        for sync in lines(folder / SYNCS_FILE):
            if sync.get("regions") == []:
                continue  # It was asked to stop, and did not wait for the mean.
            key = (sync["fragment"], sync["start_step"])
            by_digest = digests.setdefault(key, {})
            by_digest.setdefault(sync["digest"], []).append(region)

        if (folder / "summary.json").exists():
            losses.append(read_table(folder / "summary.json")["eval_loss_outer"])

    num_compared = 0
    differ = {}
    for key, by_digest in digests.items():
        num_compared += sum(map(len, by_digest.values())) > 1
        if len(by_digest) > 1:
            differ[str(key)] = by_digest

    back = [j for j in joins if j["from_peer"]]
    returns = _returns(kills, back)
    to_return = sorted(round(back_at - at, 1) for _, at, back_at in returns)

    return {
        "kills": len(kills),
        "kills_of_coordinator": sum(k["coordinated"] for k in kills),
        "kills_of_regions_not_in": sum(not k["was_in"] for k in kills),
        "returns": len(back),
        "seconds_from_kill_to_return": to_return,
        "seconds_let_in": sorted(round(j["seconds"]["let_in"], 2) for j in back),
        "regions_at_the_end": len(losses),
        "gaps_in_steps": gaps,
        "gaps_unexplained": unexplained,
        "merges_compared": num_compared,
        "merges_that_differ": differ,
        "eval_loss_outer": losses,
        "goodput": done / (num_regions * steps),
        "goodput_simulated": simulated_goodput(
            _outages(returns), num_regions * seconds, dead_after_s
        ),
    }


def simulated_goodput(
    outages: Sequence[float], all_s: float, dead_after_s: float
) -> float | None:
    """Return the predicted share of steps for failures as frequent and long as these.

    Args:
      outages: seconds from each kill of a region that takes part to its return.
      all_s: the sum of the seconds of all regions.
      dead_after_s: seconds that the others wait for a silent region.

    >>> simulated_goodput([8.0], all_s=40, dead_after_s=0)
    0.8
    >>> simulated_goodput([8.0], all_s=40, dead_after_s=10)
    1.0
    """
    down_s = sum(outages)
    if not outages or down_s >= all_s:
        return None

    num = len(outages)
    waits = [min(outage, dead_after_s) for outage in outages]
    failures = goodput.Failures((all_s - down_s) / num, down_s / num)
    return goodput.of_steps(failures, sum(waits) / num)


def _outages(returns: Sequence[Return]) -> list[float]:
    """Return the seconds of each time that a region was down.

    A region that is killed again before it returns is down once, from its first kill.
    """
    began: dict[tuple[int, float], float] = {}
    for region, at, back_at in returns:
        began[region, back_at] = min(at, began.get((region, back_at), math.inf))
    return [back_at - at for (_, back_at), at in began.items()]


def _returns(kills: Sequence[dict], back: Sequence[dict]) -> list[Return]:
    """Return the returns of the regions that came back after a kill."""
    returns = []
    for kill in kills:
        region = kill["region"]
        at = kill["time"]
        later = [j["time"] for j in back if j["region"] == region and j["time"] > at]
        if later:
            returns.append((region, at, min(later)))
    return returns


def is_good(result: dict[str, Any], num_regions: int, tolerance: float) -> bool:
    """Return whether a run had all requested kills and passes all checks."""
    unbroken = result.get("unbroken_loss")
    losses = result["eval_loss_outer"]
    return (
        result["kills"] >= result["kills_asked"]
        and not result["gaps_unexplained"]
        and not result["merges_that_differ"]
        and result["regions_at_the_end"] == num_regions
        and (unbroken is None or all(abs(x - unbroken) <= tolerance for x in losses))
    )


def unbroken_flags(train_flags: Sequence[str]) -> list[str]:
    """Return the flags of the same training in one process, without paced steps."""
    # The last value of a flag counts; elastic flags have no meaning in one process.
    unset = [f"--{name}={value}" for name, value in vars(NOT_ELASTIC).items()]
    return [*train_flags, *unset, "--exchange=outer", "--step_seconds=0"]


def unbroken_loss(train_flags: Sequence[str], workdir: pathlib.Path) -> float:
    """Train in one process with all regions; return the outer parameters' loss."""
    command = [*commands.python_m("train"), *unbroken_flags(train_flags)]
    log = workdir / "output.log"
    workdir.mkdir(parents=True, exist_ok=True)
    print(f"the unbroken run trains first; {log}", file=sys.stderr, flush=True)

    code = children.run([*command, f"--workdir={workdir}"], log=log)
    if code or not (workdir / "summary.json").exists():
        lines = children.said(log)
        last = lines[-1].removeprefix("error: ") if lines else "it printed nothing"
        raise ValueError(f"the unbroken run ended with {code}: {last}")

    return read_table(workdir / "summary.json")["eval_loss_outer"]
