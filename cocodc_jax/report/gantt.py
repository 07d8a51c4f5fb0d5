"""When each fragment was in flight: one panel a method, one row a fragment."""

from collections.abc import Sequence

from cocodc_jax._extras import extra
from cocodc_jax.report.plots import COLORS, WIDTH_IN
from cocodc_jax.report.records import Record
from cocodc_jax.report.runs import Run, by_method

with extra("report"):
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

MAX_SYNCS = 128  # of a method; more would be too narrow to be told apart.


def fragments_in_flight(runs: Sequence[Run]) -> Figure:
    """Draw a bar from start to apply step of every sync, for one run of each method.

    Args:
      runs: runs of any methods; the first of each method is drawn, and a method
        without syncs (data parallel) is left out. Long runs are shown up to the step
        at which a method has made `MAX_SYNCS` syncs, and the axis says so.

    Raises:
      ValueError: no run has a sync.
    """
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(by_method(runs))}
    syncs = {
        name: group[0].of_kind("sync")
        for name, group in by_method(runs).items()
        if group[0].of_kind("sync")
    }
    if not syncs:
        raise ValueError("no run has a sync to draw; leave the plot out")
    rows = [_num_fragments(events) for events in syncs.values()]
    # Each row a fifth of an inch, and room for each panel's title and for the axis.
    figure = Figure(
        figsize=(WIDTH_IN, 0.2 * sum(rows) + 0.55 * len(rows) + 0.5),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    panels = figure.subplots(
        len(syncs), 1, sharex=True, squeeze=False, height_ratios=[n + 1 for n in rows]
    )[:, 0]
    for axes, (name, events) in zip(panels, syncs.items(), strict=True):
        _draw_panel(axes, name, events, colors[name])
    num_steps = max(run.summary["steps"] for run in runs)
    shown_steps = _shown_steps(list(syncs.values()), num_steps)
    # With room for a mark at the last step.
    panels[-1].set_xlim(0, shown_steps + num_steps / 400)
    panels[-1].set_xlabel(
        "inner steps"
        if shown_steps == num_steps
        else f"inner steps: the first {shown_steps:,} of {num_steps:,}, at most "
        f"{MAX_SYNCS} syncs of a method"
    )
    panels[-1].xaxis.set_major_locator(MaxNLocator(8, integer=True))
    return figure


def _num_fragments(events: Sequence[Record]) -> int:
    return 1 + max(event["fragment"] for event in events)


def _shown_steps(syncs: Sequence[Sequence[Record]], num_steps: int) -> int:
    """Find where the axis ends."""
    crowded = [e[MAX_SYNCS - 1]["apply_step"] for e in syncs if len(e) > MAX_SYNCS]
    return min([num_steps, *crowded])


def _draw_panel(axes: Axes, name: str, events: Sequence[Record], color: str) -> None:
    num_fragments = _num_fragments(events)
    for fragment in range(num_fragments):
        own = [event for event in events if event["fragment"] == fragment]
        spans = [(e["start_step"], e["apply_step"] - e["start_step"]) for e in own]
        # The white edge keeps apart a sync that starts when the one before is applied.
        axes.broken_barh(
            spans, (fragment - 0.35, 0.7), facecolor=color, edgecolor="white", lw=0.6
        )
        # A blocking exchange takes no step: its bar has no width, a mark shows it.
        marks = [start for start, delay_steps in spans if delay_steps == 0]
        axes.plot(
            marks, [fragment] * len(marks), "|", color=color, markersize=11, mew=2
        )
    axes.set_title(name, loc="left", fontsize="medium")
    axes.set_ylabel("fragment")
    axes.set_yticks(range(num_fragments))
    axes.set_ylim(num_fragments - 0.5, -0.5)
    axes.grid(visible=True, axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
