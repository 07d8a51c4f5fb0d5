"""From curves to conclusions: steps to a perplexity, intervals, what beat what.

The interval of a mean over n seeds is Student's, mean +- t(0.975, n - 1) s / sqrt(n).
Comparisons are paired: a rule and its reference share the seed, so also the first
parameters and every batch, and what is averaged is the ratio within a seed.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any, cast

from cocodc_jax.report.runs import steps_to_loss

from .jobs import DILOCO

STREAMING = "mix_0.5"
_HEAD, _TUNED = ("rule", "delay_steps"), ("inner_lr", "outer_lr", "strength")

# Student's t at 0.975 for 1 to 30 degrees of freedom.
_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201,
    2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074,
    2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and half width of its 95 % confidence interval; 0 for one value.

    >>> interval([2.0, 2.0])
    {'mean': 2.0, 'half': 0.0}
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"mean": mean, "half": 0.0}
    student = _STUDENT[min(len(values) - 1, len(_STUDENT)) - 1]
    half = student * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "half": half}


def steps_to(
    steps: Sequence[int], losses: Sequence[float | None], target: float
) -> float | None:
    """Return the first step at which the loss is at most `target`."""
    pairs = zip(steps, losses, strict=True)
    curve = [*itertools.takewhile(lambda pair: pair[1] is not None, pairs)]
    return steps_to_loss(cast(list[tuple[float, float]], curve), target)


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
        counts.append(steps_to(job["steps"], curve, target))
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
