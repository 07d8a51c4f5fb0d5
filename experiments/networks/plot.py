"""Plots each method's slowdown by the network, measured and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from cocodc_jax.report.plots import COLORS, WIDTH_IN

_HEIGHT_IN = 4.2
_LOWEST = 0.9  # of the axis; 1 is as fast as without a network


def slowdowns(rows: Sequence[dict[str, Any]]) -> Figure:
    """Plot the ratio of seconds per step with and without a network, on a log axis."""
    rows = [entry for entry in rows if "error" not in entry]
    networks = list(dict.fromkeys(entry["network"] for entry in rows))
    methods = list(dict.fromkeys(entry["method"] for entry in rows))
    figure = Figure(figsize=(WIDTH_IN, _HEIGHT_IN), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.8 / (2 * max(1, len(methods)))
    for entry in rows:
        index = methods.index(entry["method"])
        left = networks.index(entry["network"]) - 0.4 + 2 * index * width
        _bar(axes, left, width, entry["measured"]["slowdown"], index, is_measured=True)
        simulated = entry["simulated"]["slowdown"]
        _bar(axes, left + width, width, simulated, index, is_measured=False)
    _finish(axes, networks)
    for index, name in enumerate(methods):
        axes.bar(0, 0, color=COLORS[index % len(COLORS)], label=name)
    axes.bar(0, 0, color="white", edgecolor="#333333", hatch="////", label="simulated")
    figure.legend(loc="outside upper center", ncols=5, frameon=False)
    return figure


def _bar(
    axes: Axes, left: float, width: float, height: float, index: int, is_measured: bool
) -> None:
    color = COLORS[index % len(COLORS)]
    axes.bar(
        left,
        height - _LOWEST,
        width,
        bottom=_LOWEST,
        align="edge",
        color=color if is_measured else "white",
        edgecolor=color,
        hatch=None if is_measured else "////",
        linewidth=0.8,
    )
    axes.annotate(
        f"{height:.2f}" if height < 9.95 else f"{height:.0f}",
        (left + width / 2, height),
        xytext=(0, 2),
        textcoords="offset points",
        ha="center",
        fontsize=7,
        rotation=90,
    )


def _finish(axes: Axes, networks: Sequence[str]) -> None:
    axes.set_yscale("log")
    axes.set_ylim(bottom=_LOWEST)
    axes.axhline(1, color="#999999", linewidth=0.6)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("seconds per step / without network (log)")
    axes.set_xticks(range(len(networks)), [_label(name) for name in networks])
    axes.spines[["top", "right"]].set_visible(False)


def _label(network: str) -> str:
    return f"{network} Mbit/s" if network.replace(".", "", 1).isdigit() else network
