"""Plots with one labelled point a method or configuration: its loss against bytes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cocodc_jax._extras import extra
from cocodc_jax.report import palette
from cocodc_jax.report.comparison import Point, pareto
from cocodc_jax.report.plots import LEADER, MARKERS, by_bytes, new_figure, tidy

with extra("report"):
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

_GREY = "#b0b0b0"
_FAINT = "#d8d8d8"
_FONT_SIZE = 10  # Readable on a phone.


def last_loss_by_bytes(methods: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Plot the last evaluation loss against the bytes a region sent, on a log axis."""
    figure = new_figure(height_in=6.4, width_in=6.4)
    axes = figure.subplots()
    sent = {n: row["bytes_sent_per_region"]["mean"] for n, row in methods.items()}
    losses = {name: row["eval_loss"]["mean"] for name, row in methods.items()}
    points = {n: (size, losses[n]) for n, size in sent.items() if size > 0}

    by_bytes(axes, 0)
    shades = [palette.COLORS.get(name, palette.GREY) for name in points]
    axes.scatter(*zip(*points.values(), strict=True), color=shades, s=22, zorder=3)
    axes.margins(x=0.08, y=0.06)
    label = "bytes sent by each region (log scale)"
    if silent := [f"{n} {losses[n]:.3f}" for n in methods if not sent[n]]:
        label += f"; nothing: {', '.join(silent)}"
    axes.set_xlabel(label)
    axes.set_ylabel("evaluation loss (nats per token)")
    tidy(axes, color="#eeeeee")
    axes.set_axisbelow(True)

    figure.draw_without_rendering()  # Lays the axes out, so pixel positions are known.
    _label(axes, points)

    return figure


def _label(axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Write each name at the nearest free place: without a point or another name."""
    canvas = axes.figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    renderer = canvas.get_renderer()
    inside = axes.get_window_extent(renderer)
    pixels = axes.transData.transform(list(points.values()))
    taken = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in pixels]
    scale = axes.figure.dpi / 72  # Pixels to a point of type.

    for (name, point), at in zip(points.items(), pixels, strict=True):
        label = axes.annotate(name, point, fontsize=_FONT_SIZE)
        size = label.get_window_extent(renderer)
        label.remove()

        place = (7.0, 0.0)  # If no place is free, over others.
        for offset in _places():
            box = _box(at, offset, size, scale)
            is_inside = np.all(box.min >= inside.min) and np.all(box.max <= inside.max)
            if is_inside and not any(box.overlaps(other) for other in taken):
                place = offset
                break
        taken.append(_box(at, place, size, scale))

        is_right = place[0] >= 0
        line = LEADER | {"relpos": (0.0 if is_right else 1.0, 0.5), "shrinkA": 0}
        is_far = np.hypot(place[0], place[1]) > 12
        axes.annotate(
            name,
            xy=point,
            xytext=place,
            textcoords="offset points",
            ha="left" if is_right else "right",
            va="center",
            fontsize=_FONT_SIZE,
            arrowprops=line if is_far else None,
        )


def _box(at: np.ndarray, place: tuple[float, float], size: Bbox, scale: float) -> Bbox:
    """Return the box of a name, in pixels."""
    x, y = at + scale * np.array(place)
    left = x if place[0] >= 0 else x - size.width
    return Bbox.from_bounds(left, y - size.height / 2, size.width, size.height)


def _places() -> Iterator[tuple[float, float]]:
    """Yield offsets of a name from its point, in points of type, the nearest first."""
    yield from ((7, 0), (-7, 0))
    for radius in range(9, 150, 3):
        for angle in np.linspace(0, 2 * np.pi, 24, endpoint=False):
            yield radius * np.cos(angle), radius * np.sin(angle)


def frontier(points: Sequence[Point], published: Sequence[Point] = ()) -> Figure:
    """Plot loss against bytes a step; points on the frontier have color and number."""
    figure = new_figure(height_in=5.6, width_in=9.0)
    axes = figure.subplots()
    best = pareto(points)
    families = list(dict.fromkeys(p.family for p in (*points, *published)))

    for point in published:
        _mark(axes, point, families, _FAINT, size=4, is_open=True)
    for i, point in enumerate(points):
        if i not in best:
            _mark(axes, point, families, _GREY, size=6)

    edge = [points[i] for i in best]
    shades = palette.colors(families)
    axes.plot(
        [p.bytes_per_step for p in edge],
        [p.loss for p in edge],
        drawstyle="steps-post",
        color="#555555",
        linewidth=1.0,
        zorder=1,
    )

    for point in edge:
        _mark(axes, point, families, shades[point.family], size=8)
    by_bytes(axes, 300)
    tidy(axes)
    axes.set_xlabel("bytes that a region sends a step (log scale)")
    axes.set_ylabel("evaluation loss after all steps (nats per token)")
    _name(axes, edge, families)

    for index, family in enumerate(families):
        marker = MARKERS[index % len(MARKERS)]
        axes.plot([], [], marker, color=shades[family], label=family)
    axes.plot([], [], "o", color=_GREY, label="never worth it")
    if published:
        label = "published hyperparameters"
        axes.plot([], [], "o", color=_FAINT, markerfacecolor="white", label=label)

    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize="small")
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
        zorder=2 if color in (_GREY, _FAINT) else 3,
    )


def _name(axes: Axes, edge: Sequence[Point], families: Sequence[str]) -> None:
    """Write a number at each point on the frontier, and its label in the margin."""
    shades = palette.colors(families)
    for number, point in enumerate(edge, 1):
        color = shades[point.family]
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
