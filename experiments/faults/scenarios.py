"""Faults in the network lab while elastic regions train, which they must name.

`chaos --scenario` runs one of them. Every region is a separate run in a network
namespace. The scenario changes the lab's links for some time, then they are as before:

    link        region 1 sends to region 2 at a 150th of the rate
    loss        region 1 loses a third of the packets that it sends to region 2
    cut         the last region neither sends to nor receives from any other
    partition   the two halves of the regions do not reach each other
    straggler   the last region's process is stopped for nine tenths of the time

The result compares this with each region's faults.jsonl: the faults that were named,
the seconds and syncs after which they were named, and any that were named before.
During a cut there are no syncs, so it counts those that would have taken place. A
region that was cut off must have returned at the end. `--at_s` counts from the first
merge that all regions have, so the start does not matter. The detector must learn usual
times before the fault, so leave it about ten syncs.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

from absl.flags import FlagValues

from cocodc_jax import netlab
from cocodc_jax.netlab import children
from cocodc_jax.netlab.shaper import Conditions
from cocodc_jax.network.links import Link, uniform
from cocodc_jax.run.config.train_config import TrainConfig
from cocodc_jax.run.fault_watch import FAULTS_FILE
from cocodc_jax.run.taking_part import SYNCS_FILE
from cocodc_jax.sync.schedules.slotted import Slotted

from .. import commands
from .kills import lines

RESULT_FILE = "scenario.json"
SCENARIOS = ("link", "loss", "cut", "partition", "straggler")
_PORT = 29500
# By which a message is late beyond the 0.3 s that count as noise.
_SLOW = 150
_LOSS = 0.33
# Seconds for which a straggler's process is stopped, and then runs: its heartbeats are
# late, and its steps take several times as long.
_STOPPED_S = 1.7
_RUNNING_S = 0.2
_POLL_S = 0.1


def check(scenario: str, num_regions: int, workdir: pathlib.Path) -> None:
    """Refuse too few regions, and a scenario that is finished already."""
    least = 3 if scenario in ("link", "loss") else 2
    if num_regions < least:
        raise ValueError(
            f"regions={num_regions} is too few for --scenario={scenario}; use {least} "
            "or more"
        )
    if (workdir / RESULT_FILE).exists():
        raise ValueError(
            f"workdir={str(workdir)!r} has the result of a scenario; name another "
            "folder or delete it"
        )


def expected(scenario: str, num_regions: int) -> tuple[set[tuple], set[int]]:
    """Return the findings of which one must be reported, and the regions that must."""
    everyone = set(range(num_regions))
    if scenario in ("link", "loss"):
        return {("link", (1, 2))}, everyone
    if scenario == "straggler":
        return {("slow", (num_regions - 1,))}, everyone

    apart = _apart(scenario, num_regions)
    lone = tuple(sorted(apart))
    kinds = {(kind, (r,)) for kind in ("silent", "gone") for r in apart}
    kinds |= {("region", lone), ("partition", lone)}

    return kinds, everyone - apart


def _apart(scenario: str, num_regions: int) -> set[int]:
    first = num_regions - 1 if scenario == "cut" else num_regions // 2
    return set(range(first, num_regions))


def disturbed(scenario: str, usual: Conditions, at_s: float, fault_s: float) -> tuple:
    """Return the conditions of the links over time."""
    if scenario == "straggler":
        return (usual,)
    rate = [list(row) for row in usual.rate_bps]
    loss = [list(row) for row in usual.loss]

    if scenario == "link":
        rate[1][2] /= _SLOW
    elif scenario == "loss":
        loss[1][2] = _LOSS
    else:
        apart = _apart(scenario, len(rate))
        for i, j in itertools.product(range(len(rate)), repeat=2):
            if (i in apart) != (j in apart):
                rate[i][j] = 0.0

    bad = dataclasses.replace(usual, start_s=at_s, rate_bps=rate, loss=loss)
    return usual, bad, dataclasses.replace(usual, start_s=at_s + fault_s)


def run(
    values: FlagValues, config: TrainConfig, train: Sequence[str], workdir: pathlib.Path
) -> dict[str, Any]:
    """Train in the lab with the fault; return the findings."""
    scenario = values.scenario
    num_regions = values.regions
    sync = config.method.build().sync
    if sync is None or not isinstance(sync.schedule, Slotted):
        raise ValueError(
            f"method={config.method.method!r} has no schedule by which to count syncs"
        )

    sync_s = sync.schedule.slot_steps * config.run.step_seconds
    if not sync_s:
        raise ValueError(
            "step_seconds=0 must be above 0, to count syncs by the time of a step"
        )
    if missing := netlab.missing():
        raise ValueError(
            f"scenario={scenario!r} needs the network lab: {'; '.join(missing)}"
        )

    children.make_key(workdir)
    addresses = ",".join(f"region{r}:{_PORT}" for r in range(num_regions))
    command = [
        *commands.python_m("train"),
        *train,
        f"--workdir={workdir}",
        "--exchange=elastic",
        f"--region_addresses={addresses}",
        "--region_id={region}",
        f"--key_file={workdir / 'key'}",
    ]
    topology = uniform(num_regions, Link(bandwidth_gbps=0.1, latency_s=0.02))
    plan = netlab.make_plan(topology, command, workdir / "lab", seed=values.seed)
    over_time = disturbed(scenario, plan.conditions[0], values.at_s, values.fault_s)
    begun = _Begun(workdir, num_regions)

    def act() -> None:
        begun.wait()
        if scenario == "straggler":
            at = begun.time + values.at_s
            _straggle(workdir, num_regions - 1, at, values.fault_s, begun)

    # The fault begins when all regions have merged.
    acting = threading.Thread(target=act, daemon=True)
    acting.start()
    plan = dataclasses.replace(plan, conditions=over_time, changes_path=begun.path)
    code = netlab.run(plan)
    begun.ended.set()
    acting.join()

    at = begun.time + values.at_s
    findings = judge(scenario, workdir, num_regions, at, sync_s, begun.launched)
    result = {"scenario": scenario, "exit_code": code, **findings}

    return {**result, "named": is_good(result)}


class _Begun:
    """Waits until all regions have merged the same sync, and then writes a file."""

    def __init__(self, workdir: pathlib.Path, num_regions: int):
        self._folders = [workdir / f"region_{r}" for r in range(num_regions)]
        self.path = workdir / "begun"
        self.path.unlink(missing_ok=True)
        self.launched = time.time()  # Wall-clock time.
        self.time = float("inf")  # Of the merge.
        self.ended = threading.Event()  # Set when the run is over, so that waits end.

    def wait(self) -> None:
        """Wait until the merge, or until the run is over."""
        while not self.ended.wait(_POLL_S):
            merged = [
                {
                    (sync["fragment"], sync["start_step"])
                    for sync in lines(folder / SYNCS_FILE)
                    if sync["time"] > self.launched
                }
                for folder in self._folders
            ]
            if set.intersection(*merged):
                self.time = time.time()
                self.path.touch()
                return


def _straggle(
    workdir: pathlib.Path, region: int, at: float, fault_s: float, run: _Begun
) -> None:
    """Stop and continue a region's process repeatedly, from `at` for `fault_s`."""
    if run.ended.wait(min(max(at - time.time(), 0.0), threading.TIMEOUT_MAX)):
        return
    wanted = {f"--workdir={workdir}", f"--region_id={region}"}
    end = time.monotonic() + fault_s
    while time.monotonic() < end and not run.ended.is_set():
        _send_all(wanted, signal.SIGSTOP)
        run.ended.wait(_STOPPED_S)
        _send_all(wanted, signal.SIGCONT)
        run.ended.wait(_RUNNING_S)


def _send_all(arguments: set[str], number: signal.Signals) -> None:
    """Send a signal to the processes of this machine with these arguments."""
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if arguments <= set(path.read_text().split("\0")):
                os.kill(int(path.parent.name), number)


def judge(
    scenario: str,
    workdir: pathlib.Path,
    num_regions: int,
    at: float,
    sync_s: float,
    launched: float = 0.0,
) -> dict[str, Any]:
    """Return the findings of the regions, with their times."""
    wanted, seeing = expected(scenario, num_regions)
    after_s = {}
    syncs = {}
    before = []

    for region in range(num_regions):
        folder = workdir / f"region_{region}"
        for line in lines(folder / FAULTS_FILE):
            finding = (line["kind"], tuple(line["where"]))
            time_s = line["time"]
            if time_s < launched or line["fault"] != "begins":
                continue

            if time_s < at:
                before.append([region, *finding])
            elif finding in wanted and region in seeing - after_s.keys():
                after_s[region] = round(time_s - at, 1)
                syncs[region] = round(after_s[region] / sync_s, 1)
                if scenario not in ("cut", "partition"):
                    merged = lines(folder / SYNCS_FILE)
                    syncs[region] = sum(at < x["time"] <= time_s for x in merged)

    return {
        "seconds_to_name": after_s,
        "syncs_to_name": syncs,
        "named_before": before,
        "unseen_by": sorted(seeing - after_s.keys()),
    }


def is_good(result: dict[str, Any]) -> bool:
    """Return whether all regions that see the fault named it within five syncs."""
    return (
        not result["exit_code"]
        and not result["unseen_by"]
        and not result["named_before"]
        and all(syncs <= 5 for syncs in result["syncs_to_name"].values())
    )
