"""Checks the records of a run in which regions were killed."""

import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from cocodc_jax.files import read_table
from cocodc_jax.network import goodput
from cocodc_jax.run.taking_part import JOINS_FILE, SYNCS_FILE


def lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Read the complete lines of a file of JSON lines; none if there is no file.

    A line that a kill cut short is skipped, with the text that was appended to it.
    """
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def judge(
    workdir: pathlib.Path,
    num_regions: int,
    steps: int,
    kills: Sequence[dict[str, Any]],
    seconds: float,
) -> dict[str, Any]:
    """Return the results of a run from its records."""
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
        "goodput_simulated": _simulated(kills, back, num_regions * seconds),
    }


def _simulated(
    kills: Sequence[dict], back: Sequence[dict], all_s: float
) -> float | None:
    """Return the predicted goodput for failures as frequent and long as these.

    A region that is killed again before it returns is down once, from its first kill.
    `all_s` is the sum of the seconds of all regions.
    """
    began: dict[tuple[int, float], float] = {}
    for region, at, back_at in _returns(kills, back):
        began[region, back_at] = min(at, began.get((region, back_at), math.inf))
    down_s = sum(back_at - at for (_, back_at), at in began.items())
    if not began or down_s >= all_s:
        return None
    failures = goodput.Failures((all_s - down_s) / len(began), down_s / len(began))
    return goodput.alone(failures, sync_s=0)


def _until_back(kills: Sequence[dict], back: Sequence[dict]) -> list[float]:
    """Return the seconds from each kill to that region's next return."""
    return sorted(round(then - at, 1) for _, at, then in _returns(kills, back))


def _returns(
    kills: Sequence[dict], back: Sequence[dict]
) -> Iterator[tuple[int, float, float]]:
    """Yield region, time and time of the next return of each kill that has one."""
    for kill in kills:
        region, at = kill["region"], kill["time"]
        later = [j["time"] for j in back if j["region"] == region and j["time"] > at]
        if later:
            yield region, at, min(later)


def is_good(result: dict[str, Any], num_regions: int, tolerance: float) -> bool:
    """Return whether a run had all requested kills and passes all checks."""
    is_near = True
    if result.get("unbroken_loss") is not None:
        is_near = all(
            abs(loss - result["unbroken_loss"]) <= tolerance
            for loss in result["eval_loss_outer"]
        )
    return (
        result["kills"] >= result["kills_asked"]
        and not result["gaps_unexplained"]
        and not result["merges_that_differ"]
        and result["regions_at_the_end"] == num_regions
        and is_near
    )
