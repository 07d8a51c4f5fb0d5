"""From curves to conclusions: steps to a perplexity, what beat what, and plots.

Comparisons are paired: a rule and its reference share the seed, so also the first
parameters and every batch, and what is averaged is the ratio within a seed.
"""

import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cocodc_jax.report.plots import COLORS, new_figure, save_png, tidy
from cocodc_jax.report.runs import steps_to_loss

from ...sweeps.cells import Interval
from .jobs import DATA_PARALLEL, DILOCO

STREAMING = "mix_0.5"
# What a curve is drawn for, besides the two best rules.
_ALWAYS = (DATA_PARALLEL, DILOCO, STREAMING, "replay")
_HEAD, _TUNED = ("rule", "delay_steps"), ("inner_lr", "outer_lr", "strength")


def interval(values: Sequence[float]) -> dict[str, float]:
    """Return the mean and half of its 95 % interval; 0 for one value.

    >>> interval([2.0, 2.0])
    {'mean': 2.0, 'half': 0.0}
    """
    found = Interval.of(values)
    return {"mean": found.mean, "half": found.half or 0.0}


def final_loss(losses: Sequence[float | None]) -> float | None:
    """Return the last loss; None where the run diverged, ending above its start."""
    first, last = losses[0], losses[-1]
    return None if first is None or last is None or last > first else last


def summarise(
    jobs: Sequence[dict[str, Any]], steps_per_run: int
) -> list[dict[str, Any]]:
    """One row for each job, against the tuned references."""
    done = {(job["rule"], job["delay_steps"]): job for job in jobs}
    diloco = done.get((DILOCO, 0))
    rows = []
    for job in jobs:
        streaming = done.get((STREAMING, job["delay_steps"]))
        curves = job["losses"].values()
        finals = [x for x in map(final_loss, curves) if x is not None]
        ratios = [r for r in job["correction_ratio"] if r is not None]
        rows.append(
            {key: job[key] for key in (*_HEAD, *_TUNED, "seconds")}
            | {
                "bytes_sent_per_region": job["bytes_sent_per_region"],
                "final_loss": interval(finals) if len(finals) == len(curves) else None,
                "correction_ratio": interval(ratios) if ratios else None,
                "at_edge": at_edge(job),
                "vs_streaming": streaming and _against(job, streaming, steps_per_run),
                "vs_diloco": diloco and _against(job, diloco, steps_per_run),
            }
        )
    return rows


def _against(job: dict, reference: dict, steps_per_run: int) -> dict[str, Any]:
    """Step to what the reference reaches at its end, over the steps it took."""
    counts, differences = [], []
    for seed, curve in job["losses"].items():
        final, target = final_loss(curve), final_loss(reference["losses"][seed])
        if final is None or target is None:
            counts.append(None)
            continue
        pairs = zip(job["steps"], curve, strict=True)
        known = itertools.takewhile(lambda pair: pair[1] is not None, pairs)
        counts.append(steps_to_loss([*known], target))
        differences.append(final - target)
    reached = [count for count in counts if count is not None]
    bounded = [steps_per_run if count is None else count for count in counts]
    has_all = len(differences) == len(counts)
    return {
        "steps": interval(reached) if reached else None,
        "ratio": interval([count / steps_per_run for count in bounded]),
        "reached": len(reached),
        "seeds": len(counts),
        "loss_difference": interval(differences) if has_all else None,
    }


def at_edge(job: dict[str, Any]) -> list[str]:
    """Return which tuned numbers are at an end of their grid."""
    found = []
    for name in _TUNED:
        tried = {trial[name] for trial in job["tuning"]} - {None}
        if len(tried) > 1 and job[name] in (min(tried), max(tried)):
            found.append(name)
    return found


def write_plots(summary: dict[str, Any], folder: pathlib.Path) -> None:
    """Write `ablate_steps.png`, `ablate_loss.png` and `ablate_curves.png`."""
    jobs = {(job["rule"], job["delay_steps"]): job for job in summary["jobs"]}
    steps = ("ratio", 1.0, "steps / steps of Streaming DiLoCo")
    loss = ("loss_difference", 0.0, "final loss - Streaming DiLoCo's (nats)")
    for name, height, draw, *given in (
        ("steps", 4.6, _rank, *steps),
        ("loss", 4.6, _rank, *loss),
        ("curves", 3.6, _draw_curves, jobs),
    ):
        figure = _panels(summary, height, draw, *given)
        save_png(figure, str(folder / f"ablate_{name}.png"))


def _panels(
    summary: dict[str, Any],
    height: float,
    draw: Callable[..., None],
    *given: Any,
) -> Figure:
    """Draw the rows of each delay into a panel of its own."""
    interval, rows = summary["settings"]["sync_interval"], summary["rows"]
    delays = sorted({row["delay_steps"] for row in rows} - {0})
    num = -(-len(delays) // 2)
    figure = new_figure(height * num, 11.0)
    panels = figure.subplots(num, min(2, len(delays)), squeeze=False)
    for axes, delay in zip(panels.flat, delays, strict=False):
        draw(axes, [row for row in rows if row["delay_steps"] == delay], *given)
        axes.set_title(f"tau/H = {delay / interval:g}", fontsize="medium")
    for axes in panels.flat[len(delays) :]:
        axes.remove()
    return figure


def _rank(axes: Axes, rows: list[dict], measure: str, even: float, what: str) -> None:
    """Draw a line for each rule, with its interval; least on top."""
    known = [x for x in rows if (x["vs_streaming"] or {}).get("loss_difference")]
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
    values = [row["vs_streaming"][measure]["mean"] for row in known]
    _cut_off_outliers(axes, values, even)
    axes.set_yticks(range(len(known)), [row["rule"] for row in known], fontsize="small")
    axes.set_xlabel(what)
    tidy(axes, "x")


def _cut_off_outliers(axes: Axes, values: list[float], even: float) -> None:
    """Leave what is very far off outside, its value in words, so that others show."""
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


def _draw_curves(axes: Axes, rows: list[dict[str, Any]], jobs: dict) -> None:
    """Draw the loss against steps, mean over test seeds, second half of each run."""
    known = [row for row in rows if row["final_loss"]]
    known.sort(key=lambda row: row["final_loss"]["mean"])
    best = [row["rule"] for row in known if row["rule"] not in _ALWAYS][:2]
    for index, name in enumerate((*_ALWAYS, *best)):
        job = jobs.get((name, rows[0]["delay_steps"])) or jobs.get((name, 0))
        if job is not None:
            steps, losses = np.array(job["steps"]), np.array([*job["losses"].values()])
            late, mean = steps >= steps[-1] / 2, losses.astype(float).mean(0)
            color = COLORS[index % len(COLORS)]
            axes.plot(steps[late], mean[late], color=color, linewidth=1.6, label=name)
    axes.set_xlabel("inner steps")
    axes.set_ylabel("evaluation loss (nats per token)")
    axes.legend(frameon=False, fontsize="small")
    tidy(axes)
