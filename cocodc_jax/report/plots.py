"""Plots of loss against steps and against bytes, and of fragments in flight.

Figures are built with Matplotlib's object API on the Agg canvas, without pyplot, so
drawing has no global state and needs no display.
"""

import io
from collections.abc import Sequence
from typing import Literal

import numpy as np

from cocodc_jax._extras import extra
from cocodc_jax.files import write_whole
from cocodc_jax.report import palette
from cocodc_jax.report.comparison import Curve, Run, by_method, eval_curve
from cocodc_jax.report.records import Record
from cocodc_jax.report.units import format_bytes

with extra("report"):
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

# Okabe and Ito's palette, which the common forms of colour blindness keep apart, less
# its yellow (too faint on white); line styles and markers tell methods apart in print.
COLORS = ("#333333", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
MARKERS = "osD^vPX"
WIDTH_IN = 8.0
DPI = 160
LEADER = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.6}  # To a label.
MAX_SYNCS = 128  # of a method; more would be too narrow to distinguish.


def new_figure(height_in: float, width_in: float = WIDTH_IN) -> Figure:
    """Return an empty figure on the Agg canvas."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(
    axes: Axes, along: Literal["both", "x", "y"] = "both", color: str = "#dddddd"
) -> None:
    """Draw a faint grid, and remove the frame above and on the right."""
    axes.grid(visible=True, axis=along, color=color, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def loss_by_steps(runs: Sequence[Run]) -> Figure:
    """Plot evaluation loss against inner steps: all of it, and its second half.

    Several runs of one method become their mean and a band from the least to the
    greatest loss.
    """
    # Room for a label a method beside the curves.
    figure = new_figure(height_in=max(4.2, 0.26 * len(by_method(runs))))
    whole, late = figure.subplots(1, 2, width_ratios=(3, 4))
    curves = {name: eval_curve(group) for name, group in by_method(runs).items()}
    shades = palette.colors(curves)
    for index, (name, curve) in enumerate(curves.items()):
        for axes in (whole, late):
            _draw(axes, curve, curve.steps, index, shades[name])
    whole.set_ylabel("evaluation loss (nats per token)")
    half = max(curve.steps[-1] for curve in curves.values()) / 2
    low = min(curve.low[curve.steps >= half].min() for curve in curves.values())
    high = max(curve.high[curve.steps >= half].max() for curve in curves.values())
    margin = 0.05 * (high - low) or 0.05
    late.set_xlim(half, 2 * half)
    late.set_ylim(low - margin, high + margin)
    _label_ends(late, curves)
    whole.set_title("whole run", fontsize="medium")
    late.set_title("second half", fontsize="medium")

    for axes in (whole, late):
        axes.set_xlabel("inner steps")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))

    return figure


def loss_by_bytes(runs: Sequence[Run]) -> Figure:
    """Plot evaluation loss against the bytes a region has sent, on a log axis.

    Evaluations before anything was sent are left out.

    Raises:
      ValueError: if no run has sent anything, as with one region.
    """
    if not any(run.summary["bytes_sent_per_region"] for run in runs):
        raise ValueError("no run has sent anything; leave the plot out")

    figure = new_figure(height_in=4.2 + 0.06 * len(by_method(runs)))
    axes = figure.subplots()
    groups = by_method(runs)
    shades = palette.colors(groups)
    for index, (name, group) in enumerate(groups.items()):
        curve = eval_curve(group)
        sent = np.where(curve.bytes_sent > 0, curve.bytes_sent, np.nan)
        _draw(axes, curve, sent, index, shades[name])
        axes.lines[-1].set_label(name)

    by_bytes(axes, 1e3)
    axes.tick_params(axis="x", which="both", length=4)
    axes.set_xlabel("bytes sent by each region (log scale)")
    axes.set_ylabel("evaluation loss (nats per token)")
    # Above the axes no legend can cover a curve.
    figure.legend(loc="outside upper center", ncols=4, frameon=False)

    return figure


def fragments_in_flight(runs: Sequence[Run]) -> Figure:
    """Draw a bar from start to apply step of every sync, for the first run of a method.

    A method without syncs (data parallel) is left out. Long runs are shown up to the
    step at which a method has made `MAX_SYNCS` syncs, and the axis says so.
    """
    groups = by_method(runs)
    colors = palette.colors(groups)
    syncs = {}
    for name, group in groups.items():
        events = group[0].of_kind("sync")
        if events:
            syncs[name] = events
    if not syncs:
        raise ValueError("no run has a sync to draw; leave the plot out")

    rows = [_num_fragments(events) for events in syncs.values()]
    # Each row a fifth of an inch, and room for each panel's title and for the axis.
    figure = new_figure(0.2 * sum(rows) + 0.55 * len(rows) + 0.5)

    panels = figure.subplots(
        len(syncs), 1, sharex=True, squeeze=False, height_ratios=[n + 1 for n in rows]
    )[:, 0]
    for axes, (name, events) in zip(panels, syncs.items(), strict=True):
        _draw_syncs(axes, name, events, colors[name])

    num_steps = max(run.summary["steps"] for run in runs)
    full = [events for events in syncs.values() if len(events) > MAX_SYNCS]
    shown_steps = min([num_steps, *(e[MAX_SYNCS - 1]["apply_step"] for e in full)])
    # With room for a mark at the last step.
    panels[-1].set_xlim(0, shown_steps * 401 / 400)
    panels[-1].set_xlabel(
        "inner steps"
        if shown_steps == num_steps
        else f"inner steps: the first {shown_steps:,} of {num_steps:,}, at most "
        f"{MAX_SYNCS} syncs of a method"
    )
    panels[-1].xaxis.set_major_locator(MaxNLocator(8, integer=True))

    return figure


def by_bytes(axes: Axes, narrow: float) -> None:
    """Make the x axis one of bytes, logarithmic."""
    axes.set_xscale("log")
    as_bytes = FuncFormatter(lambda size, _: format_bytes(size))
    axes.xaxis.set_major_formatter(as_bytes)
    low, high = axes.get_xlim()
    if high < narrow * low:
        axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.xaxis.set_minor_formatter(as_bytes)


def save_png(figure: Figure, path: str) -> None:
    """Write the figure as a PNG file; raise `UnwritableError` if that fails."""
    write_whole(path, png_bytes(figure))


def png_bytes(figure: Figure) -> bytes:
    """Return the figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    # Without a date or version in it, the same figure gives the same bytes.
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def _draw(
    axes: Axes, curve: Curve, abscissa: np.ndarray, index: int, color: str
) -> None:
    marker = MARKERS[(index + index // len(COLORS)) % len(MARKERS)]
    axes.fill_between(abscissa, curve.low, curve.high, color=color, alpha=0.2, lw=0)

    # About ten markers a line, however often it was evaluated.
    every = max(1, len(abscissa) // 10)
    axes.plot(
        abscissa,
        curve.mean,
        color=color,
        marker=marker,
        markevery=every,
        markersize=4,
        linewidth=1.6,
    )
    tidy(axes)


def _label_ends(axes: Axes, curves: dict[str, Curve]) -> None:
    """Write each line's name and last value in the right margin, spread out."""
    low, high = axes.get_ylim()
    ends = [(curve.mean[-1] - low) / (high - low) for curve in curves.values()]
    heights = spread(ends, gap=0.06)
    shades = palette.colors(curves)

    for index, (name, curve) in enumerate(curves.items()):
        axes.annotate(
            f"{name} {curve.mean[-1]:.3f}",
            xy=(1.0, ends[index]),
            xytext=(1.05, heights[index]),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=shades[name],
            verticalalignment="center",
            fontsize="small",
            # The line ends at the label's left edge, not in its middle.
            arrowprops={"relpos": (0.0, 0.5)} | LEADER,
            annotation_clip=False,
        )


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Move positions so that they are at least `gap` apart, in the same order.

    An upward sweep moves each as little as necessary. All are then moved down by half
    of the largest shift, so that labels stay near their points, and pushed back into
    the range from 0 to 1. The gap is smaller if so many positions do not fit.

    >>> [round(height, 2) for height in spread([0.5, 0.5, 0.9], gap=0.1)]
    [0.45, 0.55, 0.85]
    >>> [round(height, 2) for height in spread([0.0, 0.0, 0.9], gap=0.7)]
    [0.0, 0.5, 1.0]
    """
    gap = min(gap, 1 / max(1, len(positions) - 1))
    placed = list(positions)
    order = sorted(range(len(placed)), key=lambda index: placed[index])
    for below, above in zip(order, order[1:], strict=False):
        placed[above] = max(placed[above], placed[below] + gap)

    shift = max(new - old for new, old in zip(placed, positions, strict=True)) / 2
    for rank, index in enumerate(order):
        highest = 1 - (len(order) - 1 - rank) * gap
        placed[index] = max(min(placed[index] - shift, highest), rank * gap)

    return placed


def _num_fragments(events: Sequence[Record]) -> int:
    return 1 + max(event["fragment"] for event in events)


def _draw_syncs(axes: Axes, name: str, events: Sequence[Record], color: str) -> None:
    num_fragments = _num_fragments(events)
    for fragment in range(num_fragments):
        of_fragment = [event for event in events if event["fragment"] == fragment]
        spans = [
            (e["start_step"], e["apply_step"] - e["start_step"]) for e in of_fragment
        ]
        # The white edge keeps apart a sync that starts when the one before is applied.
        axes.broken_barh(
            spans, (fragment - 0.35, 0.7), facecolor=color, edgecolor="white", lw=0.6
        )
        # A blocking exchange takes no step: its bar has no width, a mark shows it.
        at = [start for start, delay_steps in spans if delay_steps == 0]
        axes.plot(at, [fragment] * len(at), "|", color=color, markersize=11, mew=2)

    axes.set_title(name, loc="left", fontsize="medium")
    axes.set_ylabel("fragment")
    axes.set_yticks(range(num_fragments))
    axes.set_ylim(num_fragments - 0.5, -0.5)
    tidy(axes, "x")
    axes.set_axisbelow(True)
