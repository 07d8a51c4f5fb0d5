"""What each method came to, against what it sent: one labelled point a method."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cocodc_jax._extras import extra
from cocodc_jax.report.plots import COLORS, WIDTH_IN
from cocodc_jax.report.units import format_bytes

with extra("report"):
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter
    from matplotlib.transforms import Bbox

_HEIGHT_IN = 5.0
_FONT_SIZE = 8


def last_loss_by_bytes(methods: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Plot the last evaluation loss against the bytes a region sent, on a log axis."""
    figure = Figure(figsize=(WIDTH_IN, _HEIGHT_IN), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    sent = {n: row["bytes_sent_per_region"]["mean"] for n, row in methods.items()}
    losses = {name: row["eval_loss"]["mean"] for name, row in methods.items()}
    shown = [name for name in methods if sent[name] > 0]
    axes.set_xscale("log")
    axes.scatter(
        [sent[name] for name in shown],
        [losses[name] for name in shown],
        color=COLORS[2],
        s=22,
        zorder=3,
    )
    axes.margins(x=0.08, y=0.06)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size)))
    silent = [f"{n} {losses[n]:.3f}" for n in methods if not sent[n]]
    axes.set_xlabel(
        "bytes sent by each region (log scale)"
        + (f"; nothing: {', '.join(silent)}" if silent else "")
    )
    axes.set_ylabel("evaluation loss (nats per token)")
    axes.grid(visible=True, color="#eeeeee", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.draw_without_rendering()  # Lays the axes out: places are told in pixels.
    points = {name: (sent[name], losses[name]) for name in shown}
    _label(axes, points)
    return figure


def _label(axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Write each name at the nearest place that no point and no other name has."""
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
        free = (
            place
            for place in _places()
            if _is_free(_box(at, place, size, scale), taken, inside)
        )
        place = next(free, (7.0, 0.0))  # Over others, rather than not at all.
        taken.append(_box(at, place, size, scale))
        _write(axes, name, point, place)


def _box(at: np.ndarray, place: tuple[float, float], size: Bbox, scale: float) -> Bbox:
    """Return where a name lies, in pixels."""
    x, y = at + scale * np.array(place)
    left = x if place[0] >= 0 else x - size.width
    return Bbox.from_bounds(left, y - size.height / 2, size.width, size.height)


def _is_free(box: Bbox, taken: list[Bbox], inside: Bbox) -> bool:
    return (
        inside.x0 <= box.x0
        and box.x1 <= inside.x1
        and inside.y0 <= box.y0
        and box.y1 <= inside.y1
        and not any(box.overlaps(other) for other in taken)
    )


def _places() -> Iterator[tuple[float, float]]:
    """Yield offsets of a name from its point, in points of type, the nearest first."""
    yield from ((7, 0), (-7, 0))
    for radius in range(9, 150, 3):
        for angle in np.linspace(0, 2 * np.pi, 24, endpoint=False):
            yield radius * np.cos(angle), radius * np.sin(angle)


def _write(
    axes: Axes, name: str, point: tuple[float, float], place: tuple[float, float]
) -> None:
    is_right = place[0] >= 0
    line = {
        "arrowstyle": "-",
        "color": "#aaaaaa",
        "linewidth": 0.6,
        "relpos": (0.0 if is_right else 1.0, 0.5),
        "shrinkA": 0,
    }
    axes.annotate(
        name,
        xy=point,
        xytext=place,
        textcoords="offset points",
        ha="left" if is_right else "right",
        va="center",
        fontsize=_FONT_SIZE,
        arrowprops=line if np.hypot(*place) > 12 else None,
    )
