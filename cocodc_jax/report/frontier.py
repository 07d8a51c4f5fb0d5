"""The frontier, drawn: the least loss for the bytes that a region sends a step."""

from __future__ import annotations

from collections.abc import Sequence

from cocodc_jax._extras import extra
from cocodc_jax.report.pareto import Point, pareto
from cocodc_jax.report.plots import COLORS, MARKERS, scale_bytes

with extra("report"):
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

GREY, FAINT = "#b0b0b0", "#d8d8d8"


def frontier(
    points: Sequence[Point], published: Sequence[Point] = (), title: str = ""
) -> Figure:
    """Plot loss against bytes a step; what is on the frontier has color and number."""
    figure = Figure(figsize=(9.0, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    best = pareto(points)
    families = list(dict.fromkeys(p.family for p in (*points, *published)))
    for point in published:
        _mark(axes, point, families, FAINT, size=4, is_open=True)
    for i, point in enumerate(points):
        if i not in best:
            _mark(axes, point, families, GREY, size=6)
    edge = [points[i] for i in best]
    axes.plot(
        [p.bytes_per_step for p in edge],
        [p.loss for p in edge],
        drawstyle="steps-post",
        color="#555555",
        linewidth=1.0,
        zorder=1,
    )
    for point in edge:
        color = COLORS[families.index(point.family) % len(COLORS)]
        _mark(axes, point, families, color, size=8)
    _scale(axes)
    _name(axes, edge, families)
    _legend(axes, families, bool(published))
    axes.set_title(title, fontsize="medium")
    return figure


def _mark(
    axes: Axes,
    point: Point,
    families: Sequence[str],
    color: str,
    size: float,
    is_open: bool = False,
) -> None:
    axes.errorbar(
        point.bytes_per_step,
        point.loss,
        yerr=point.half or None,
        marker=MARKERS[families.index(point.family) % len(MARKERS)],
        markersize=size,
        markerfacecolor="white" if is_open else color,
        markeredgecolor=color,
        ecolor=color,
        elinewidth=0.8,
        capsize=0,
        linestyle="none",
        zorder=2 if color in (GREY, FAINT) else 3,
    )


def _scale(axes: Axes) -> None:
    scale_bytes(axes, 300)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("bytes that a region sends a step (log scale)")
    axes.set_ylabel("evaluation loss after all steps (nats per token)")


def _name(axes: Axes, edge: Sequence[Point], families: Sequence[str]) -> None:
    """Write a number at each point on the frontier, and what it is in the margin."""
    for number, point in enumerate(edge, 1):
        color = COLORS[families.index(point.family) % len(COLORS)]
        axes.annotate(
            str(number),
            xy=(point.bytes_per_step, point.loss),
            xytext=(-5, -5),
            textcoords="offset points",
            ha="right",
            va="top",
            color=color,
            fontsize="small",
            fontweight="bold",
        )
        axes.annotate(
            f"{number}   {point.loss:.3f}   {point.label}",
            xy=(1.03, 1 - (number - 0.5) * min(0.06, 1 / len(edge))),
            xycoords="axes fraction",
            color=color,
            va="center",
            fontsize="small",
            annotation_clip=False,
        )


def _legend(axes: Axes, families: Sequence[str], has_published: bool) -> None:
    for index, family in enumerate(families):
        axes.plot(
            [],
            [],
            marker=MARKERS[index % len(MARKERS)],
            color=COLORS[index % len(COLORS)],
            linestyle="none",
            label=family,
        )
    axes.plot([], [], marker="o", color=GREY, linestyle="none", label="never worth it")
    if has_published:
        axes.plot([], [], marker="o", color=FAINT, markerfacecolor="white",
                  linestyle="none", label="published hyperparameters")  # fmt: skip
    figure = axes.get_figure()
    assert figure is not None
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize="small")
