r"""Kills regions that are jobs of their own, at random moments, and checks the run.

    python -m experiments.chaos --regions=3 --kills=8 --seed=0 --workdir=DIR -- \
        --preset=smoke --steps=600 --step_seconds=0.2

Every region trains in a process of its own (`--exchange=jobs`). Again and again one of
them, whoever it is, is sent SIGKILL and started anew, but for one that takes part, so
that somebody has the run in memory. Then the records tell whether

- survivors did every step: a region's steps have gaps only where it was dead;
- outer parameters were the same, bit for bit, in all regions after every merge;
- every dead region came back, and all came to the end;
- the last loss is near that of a run of one process in which nobody died.

The result is printed and written to DIR/chaos.json. Goodput is the share of all
regions' steps that were done.
"""

import json
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags

from cocodc_jax.files import read_table, write_whole
from cocodc_jax.netlab import children, independent
from cocodc_jax.run import flags
from cocodc_jax.run.config import TrainConfig, dumps
from cocodc_jax.run.help import options, render
from cocodc_jax.run.jobs import JOINS_FILE, SYNCS_FILE

from . import commands
from .train import read_flags

# Nobody is killed after this share of the steps: the last to come back needs time.
_LAST_KILL = 0.7
_POLL_S = 0.1


def define_flags() -> absl_flags.FlagValues:
    """Return this program's flags, apart from those of the training."""
    values = absl_flags.FlagValues()
    for name, default, text in (
        ("regions", 4, "regions that train"),
        ("kills", 8, "how many times to kill a region"),
        ("seed", 0, "of who is killed and when"),
    ):
        absl_flags.DEFINE_integer(name, default, text, flag_values=values)
    for name, default, text in (
        ("gap_s", 8.0, "seconds between two kills, on average"),
        ("restart_s", 1.0, "seconds after which a dead region is started again"),
        ("tolerance", 0.1, "how far the loss may be from the unbroken run's, nats"),
    ):
        absl_flags.DEFINE_float(name, default, text, flag_values=values)
    absl_flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
    absl_flags.DEFINE_bool(
        "unbroken", True, "train a run in which nobody dies too", flag_values=values
    )
    absl_flags.DEFINE_bool("help", False, "print this and exit", flag_values=values)
    return values


def lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Read the whole lines of a file of JSON lines, none where there is no file.

    A line that was cut by a kill is passed over, with what came to stand behind it.
    """
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


class Chaos:
    """The regions of a run, and who kills them."""

    def __init__(self, workdir: pathlib.Path, regions: Sequence[independent.Region]):
        """Start nothing yet.

        Args:
          workdir: of the run.
          regions: not yet started.
        """
        self._workdir, self.regions = workdir, list(regions)
        self.kills: list[dict[str, Any]] = []

    def is_in(self, region: int) -> bool:
        """Tell whether the present life of a region takes part."""
        joins = lines(self._workdir / f"region_{region}" / JOINS_FILE)
        lives = self.regions[region]
        return lives.is_running and any(j["time"] > self.born_s[region] for j in joins)

    def step(self) -> int:
        """Return the furthest step that any region has merged at."""
        syncs = (
            lines(self._workdir / f"region_{r}" / SYNCS_FILE)
            for r in range(len(self.regions))
        )
        return max((each[-1]["apply_step"] for each in syncs if each), default=0)

    def run(
        self, num: int, last_step: int, seed: int, gap_s: float, restart_s: float
    ) -> None:
        """Kill and start again, then wait until all have ended.

        Args:
          num: kills.
          last_step: after which nobody is killed.
          seed: of who and when.
          gap_s: seconds between two kills, on average.
          restart_s: seconds that the dead are left dead.
        """
        rng = random.Random(seed)
        self.born_s = {}
        for region in range(len(self.regions)):
            self._start(region)
        start_at: dict[int, float] = {}
        next_kill = None
        while any(r.is_running for r in self.regions) or start_at:
            now = time.time()
            for region in [r for r, at in start_at.items() if at <= now]:
                del start_at[region]
                self._start(region)
            for region, each in enumerate(self.regions):
                if each.code not in (None, 0) and region not in start_at:
                    start_at[region] = now + restart_s  # Ended badly by itself.
            inside = [r for r in range(len(self.regions)) if self.is_in(r)]
            if next_kill is None and len(inside) == len(self.regions):
                next_kill = now + rng.uniform(0.2, 1.8) * gap_s  # All have begun.
            if next_kill is not None and now >= next_kill and len(self.kills) < num:
                alive = [r for r, each in enumerate(self.regions) if each.is_running]
                victim = rng.choice(alive) if alive else None
                if victim is not None and set(inside) - {victim}:
                    if self.step() > last_step:
                        num = len(self.kills)
                        continue
                    self._kill(victim, victim in inside)
                    start_at[victim] = time.time() + restart_s
                    next_kill = now + rng.uniform(0.2, 1.8) * gap_s
            time.sleep(_POLL_S)

    def _start(self, region: int) -> None:
        self.born_s[region] = time.time()
        self.regions[region].start()

    def _kill(self, region: int, was_in: bool) -> None:
        folder = self._workdir / f"region_{region}"
        told = lines(folder / JOINS_FILE)[-1:] + lines(folder / SYNCS_FILE)[-1:]
        epoch = max((each["epoch"] for each in told), default=0)
        self.regions[region].send(signal.SIGKILL)
        process = self.regions[region].process
        assert process is not None
        process.wait()
        self.kills.append(
            {
                "region": region,
                "was_in": was_in,
                "coordinated": was_in and epoch % len(self.regions) == region,
                "after_step": self.step(),
                "time": time.time(),
            }
        )
        print(f"killed region {region} {self.kills[-1]}", file=sys.stderr, flush=True)


def judge(
    workdir: pathlib.Path, num_regions: int, steps: int, kills: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return what the records of a run say.

    Args:
      workdir: of the run.
      num_regions: M.
      steps: of the whole run.
      kills: of `Chaos`.
    """
    done, gaps, digests, losses, joins = 0, 0, {}, [], []
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
            key = sync["fragment"], sync["start_step"]
            found = digests.setdefault(key, {})
            found.setdefault(sync["digest"], []).append(region)
        if (folder / "summary.json").exists():
            losses.append(read_table(folder / "summary.json")["eval_loss_outer"])
    differ = {str(key): found for key, found in digests.items() if len(found) > 1}
    back = [j for j in joins if j["from_peer"]]
    return {
        "kills": len(kills),
        "kills_of_coordinator": sum(k["coordinated"] for k in kills),
        "kills_of_regions_not_in": sum(not k["was_in"] for k in kills),
        "returns": len(back),
        "seconds_from_kill_to_return": _until_back(kills, back),
        "seconds_let_in": sorted(round(j["seconds"]["let_in"], 2) for j in back),
        "regions_at_the_end": len(losses),
        "gaps_in_steps": gaps,
        "gaps_unexplained": unexplained,
        "merges_compared": sum(len(sum(f.values(), [])) > 1 for f in digests.values()),
        "merges_that_differ": differ,
        "eval_loss_outer": losses,
        "goodput": done / (num_regions * steps),
    }


def _until_back(kills: Sequence[dict], back: Sequence[dict]) -> list[float]:
    """Return the seconds from each kill to that region's next return."""
    found = []
    for kill in kills:
        later = [
            j["time"] - kill["time"]
            for j in back
            if j["region"] == kill["region"] and j["time"] > kill["time"]
        ]
        if later:
            found.append(round(min(later), 1))
    return sorted(found)


def unbroken_loss(train_flags: Sequence[str], workdir: pathlib.Path) -> float:
    """Train in one process with all regions; return the outer parameters' loss."""
    command = [*commands.python_m("train"), *train_flags]
    more = [f"--workdir={workdir}", "--exchange=outer", "--step_seconds=0"]
    done = subprocess.run([*command, *more], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"the unbroken run failed: {done.stderr.strip()}")
    return read_table(workdir / "summary.json")["eval_loss_outer"]


def is_good(result: dict[str, Any], num_regions: int, tolerance: float) -> bool:
    """Tell whether a run kept what is promised."""
    is_near = True
    if result.get("unbroken_loss") is not None:
        is_near = all(
            abs(loss - result["unbroken_loss"]) <= tolerance
            for loss in result["eval_loss_outer"]
        )
    return (
        not result["gaps_unexplained"]
        and not result["merges_that_differ"]
        and result["regions_at_the_end"] == num_regions
        and is_near
    )


def main(argv: Sequence[str]) -> int:
    """Run the program; returns 0 if the run kept what is promised."""
    own = define_flags()
    flags.define()
    with flags.usage_errors():
        train_flags = [*own(argv)[1:]]
        if own.help:
            print(render(commands.shown(__doc__), {"Flags": options(own)}))
            return 0
        if not own.workdir:
            raise ValueError("workdir=None must be a folder")
        train_flags += [f"--regions={own.regions}", "--log_every=1"]
        flags.parse([argv[0], *train_flags])
        config, _ = read_flags()
    workdir = pathlib.Path(own.workdir)
    return wreck(own, config, train_flags, workdir)


def wreck(own: Any, config: TrainConfig, train_flags: list[str], workdir) -> int:
    """Run it all; returns 0 if the run kept what is promised."""
    loss = None
    if own.unbroken:
        loss = unbroken_loss(train_flags, workdir / "unbroken")
    told = independent.commands(
        [*commands.python_m("train"), *train_flags, "--outer_digests"],
        workdir,
        own.regions,
    )
    logs = independent.logs(workdir, own.regions)
    chaos = Chaos(
        workdir, [independent.Region(*each) for each in zip(told, logs, strict=True)]
    )

    def stop(code: int) -> None:
        for region in chaos.regions:
            region.send(signal.SIGKILL)
        sys.exit(code)

    began_s, steps = time.time(), config.run.steps
    with children.on_signals(stop):
        chaos.run(
            own.kills, int(_LAST_KILL * steps), own.seed, own.gap_s, own.restart_s
        )
    result = {
        **judge(workdir, own.regions, steps, chaos.kills),
        "unbroken_loss": loss,
        "seconds": time.time() - began_s,
        "regions": own.regions,
        "steps": steps,
        "seed": own.seed,
        "flags": train_flags,
        "each_kill": chaos.kills,
    }
    result["kept"] = is_good(result, own.regions, own.tolerance)
    write_whole(workdir / "chaos.json", dumps(result))
    print(dumps(result), end="")
    return 0 if result["kept"] else 1


def cli() -> None:
    """Run the program as a command."""
    sys.exit(main(sys.argv))


if __name__ == "__main__":
    cli()
