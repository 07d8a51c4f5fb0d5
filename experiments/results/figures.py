"""Draws pictures of README.md and docs/results from results in the repository.

    python -m experiments.results.figures

writes to this folder: readme_crossing.png, for README.md, with DiLoCo and Streaming
DiLoCo on one simulated network; and readme_loss_by_bytes.png, for docs/results, from
compare_all.json. The simulation takes a second and is the same on every machine.
"""

import dataclasses
import json
import pathlib
import sys

from matplotlib.figure import Figure

from cocodc_jax import methods
from cocodc_jax.network import trace
from cocodc_jax.network.links import Link, uniform
from cocodc_jax.network.simulator import simulate_method
from cocodc_jax.network.timeline import Timeline
from cocodc_jax.network.workload import Workload
from cocodc_jax.report import plots, points

from .. import program

RESULTS = pathlib.Path(__file__).parent

# As in docs/results/networks.md: the tiny preset, four regions, 20 Mbit/s, 50 ms.
PARAMETERS = 838_784
REGIONS = 4
STEP_S = 0.25
STEPS = 100
LINK = Link(bandwidth_gbps=0.02, latency_s=0.05)
INTERVAL = 40
FRAGMENTS = 4
DELAY_STEPS = 5


def main(folder: pathlib.Path = RESULTS) -> None:
    """Draw both pictures."""
    comparison = json.loads((RESULTS / "compare_all.json").read_text())
    figure = points.last_loss_by_bytes(comparison["methods"])
    plots.save_png(figure, str(folder / "readme_loss_by_bytes.png"))
    plots.save_png(crossing(), str(folder / "readme_crossing.png"))


def crossing() -> Figure:
    """Draw a blocking sync, and below it fragments that cross during the steps."""
    blocking = methods.get("diloco", sync_interval=INTERVAL)
    beside = methods.get(
        "streaming_diloco",
        sync_interval=INTERVAL,
        num_fragments=FRAGMENTS,
        delay_steps=DELAY_STEPS,
    )
    figure = Figure(figsize=(plots.WIDTH_IN, 3.4), layout="constrained")
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
