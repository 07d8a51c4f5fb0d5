"""Draws the results of two studies whose programs are gone, from their JSON files.

`delay_cost.json` has what is left of a delay at each sync after a merge rule, and
`scaling.json` losses over parameters, regions and the interval, with the fitted power
laws. docs/results/delay.md and sizes.md name the commit that has the programs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from cocodc_jax.report import palette, plots

WIDTH_IN = 6.0  # With letters of 10 points, readable on a page of 390 pixels.

# Merge rules by their names in the file, the method whose color they have, and labels.
RULES: Mapping[str, tuple[str, str]] = {
    "mix_0.5": (palette.COLORS["streaming_diloco"], "Streaming DiLoCo: mix by halves"),
    "isotropic": (palette.COLORS["cocodc"], "CoCoDC: isotropic compensation"),
    "replay": ("#CC79A7", "keep all progress"),
    "hessian_vector": ("#56B4E9", "exact Hessian product"),
}
_MARKERS = {1: "o", 2: "s", 4: "^"}  # By the number of regions.


def left_of_delay(table: Mapping[str, Any]) -> Figure:
    """Draw what is left of a delay after each rule, at its best strength, by steps.

    `table` is `delay_cost.json`; a panel for each delay, as a share of the interval.
    """
    rows = table["rows"]
    interval = table["settings"]["sync_interval"]
    delays = sorted({row["delay_steps"] for row in rows})
    figure = plots.new_figure(height_in=4.2, width_in=WIDTH_IN)
    panels = figure.subplots(1, len(delays), sharey=True)

    for axes, delay_steps in zip(panels, delays, strict=True):
        for rule, (color, label) in RULES.items():
            row = best_strength(rows, rule, delay_steps)
            left = 100 * (1 - np.array(row["recovered_at"]))
            axes.plot(row["steps"], left, color=color, linewidth=1.8, label=label)
        axes.axhline(100, color="#999999", linewidth=0.8)
        axes.set_title(f"delay of {delay_steps} steps", fontsize="medium")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g} %"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks([100, 300])
        plots.tidy(axes)

    panels[0].set_ylabel("left of the delay's cost")
    panels[1].set_xlabel(f"step at which a sync of {interval} steps ends")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    return figure


def best_strength(
    rows: Sequence[Mapping[str, Any]], rule: str, delay_steps: int
) -> Mapping[str, Any]:
    """Return the row of a rule and a delay whose strength recovers the most."""
    tried = [
        row for row in rows if (row["rule"], row["delay_steps"]) == (rule, delay_steps)
    ]
    return max(tried, key=lambda row: row["recovered"]["mean"])


def laws(fitted: Mapping[str, Any]) -> Figure:
    """Draw losses of DiLoCo and data parallel over parameters, with the fitted laws.

    `fitted` is `scaling.json`. Each line is the law at one number of regions (M) and
    one interval (H).
    """
    figure = plots.new_figure(height_in=4.6, width_in=WIDTH_IN)
    axes = figure.subplots()

    for method, law in fitted.items():
        color = palette.COLORS[method]
        settings = sorted({(x["M"], x["H"]) for x in law["observations"]})
        for num_regions, interval in settings:
            _draw_setting(axes, law, num_regions, interval, color)

    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("parameters (log scale)")
    axes.set_ylabel("loss on held-out text (log scale)")
    axes.set_xticks(sorted({x["N"] for x in fitted["diloco"]["observations"]}))
    axes.set_yticks([1.6, 1.8, 2.0, 2.2, 2.4, 2.6])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.minorticks_off()
    plots.tidy(axes)
    _explain(axes)
    return figure


def predict(law: Mapping[str, Any], **factors: float) -> float:
    """Return the loss of a law A N^n M^m H^h; factors without an exponent are left out.

    >>> predict({"A": 2.0, "exponents": {"N": {"mean": -1.0}}}, N=4.0, M=3.0)
    0.5
    """
    loss = law["A"]
    for name, exponent in law["exponents"].items():
        loss *= factors[name] ** exponent["mean"]
    return loss


def _draw_setting(
    axes: Axes, law: Mapping[str, Any], num_regions: float, interval: float, color: str
) -> None:
    """Draw the losses and the law for one number of regions and one interval."""
    of_setting = [
        x for x in law["observations"] if (x["M"], x["H"]) == (num_regions, interval)
    ]

    sizes = [x["N"] for x in of_setting]
    line = [predict(law, N=n, M=num_regions, H=interval) for n in sizes]
    axes.plot(sizes, line, color=color, linewidth=1, alpha=0.6)

    axes.plot(
        sizes,
        [x["loss"] for x in of_setting],
        _MARKERS[int(num_regions)],
        color=color,
        markersize=7,
        markerfacecolor="white" if interval == 10 else color,
    )


def _explain(axes: Axes) -> None:
    """Write a legend of colors and markers."""
    green = palette.COLORS["diloco"]
    black = palette.COLORS["data_parallel"]

    for num_regions, marker in _MARKERS.items():
        for interval, face in ((10, "white"), (40, green)):
            axes.plot(
                [],
                [],
                marker,
                color=green,
                markerfacecolor=face,
                label=f"DiLoCo, M {num_regions}, H {interval}",
            )

    axes.plot([], [], _MARKERS[4], color=black, label="data parallel, M 4")
    axes.legend(frameon=False)
