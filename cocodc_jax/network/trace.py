"""Write a timeline as a Chrome trace, which Perfetto opens, and as a Gantt plot."""

from __future__ import annotations

import io
import itertools
import json
import os
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from cocodc_jax._extras import extra
from cocodc_jax.files import write_whole
from cocodc_jax.network.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_SYNCS = 24  # The most syncs that are drawn.

_REGION_PID = 1
_NETWORK_PID = 2

_COLORS = {
    "compute": "tab:blue",
    "stall": "tab:red",
    "on the network": "tab:orange",
    "arrived, not merged yet": "wheat",
}


def write_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write trace-event JSON for ui.perfetto.dev or chrome://tracing.

    Process 1 has one track per region with its steps and stalls, process 2 one track
    per sync in flight at once; every sync carries its steps, bytes and stall.
    """
    events = [*_names(timeline), *_compute_events(timeline), *_sync_events(timeline)]
    write_whole(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for pid, name in ((_REGION_PID, "regions"), (_NETWORK_PID, "network")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    for region, name in enumerate(timeline.regions):
        track = {"pid": _REGION_PID, "tid": region}
        yield {"ph": "M", "name": "thread_name", **track, "args": {"name": name}}


def _span(name: str, begin_s: float, end_s: float, pid: int, tid: int, **args: Any):
    times = {"ts": begin_s * 1e6, "dur": (end_s - begin_s) * 1e6}
    return {"ph": "X", "name": name, **times, "pid": pid, "tid": tid, "args": args}


def region_spans(
    timeline: Timeline, region: int
) -> Iterator[tuple[str, float, float, int, int]]:
    """Yield (kind, begin_s, end_s, first step, last step) of a region's time.

    A "stall" is the time of steps above their usual time. In a measured run that is the
    median, so half of all stretches have a short stall.
    """
    for (step, times), (next_step, next_times) in itertools.pairwise(timeline.marks):
        begin = times[region]
        end = next_times[region]
        busy = min(end, begin + (next_step - step) * timeline.step_time_s[region])
        yield "compute", begin, busy, step, next_step
        # Rounding of the clocks is no stall.
        if end - busy > 1e-9 * max(1.0, end):
            yield "stall", busy, end, next_step, next_step


def _compute_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for region in range(len(timeline.regions)):
        for kind, begin, end, first, last in region_spans(timeline, region):
            name = f"steps {first} to {last}" if kind == "compute" else "stall"
            yield _span(name, begin, end, _REGION_PID, region)


def _sync_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    free_s: list[float] = []  # when each track is free again
    for sync in sorted(timeline.syncs, key=lambda s: s.start_s):
        tracks = (i for i, end in enumerate(free_s) if end <= sync.start_s)
        track = next(tracks, len(free_s))
        free_s[track : track + 1] = [sync.arrival_s]
        about = {n: getattr(sync, n) for n in ("start_step", "merge_step", "stall_s")}
        about["bytes_sent"] = max(sync.bytes_sent)
        yield _span(
            f"fragment {sync.fragments[0]}",
            sync.start_s,
            sync.arrival_s,
            _NETWORK_PID,
            track,
            **about,
        )


def plot_timeline(
    timeline: Timeline,
    path: str | os.PathLike[str],
    title: str,
    clock: str = "simulated",
) -> None:
    """Draw when regions compute and wait, and when each fragment is in flight.

    Only the time of the first `MAX_SYNCS` syncs is drawn. `clock` says whose seconds
    they are, "simulated" or "measured".
    """
    with extra("report"):  # Here: a trace needs no plots.
        from matplotlib.figure import Figure

    rows = len(timeline.regions) + len(_fragments(timeline))
    figure = Figure(figsize=(10, 1.6 + 0.3 * rows), layout="constrained")
    axes = figure.subplots()
    draw_timeline(axes, timeline)
    axes.set_xlabel(f"{clock} seconds")
    axes.set_title(title)
    draw_legend(figure)
    picture = io.BytesIO()
    figure.savefig(picture, format=pathlib.Path(path).suffix[1:] or "png", dpi=120)
    write_whole(path, picture.getvalue())


def draw_timeline(axes: Axes, timeline: Timeline) -> None:
    """Draw a row a region and a row a fragment, as `plot_timeline` does."""
    shown = timeline.syncs[:MAX_SYNCS]
    is_all = len(shown) == len(timeline.syncs)
    limit = timeline.sim_s if is_all else max(sync.merge_s for sync in shown)
    num_regions = len(timeline.regions)
    fragments = _fragments(timeline)

    for region in range(num_regions):
        for kind, begin, end, _, _ in region_spans(timeline, region):
            if begin > limit:
                break
            _bar(axes, region, begin, end, kind)

    rows = {p: num_regions + i for i, p in enumerate(fragments)}
    for sync in shown:
        for p in sync.fragments:
            _bar(axes, rows[p], sync.start_s, sync.arrival_s, "on the network")
            _bar(axes, rows[p], sync.arrival_s, sync.merge_s, "arrived, not merged yet")

    axes.set_yticks(
        np.arange(num_regions + len(fragments)),
        [*timeline.regions, *(f"fragment {p}" for p in fragments)],
    )
    axes.invert_yaxis()
    axes.set_xlim(0, limit)


def _fragments(timeline: Timeline) -> list[int]:
    return sorted({p for sync in timeline.syncs for p in sync.fragments})


def _bar(axes: Axes, row: int, begin_s: float, end_s: float, kind: str) -> None:
    axes.barh(row, end_s - begin_s, left=begin_s, color=_COLORS[kind], height=0.7)


def draw_legend(figure: Figure) -> None:
    """Say below the axes what the colours are."""
    with extra("report"):
        from matplotlib.patches import Patch

    handles = [Patch(color=color, label=kind) for kind, color in _COLORS.items()]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False
    )
