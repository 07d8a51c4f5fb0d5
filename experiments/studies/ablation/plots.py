"""The ablation as pictures: steps and loss against Streaming DiLoCo, and curves."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cocodc_jax.report.plots import COLORS, save_png

from .jobs import DATA_PARALLEL, DILOCO
from .results import STREAMING

# What a curve is drawn for, besides the references and the two best rules.
_ALWAYS = (DATA_PARALLEL, DILOCO, STREAMING, "replay")


def write(summary: dict[str, Any], folder: pathlib.Path) -> None:
    """Write `ablate_steps.png`, `ablate_loss.png` and `ablate_curves.png`."""
    save_png(_ranking(summary, "ratio", "steps / steps of Streaming DiLoCo", 1.0),
             str(folder / "ablate_steps.png"))  # fmt: skip
    save_png(
        _ranking(
            summary, "loss_difference", "final loss - Streaming DiLoCo's (nats)", 0.0
        ),
        str(folder / "ablate_loss.png"),
    )
    save_png(_curves(summary), str(folder / "ablate_curves.png"))


def _delays(summary: dict[str, Any]) -> list[int]:
    return sorted({row["delay_steps"] for row in summary["rows"]} - {0})


def _rows(summary: dict[str, Any], delay_steps: int) -> list[dict[str, Any]]:
    return [row for row in summary["rows"] if row["delay_steps"] == delay_steps]


def _title(summary: dict[str, Any], delay_steps: int) -> str:
    return f"tau/H = {delay_steps / summary['settings']['sync_interval']:g}"


def _ranking(summary: dict[str, Any], measure: str, label: str, even: float) -> Figure:
    """One panel a delay, one line a rule, with its interval; least on top."""
    delays = _delays(summary)
    figure = Figure(figsize=(11.0, 4.6 * -(-len(delays) // 2)), layout="constrained")
    panels = figure.subplots(-(-len(delays) // 2), min(2, len(delays)), squeeze=False)
    for axes, delay in zip(panels.flat, delays, strict=False):
        _rank(axes, _rows(summary, delay), measure, even)
        axes.set_title(_title(summary, delay), fontsize="medium")
        axes.set_xlabel(label)
    for axes in panels.flat[len(delays) :]:
        axes.remove()
    return figure


def _rank(axes: Axes, rows: list[dict[str, Any]], measure: str, even: float) -> None:
    known = [
        row
        for row in rows
        if row["vs_streaming"] and row["vs_streaming"]["loss_difference"]
    ]
    known.sort(key=lambda row: -row["vs_streaming"]["loss_difference"]["mean"])
    for place, row in enumerate(known):
        against = row["vs_streaming"]
        is_whole = measure != "ratio" or against["reached"] == against["seeds"]
        axes.errorbar(
            against[measure]["mean"],
            place,
            xerr=against[measure]["half"],
            fmt="o",
            markersize=5,
            capsize=2,
            color=COLORS[3] if row["rule"] == STREAMING else COLORS[2],
            markerfacecolor=None if is_whole else "white",
        )
    axes.axvline(even, color="#999999", linewidth=0.8)
    _cut_off_outliers(
        axes, [row["vs_streaming"][measure]["mean"] for row in known], even
    )
    axes.set_yticks(range(len(known)), [row["rule"] for row in known], fontsize="small")
    axes.grid(visible=True, axis="x", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _cut_off_outliers(axes: Axes, values: list[float], even: float) -> None:
    """Leaves what is very far off outside, its value in words, so that others show."""
    usual = 8 * float(np.median(np.abs(np.array(values) - even)))
    far = [place for place, value in enumerate(values) if value - even > usual > 0]
    if not far:
        return
    axes.set_xlim(right=even + usual)
    for place in far:
        axes.annotate(
            f"{values[place]:+.2f}, off the scale",
            xy=(even + usual, place),
            horizontalalignment="right",
            verticalalignment="center",
            fontsize="small",
        )


def _curves(summary: dict[str, Any]) -> Figure:
    """Loss against steps, mean over test seeds, second half of each run."""
    delays = _delays(summary)
    figure = Figure(figsize=(11.0, 3.6 * -(-len(delays) // 2)), layout="constrained")
    panels = figure.subplots(-(-len(delays) // 2), min(2, len(delays)), squeeze=False)
    jobs = {(job["rule"], job["delay_steps"]): job for job in summary["jobs"]}
    for axes, delay in zip(panels.flat, delays, strict=False):
        known = [row for row in _rows(summary, delay) if row["final_loss"]]
        known.sort(key=lambda row: row["final_loss"]["mean"])
        best = [row["rule"] for row in known if row["rule"] not in _ALWAYS][:2]
        for index, name in enumerate((*_ALWAYS, *best)):
            job = jobs.get((name, delay)) or jobs.get((name, 0))
            if job is not None:
                _draw(axes, job, COLORS[index % len(COLORS)])
        axes.set_title(_title(summary, delay), fontsize="medium")
        axes.set_xlabel("inner steps")
        axes.set_ylabel("evaluation loss (nats per token)")
        axes.legend(frameon=False, fontsize="small")
        axes.grid(visible=True, color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels.flat[len(delays) :]:
        axes.remove()
    return figure


def _draw(axes: Axes, job: dict[str, Any], color: str) -> None:
    steps = np.array(job["steps"])
    losses = np.array([*job["losses"].values()], dtype=float)
    late = steps >= steps[-1] / 2
    axes.plot(
        steps[late], losses.mean(0)[late], color=color, linewidth=1.6, label=job["rule"]
    )
