"""Draws pictures of README.md and docs/results from results in the repository.

    python -m experiments.results.figures

writes to this folder: readme_tuned.png, loss against bytes of methods that are all
tuned, from hold_small.json; readme_crossing.png, DiLoCo and Streaming DiLoCo on one
simulated network; and, for docs/results, methods.png from compare_all.json,
networks.png from networks.json, delay_cost.png and scaling.png from their JSON files
(`studies.py`). The simulation takes a second and is the same on every machine.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cocodc_jax import methods
from cocodc_jax.network import trace
from cocodc_jax.network.links import Link, uniform
from cocodc_jax.network.simulator import simulate_method
from cocodc_jax.network.timeline import Timeline
from cocodc_jax.network.workload import Workload
from cocodc_jax.report import palette, plots, points

from .. import program
from ..networks.report import slowdowns
from . import studies

RESULTS = pathlib.Path(__file__).parent
WIDTH_IN = 6.4

# As in docs/results/networks.md: the tiny preset, four regions, 20 Mbit/s, 50 ms.
PARAMETERS = 838_784
REGIONS = 4
STEP_S = 0.25
STEPS = 100
LINK = Link(bandwidth_gbps=0.02, latency_s=0.05)
INTERVAL = 40
FRAGMENTS = 4
DELAY_STEPS = 5

# Each contender at its best setting: the name of its color, its label and its flags.
TUNED = "hold_small.json"
CONTENDERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "data_parallel": ("data parallel", {"method": "data_parallel"}),
    "diloco": ("DiLoCo", {"method": "diloco"}),
    "cocodc": ("CoCoDC", {"method": "cocodc", "compress": None}),
    "streaming_diloco": (
        "Streaming DiLoCo",
        {"method": "streaming_diloco", "compress": None},
    ),
    palette.RECIPE: (
        "recommended: one bit\na value, a fragment\nat every step",
        {"method": "streaming_diloco", "compress": "ef+sign"},
    ),
}
# Places of labels at which they do not overlap: offsets in points, and alignment.
_PLACES: Mapping[str, tuple[tuple[int, int], Literal["left", "right"]]] = {
    "data_parallel": ((0, -16), "right"),
    "diloco": ((-4, -28), "left"),
    "cocodc": ((8, 4), "left"),
    "streaming_diloco": ((-4, -14), "left"),
    palette.RECIPE: ((-22, -14), "right"),
}


def main(folder: pathlib.Path = RESULTS) -> None:
    """Draw all pictures."""
    comparison = _read("compare_all.json")
    # Some of the methods that were measured have been removed since.
    rows = {
        name: row
        for name, row in comparison["methods"].items()
        if name.partition("+")[0] in methods.METHODS
    }

    figures = {
        "readme_tuned": tuned(),
        "readme_crossing": crossing(),
        "methods": points.last_loss_by_bytes(rows),
        "networks": slowdowns(_read("networks.json")["rows"]),
        "delay_cost": studies.left_of_delay(_read("delay_cost.json")),
        "scaling": studies.laws(_read("scaling.json")),
    }

    for name, figure in figures.items():
        plots.save_png(figure, str(folder / f"{name}.png"))


def _read(name: str) -> Any:
    """Return a file of results."""
    return json.loads((RESULTS / name).read_text())


def tuned() -> Figure:
    """Draw mean loss against bytes sent, each method tuned, with five seeds' range."""
    cells = _read(TUNED)["cells"]
    figure = plots.new_figure(height_in=4.0, width_in=WIDTH_IN)
    axes = figure.subplots()

    for name, (label, _) in CONTENDERS.items():
        column = tuned_column(cells, name)
        _, _, sent = np.transpose(column["curve"])
        losses = np.array(column["curves"])
        mean = losses.mean(0)
        color = palette.COLORS[name]
        is_recipe = name == palette.RECIPE
        axes.fill_between(sent, losses.min(0), losses.max(0), color=color, alpha=0.2)
        axes.plot(sent, mean, color=color, linewidth=3.0 if is_recipe else 1.6)
        axes.plot(sent[-1], mean[-1], "o", color=color, markersize=6)
        _label(axes, f"{label}  {mean[-1]:.3f}", (sent[-1], mean[-1]), name, color)

    plots.by_bytes(axes, narrow=1)
    plots.tidy(axes)
    axes.set_ylim(1.33, 2.6)  # Room for labels below the curves.
    axes.set_xlabel("bytes sent by each region (log scale)")
    axes.set_ylabel("loss on held-out text (nats per byte)")
    return figure


def tuned_column(cells: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """Return a contender's tuned column, from the one cell that has its flags."""
    _, flags = CONTENDERS[name]
    (cell,) = (
        cell
        for cell in cells
        if all(cell["flags"].get(flag) == value for flag, value in flags.items())
    )
    return cell["columns"]["tuned"]


def _label(
    axes: Axes, text: str, end: tuple[float, float], name: str, color: str
) -> None:
    """Write a curve's name and its last loss at its end."""
    offset, side = _PLACES[name]
    axes.annotate(
        text,
        xy=end,
        xytext=offset,
        textcoords="offset points",
        ha=side,
        va="center",
        color=color,
        fontsize="medium",
        fontweight="bold" if name == palette.RECIPE else "normal",
    )


def crossing() -> Figure:
    """Draw a blocking sync, and below it fragments that cross during the steps."""
    blocking = methods.get("diloco", sync_interval=INTERVAL)
    beside = methods.get(
        "streaming_diloco",
        sync_interval=INTERVAL,
        num_fragments=FRAGMENTS,
        delay_steps=DELAY_STEPS,
    )
    figure = plots.new_figure(height_in=3.8, width_in=WIDTH_IN)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, FRAGMENTS + 1))

    longest_s = 0.0
    drawn = ((above, blocking, 1), (below, beside, FRAGMENTS))
    for axes, method, num_fragments in drawn:
        timeline = _simulate(method, num_fragments)
        longest_s = max(longest_s, timeline.sim_s)
        trace.draw_timeline(axes, timeline)
        ends = [float(timeline.times_s(step)[0]) for step in range(STEPS)]
        axes.vlines(ends, -0.35, 0.35, color="white", linewidth=0.5)
        axes.set_title(
            f"{method.name}: {STEPS} steps in {timeline.sim_s:.1f} s",
            loc="left",
            fontsize="medium",
        )
        axes.spines[["top", "right"]].set_visible(False)

    below.set_xlim(0, longest_s)
    below.set_xlabel("simulated seconds; white lines are between steps")
    trace.draw_legend(figure)
    return figure


def _simulate(method: methods.Method, num_fragments: int) -> Timeline:
    """Return the timeline of one region; all regions have the same."""
    sizes = (4 * PARAMETERS / num_fragments,) * num_fragments
    work = Workload(sizes, (STEP_S,) * REGIONS)
    topology = uniform(REGIONS, LINK)
    timeline = simulate_method(topology, work, method, STEPS, "direct", sharing="fifo")

    return dataclasses.replace(
        timeline,
        regions=("every region",),
        step_time_s=(STEP_S,),
        marks=tuple((step, seconds[:1]) for step, seconds in timeline.marks),
    )


if __name__ == "__main__":
    with program.usage_errors():
        program.parse(program.own_flags(), sys.argv, __doc__, has_words=False)
    main()
