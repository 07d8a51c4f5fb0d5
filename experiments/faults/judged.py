"""What became of a story of faults: checks of the records, and a page on them."""

import json
import pathlib
import signal
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cocodc_jax.run.exits import STOPPED
from cocodc_jax.run.taking_part import JOINS_FILE, SYNCS_FILE

from .kills import lines
from .plans import Plan

# How a region ends that is asked to stop; the latter if it was still starting.
_STOPS = (STOPPED, 128 + signal.SIGTERM)


def judge(plan: Plan, folders: Sequence[pathlib.Path]) -> dict[str, Any]:
    """Return the records' results: merges that were compared, steps that were done."""
    merges: dict[tuple, dict[str, list[str]]] = {}
    steps = []
    for folder in folders:
        for sync in lines(folder / SYNCS_FILE):
            if not sync["regions"]:
                continue  # It was asked to stop, and did not wait for the mean.
            key = (sync["fragment"], sync["start_step"])
            if plan.least <= plan.regions // 2:  # Both parts of a cut may go on.
                key += tuple(sync["regions"])
            by_digest = merges.setdefault(key, {})
            by_digest.setdefault(sync["digest"], []).append(folder.name)

        trained = lines(folder / "metrics.jsonl")
        steps.append(len({line["step"] for line in trained if line["kind"] == "train"}))

    joins = [join for folder in folders for join in lines(folder / JOINS_FILE)]
    num_compared = 0
    differ = {}
    for key, by_digest in merges.items():
        num_compared += sum(map(len, by_digest.values())) > 1
        if len(by_digest) > 1:
            differ[str(key)] = by_digest

    return {
        "merges_compared": num_compared,
        "merges_that_differ": differ,
        "steps_done": steps,
        "last_step": max((max_step(folder) for folder in folders), default=0),
        "returns_from_a_peer": sum(join["from_peer"] for join in joins),
        "returns_with_own_work": sum(join["carried"] for join in joins),
    }


def max_step(folder: pathlib.Path) -> int:
    """Return the last step that a region has merged at."""
    syncs = lines(folder / SYNCS_FILE)
    return max((sync["apply_step"] for sync in syncs), default=0)


def is_good(result: Mapping[str, Any]) -> bool:
    """Return whether a run passed all checks."""
    return (
        not result["merges_that_differ"]
        and not result["hangs"]
        and not result["two_lives"]
        and len(result["faults"]) == result["planned"]
        and all(stop["code"] in _STOPS for stop in result["stops"])
    )


def report(result: Mapping[str, Any]) -> str:
    """Return a report on a run, in Markdown."""
    plan = result["plan"]
    way = "a folder" if plan["via"] else "sockets"
    rows = [
        "| fault | number | seconds it lasted | seconds until all merge again: median, "
        "most |",
        "| --- | --- | --- | --- |",
    ]

    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for fault in result["faults"]:
        by_kind.setdefault(_row(fault), []).append(fault)

    for kind, faults in by_kind.items():
        merged_after = [fault["merged_after_s"] for fault in faults]
        after = [seconds for seconds in merged_after if seconds is not None]
        lasted = [fault["lasted_s"] for fault in faults]
        median = f"{statistics.median(after):.1f}" if after else "none"
        most = f"{max(after):.1f}" if after else "none"
        lasted_s = f"{min(lasted):.1f} to {max(lasted):.1f}"
        rows.append(f"| {kind} | {len(faults)} | {lasted_s} | {median}, {most} |")

    stops = [stop.get("seconds") for stop in result["stops"]]
    codes = sorted({str(stop["code"]) for stop in result["stops"]})
    done = sum(result["steps_done"])
    last = result["last_step"]
    share = done / max(plan["regions"] * last, 1)
    last_stop_s = max(filter(None, stops), default=0)
    bullets = [
        f"{len(result['faults'])} of {result['planned']} faults of seed "
        f"{plan['seed']}, {plan['regions']} regions over {way}, "
        f"{result['seconds']:.0f} s on {result['cores']} cores.",
        f"{result['merges_compared']} merges were compared between regions; "
        f"{len(result['merges_that_differ'])} differ.",
        f"{len(result['hangs'])} times not all regions merged again within "
        f"{plan['hang_s']:g} s.",
        f"{len(result['two_lives'])} times two lives of one region both lived on.",
        f"{result['returns_from_a_peer']} returns from a peer's memory, of which "
        f"{result['returns_with_own_work']} with the region's own work. "
        f"{done} of {plan['regions'] * last} steps were done ({share:.3f}); the others "
        "are those of regions that were down or cut off.",
        f"Asked to stop, the regions ended within {last_stop_s} "
        f"s, with {', '.join(codes)}.",
    ]

    lists = [f"- {line}" for line in bullets]
    for fault in (*result["hangs"], *result["two_lives"]):
        lists.append(f"- not mended: `{json.dumps(fault)}`")
    for end in result["ended_by_themselves"]:
        lists.append(f"- ended by itself: `{json.dumps(end)}`")

    verdict = "held" if result["held"] else "NOT held"
    if not result["held"] and is_good({**result, "planned": len(result["faults"])}):
        verdict = "held until it was stopped"
    head = [f"# Chaos: what is promised {verdict}", "", f"    {result['command']}", ""]

    return "\n".join([*head, *lists, "", *rows, ""])


def _row(fault: Mapping[str, Any]) -> str:
    """Return the row of the report's table that a fault belongs to."""
    with_detail = fault["kind"] in ("cut", "folder")
    return f"{fault['kind']}, {fault['detail']}" if with_detail else fault["kind"]
