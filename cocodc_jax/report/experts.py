"""Plot how regions use a mixture's experts, from the records of `train.routing`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cocodc_jax._extras import extra
from cocodc_jax.report import palette
from cocodc_jax.report.comparison import Run, by_method
from cocodc_jax.report.plots import new_figure, tidy

with extra("report"):
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

CAPTION = (
    "Experts. Above: how far regions' loads are from their mean (0: all regions use "
    "the same experts), and experts that no region gave a token, of all layers; means "
    "over seeds. Below, of the first seed and the last quarter of the records: each "
    "expert's load in each region, over that of an even split."
)


def figures(runs: Sequence[Run]) -> dict[str, tuple[Figure, str]]:
    """Return the plot of routing and its caption by name; none for dense models."""
    groups = by_method(run for run in runs if run.of_kind("experts"))
    if not groups:
        return {}

    maps: dict[str, np.ndarray] = {}
    for name, group in groups.items():
        load_RNE = loads(group[0])
        if load_RNE is not None:
            maps[name] = load_RNE

    heights = [2.6, *(0.5 + 0.2 * len(load) for load in maps.values())]
    figure = new_figure(sum(heights))
    parts = figure.subfigures(len(heights), height_ratios=heights, squeeze=False)
    _draw_lines(parts[0, 0], groups)
    highest = max((load.max() for load in maps.values()), default=1)

    for part, (name, load_RNE) in zip(parts[1:, 0], maps.items(), strict=True):
        _draw_map(part, name, load_RNE, highest)
    return {"experts": (figure, CAPTION)}


def loads(run: Run) -> np.ndarray | None:
    """Return loads `[R, layers, E]` relative to an even split; None if too many.

    They are means over the last quarter of a run's records.
    """
    records = [r for r in run.of_kind("experts") if "load_regions" in r]
    if not records:
        return None
    last = records[-max(1, len(records) // 4) :]
    load_RNE = np.mean([r["load_regions"] for r in last], axis=0)
    return load_RNE / load_RNE.mean(axis=2, keepdims=True)


def _draw_lines(part: Any, groups: Mapping[str, Sequence[Run]]) -> None:
    left, right = part.subplots(1, 2)
    shades = palette.colors(groups)
    for axes, key in ((left, "divergence"), (right, "dead")):
        for name, group in groups.items():
            records = [run.of_kind("experts") for run in group]
            steps = [record["step"] for record in records[0]]
            values = [[record[key] for record in of_run] for of_run in records]
            mean = np.mean(values, axis=0)
            axes.plot(steps, mean, color=shades[name], linewidth=1.6, label=name)
        axes.set_xlabel("inner steps")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        tidy(axes)

    left.set_title("divergence between regions", fontsize="medium")
    right.set_title("dead experts", fontsize="medium")
    lines, labels = left.get_legend_handles_labels()
    part.legend(lines, labels, loc="outside upper center", ncols=4, frameon=False)


def _draw_map(part: Any, name: str, load_RNE: np.ndarray, highest: float) -> None:
    num_regions, num_layers, num_experts = load_RNE.shape
    axes = part.subplots()
    flat = load_RNE.reshape(num_regions, -1)
    image = axes.imshow(flat, aspect="auto", cmap="Blues", vmin=0, vmax=highest)

    for layer in range(1, num_layers):
        axes.axvline(layer * num_experts - 0.5, color="#333333", linewidth=1)
    middles = num_experts * (np.arange(num_layers) + 0.5) - 0.5
    axes.set_title(name, fontsize="medium", loc="left")
    axes.set_xticks(middles, [f"layer {n}" for n in range(num_layers)])
    axes.set_yticks(range(num_regions), [f"region {m}" for m in range(num_regions)])
    axes.tick_params(length=0)
    part.colorbar(image, ax=axes)
