"""Loss against steps, loss against bytes sent, and when each fragment was in flight.

Figures are built with Matplotlib's object API on the Agg canvas, without pyplot, so
drawing has no global state and needs no display.
"""

import io
from collections.abc import Sequence

import numpy as np

from cocodc_jax._extras import extra
from cocodc_jax.files import write_whole
from cocodc_jax.report.curves import Curve, eval_curve
from cocodc_jax.report.runs import Run, by_method
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


def loss_by_steps(runs: Sequence[Run]) -> Figure:
    """Plot evaluation loss against inner steps, whole and, beside it, the second half.

    Args:
      runs: runs of any methods; several of one method become their mean and a band
        from the least to the greatest.

    Returns:
      The figure; each line of the right panel carries its name and last value.
    """
    # Room for a label a method beside the curves.
    figure = _figure(height_in=max(4.2, 0.26 * len(by_method(runs))))
    whole, late = figure.subplots(1, 2, width_ratios=(3, 4))
    curves = {name: eval_curve(group) for name, group in by_method(runs).items()}
    for index, curve in enumerate(curves.values()):
        for axes in (whole, late):
            _draw(axes, curve, curve.steps, index)
        whole.set_ylabel("evaluation loss (nats per token)")
    _zoom_on_second_half(late, list(curves.values()))
    _label_ends(late, curves)
    whole.set_title("whole run", fontsize="medium")
    late.set_title("second half", fontsize="medium")
    for axes in (whole, late):
        axes.set_xlabel("inner steps")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure


def loss_by_bytes(runs: Sequence[Run]) -> Figure:
    """Plot evaluation loss against the bytes a region has sent, on a log axis.

    Args:
      runs: as for `loss_by_steps`. Evaluations before anything was sent have no place
        on a log axis and are left out.
    """
    figure = _figure(height_in=4.2 + 0.06 * len(by_method(runs)))
    axes = figure.subplots()
    for index, (name, group) in enumerate(by_method(runs).items()):
        curve = eval_curve(group)
        _draw(
            axes, curve, np.where(curve.bytes_sent > 0, curve.bytes_sent, np.nan), index
        )
        axes.lines[-1].set_label(name)
    scale_bytes(axes, 1e3)
    axes.tick_params(axis="x", which="both", length=4)
    axes.set_xlabel("bytes sent by each region (log scale)")
    axes.set_ylabel("evaluation loss (nats per token)")
    # Above the axes no legend can cover a curve.
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure


def scale_bytes(axes: Axes, narrow: float) -> None:
    """Make the x axis one of bytes, logarithmic."""
    axes.set_xscale("log")
    as_bytes = FuncFormatter(lambda size, _: format_bytes(size))
    axes.xaxis.set_major_formatter(as_bytes)
    low, high = axes.get_xlim()
    if high < narrow * low:
        axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.xaxis.set_minor_formatter(as_bytes)


def save_png(figure: Figure, path: str) -> None:
    """Write the figure as a PNG file.

    Raises:
      UnwritableError: if it cannot be written.
    """
    write_whole(path, png_bytes(figure))


def png_bytes(figure: Figure) -> bytes:
    """Return the figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    # Without a date or version in it, the same figure gives the same bytes.
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def _figure(height_in: float) -> Figure:
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw(axes: Axes, curve: Curve, abscissa: np.ndarray, index: int) -> None:
    color = COLORS[index % len(COLORS)]
    # Once all colors are used, they come with other markers.
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
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _zoom_on_second_half(axes: Axes, curves: Sequence[Curve]) -> None:
    half = max(curve.steps[-1] for curve in curves) / 2
    shown = [curve.steps >= half for curve in curves]
    low = min(curve.low[part].min() for curve, part in zip(curves, shown, strict=True))
    high = max(
        curve.high[part].max() for curve, part in zip(curves, shown, strict=True)
    )
    margin = 0.05 * (high - low) or 0.05
    axes.set_xlim(half, 2 * half)
    axes.set_ylim(low - margin, high + margin)


def _label_ends(axes: Axes, curves: dict[str, Curve]) -> None:
    """Write each line's name and last value in the right margin, spread out."""
    low, high = axes.get_ylim()
    ends = [(curve.mean[-1] - low) / (high - low) for curve in curves.values()]
    heights = spread(ends, gap=0.06)
    for index, (name, curve) in enumerate(curves.items()):
        axes.annotate(
            f"{name} {curve.mean[-1]:.3f}",
            xy=(1.0, ends[index]),
            xytext=(1.05, heights[index]),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=COLORS[index % len(COLORS)],
            verticalalignment="center",
            fontsize="small",
            # To the label's left edge, and not through it to its middle.
            arrowprops={
                "arrowstyle": "-",
                "color": "#999999",
                "linewidth": 0.6,
                "relpos": (0.0, 0.5),
            },
            annotation_clip=False,
        )


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Move positions as little as an upward sweep needs to lie `gap` apart, in order.

    The whole is then moved down by half of the largest shift, so that labels stay
    around the points they belong to, and what leaves the range from 0 to 1 is pushed
    back. The gap is smaller where so many would not fit.

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
