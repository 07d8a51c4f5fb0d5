"""Timeline of a run: when it computed, waited and had fragments in flight.

Every process writes a timeline.json, and `read` merges them.
"""

import dataclasses
import itertools
import json
import math
import pathlib
import statistics
import sys
from typing import Any

import numpy as np

from cocodc_jax.files import read_table, write_whole
from cocodc_jax.network.timeline import SyncRecord, Timeline
from cocodc_jax.run.config.method_config import MethodConfig

_LEAST_OVERLAP = 0.05  # of a stretch, to count as overlapping a sync
FILE = "timeline.json"


def read(workdir: pathlib.Path, since_step: int = 0) -> Timeline:
    """Return the timeline of a run, see `measured`."""
    return measured(workdir, since_step)[0]


def measured(workdir: pathlib.Path, since_step: int) -> tuple[Timeline, int]:
    """Return the timeline of a run from the files of its processes, and its first step.

    The first step is that of the first mark from `since_step` on. A mean arrives at
    about the same time in all processes, within a network delay, so clocks are aligned
    by the arrivals.
    """
    paths = [workdir / FILE, *sorted(workdir.glob(f"process_*/{FILE}"))]
    tables = [_table(path) for path in paths if path.exists()]
    if not tables:
        raise ValueError(f"workdir={str(workdir)!r} holds no {FILE}; train there first")
    # Files of earlier processes stay if a run continues with fewer.
    last_step = _last_step(tables[0])
    tables = [table for table in tables if _last_step(table) == last_step]

    marked = [{step for step, _ in table["marks"]} for table in tables]
    steps = sorted(s for s in set.intersection(*marked) if s >= since_step)
    if len(steps) < 2:
        raise ValueError(
            f"workdir={str(workdir)!r} holds fewer than two marks after step "
            f"{since_step}; train longer"
        )

    _set_clocks(tables)
    marks = [dict(table["marks"]) for table in tables]
    first = steps[0]
    zero = min(of_process[first] for of_process in marks)

    syncs = [
        [
            sync
            for sync in table["syncs"]
            if sync["merge_s"] is not None and sync["start_step"] >= first
        ]
        for table in tables
    ]

    timeline = Timeline(
        regions=tuple(f"process {i}" for i in range(len(tables))),
        syncs=tuple(_syncs(syncs, first, zero)),
        num_steps=steps[-1] - first,
        step_time_s=(),  # Follows.
        marks=tuple(
            (step - first, tuple(of_process[step] - zero for of_process in marks))
            for step in steps
        ),
        stall_s=tuple(
            sum(sync["stall_s"] or 0.0 for sync in of_process) for of_process in syncs
        ),
        bytes_sent=tuple(
            float(sum(sync["num_bytes"] for sync in of_process)) for of_process in syncs
        ),
    )

    # The median over stretches between marks.
    stretches = [seconds for _, seconds in timeline.stretches()]
    step_s = np.median(stretches, axis=0)
    return dataclasses.replace(timeline, step_time_s=tuple(step_s.tolist())), first


def _last_step(table: dict[str, Any]) -> int | None:
    """Return the step of the last mark of a process, None without marks."""
    return table["marks"][-1][0] if table["marks"] else None


def _set_clocks(tables: list[dict[str, Any]]) -> None:
    """Move the times of all processes to the clock of the first."""
    arrivals = [
        {
            (sync["start_step"], sync["fragment"]): sync["arrival_s"]
            for sync in table["syncs"]
        }
        for table in tables
    ]
    for table, arrived_s in zip(tables, arrivals, strict=True):
        gaps = [
            first_s - arrived_s[sync]
            for sync, first_s in arrivals[0].items()
            if first_s is not None and arrived_s.get(sync) is not None
        ]
        later_s = statistics.median(gaps) if gaps else 0.0

        table["marks"] = [(step, second + later_s) for step, second in table["marks"]]
        for sync in table["syncs"]:
            for name in ("start_s", "arrival_s", "merge_s"):
                if sync[name] is not None:
                    sync[name] += later_s


def _syncs(files: list[list[dict]], first_step: int, zero: float) -> list[SyncRecord]:
    """Return the merged syncs; the latest time of the processes counts."""
    by_id: dict[tuple[int, int], dict[int, dict]] = {}
    for process, syncs in enumerate(files):
        for sync in syncs:
            sync_id = (sync["start_step"], sync["fragment"])
            by_id.setdefault(sync_id, {})[process] = sync

    records = []
    for (start, fragment), by_process in by_id.items():
        syncs = list(by_process.values())
        stalls = [0.0] * len(files)
        for process, sync in by_process.items():
            stalls[process] = sync["stall_s"]
        last_merge_s = max((sync["stall_s"], sync["merge_s"]) for sync in syncs)[1]
        records.append(
            SyncRecord(
                fragments=(fragment,),
                start_step=start - first_step,
                merge_step=syncs[0]["apply_step"] - first_step,
                start_s=max(sync["start_s"] for sync in syncs) - zero,
                arrival_s=max(sync["arrival_s"] for sync in syncs) - zero,
                merge_s=last_merge_s - zero,
                stalls_s=tuple(stalls),
                bytes_sent=tuple(float(sync["num_bytes"]) for sync in syncs),
            )
        )
    return sorted(records, key=lambda record: record.merge_s)


def save(folder: pathlib.Path, timeline: dict[str, Any], first_step: int) -> None:
    """Write one process's timeline, after that of an earlier part of the run."""
    path = folder / FILE
    earlier: dict[str, Any] = {"marks": [], "syncs": []}
    if first_step and path.exists():
        try:
            earlier = _table(path)
        except ValueError as error:
            print(
                f"warning: {error}; it is written anew, from step {first_step} on",
                file=sys.stderr,
            )

    marks = [mark for mark in earlier["marks"] if mark[0] <= first_step]
    syncs = [
        sync
        for sync in earlier["syncs"]
        if (sync["apply_step"] or math.inf) <= first_step
    ]
    table = {"marks": marks + timeline["marks"], "syncs": syncs + timeline["syncs"]}
    write_whole(path, json.dumps(table))


def _table(path: pathlib.Path) -> dict[str, Any]:
    """Return the content of a timeline.json."""
    table = read_table(path)
    if not all(isinstance(table.get(name), list) for name in ("marks", "syncs")):
        raise ValueError(f"{path} is damaged: it holds no marks and syncs")
    return table


def step_s_in_flight(timeline: Timeline) -> tuple[float, float]:
    """Return seconds of a step while a sync is in flight, and while none is."""
    waited = timeline.waited_s()
    flights = timeline.flights()
    quiet = []  # Seconds of a step, of each stretch.
    beside = []  # Steps, seconds, and those with a sync in flight, of each stretch.
    for (step, begins), (next_step, ends) in itertools.pairwise(timeline.marks):
        computed_s = np.subtract(ends, begins) - waited[step]
        took_s, wait_s = max(zip(computed_s, waited[step], strict=True))
        overlap_s = flights.covered_s(max(begins), max(ends)) - wait_s
        if overlap_s < _LEAST_OVERLAP * took_s:
            quiet.append(took_s / (next_step - step))
        else:
            beside.append((next_step - step, took_s, overlap_s))

    if not quiet:
        return math.nan, math.nan
    quiet_s = statistics.median(quiet)
    if not beside:
        return math.nan, quiet_s

    overlap_s = sum(overlap for _, _, overlap in beside)
    longer_s = sum(took - num * quiet_s for num, took, _ in beside)
    if longer_s >= overlap_s:  # Almost no step was done.
        return math.inf, quiet_s
    return quiet_s * overlap_s / (overlap_s - longer_s), quiet_s


def exposed_share(folder: pathlib.Path, warm_step: int) -> float | None:
    """Return a run's `Timeline.exposed_share`."""
    for since in (warm_step, 0):
        try:
            return read(folder, since).exposed_share
        except ValueError:  # Too short.
            continue
    return None


def goodput(folder: pathlib.Path, steps: int, seconds: float) -> float | None:
    """Return the time of a run's steps if undisturbed, as a share of its time."""
    try:
        step_s = max(read(folder).step_time_s)
    except ValueError:  # Too short.
        return None
    return float(min(steps * step_s / seconds, 1.0)) if seconds > 0 else None


def first_warm_step(workdir: pathlib.Path) -> int:
    """Return the step by which every program of a run has been compiled."""
    path = workdir / "config.json"
    if not path.exists():
        raise ValueError(f"workdir={str(workdir)!r} holds no run; name that of one")
    try:
        method = MethodConfig.from_json(read_table(path)["method"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: it names no method") from error
    schedule = method.build().schedule
    return schedule.warm_up_steps if schedule else 0
