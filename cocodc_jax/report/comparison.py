"""Several runs side by side: a row a method, ratios, the points that nothing beats."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cocodc_jax.report.runs import Run, by_method, loss_at_bytes, steps_to_loss

# What a row is made of, from `summary.json`.
MEASURES = (
    "eval_loss", "eval_perplexity", "eval_loss_outer", "region_drift", "outer_bytes",
    "bytes_sent_per_region", "stall_seconds", "exposed_share", "goodput",
    "tokens_per_second", "seconds", "correction_ratio",
)  # fmt: skip


def compare(
    runs: Sequence[Run],
    target_method: str | None = None,
    diverged: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Make what `comparison.json` holds.

    Args:
      runs: at least one, each method with the same seeds.
      target_method: whose mean final loss is the target; None takes the greatest. Its
        bytes are those that all are compared at, if it sends any.
      diverged: methods that have no run, as one of theirs became NaN or infinite, with
        what was said then.

    Returns:
      "methods": for each method, in the order given, its "seeds", its "runs" (their
      summaries), and for every measure its mean and half range over seeds, or None
      where a method has no such quantity. "target_loss" is the greatest of the
      methods' mean final losses, so that every method reaches it, or that of
      "target_method"; "steps_to_target" the mean step at which a method does.
      "equal_bytes" is what a region has sent by the last evaluation of
      "equal_bytes_method", the target or else the one that sends the least but
      something (the least of its seeds; None where nobody sends);
      "loss_at_equal_bytes" a method's loss there (`runs.loss_at_bytes`), None where
      a seed's evaluations do not reach; "evaluated_bytes" the bytes at the first and
      the last evaluation that all of its seeds span. "ratios" are to the first method:
      "bytes" and "steps_to_target". "diverged" is as given.
    """
    groups = by_method(runs)
    rows = {name: _row(group) for name, group in groups.items()}
    losses = {name: row["eval_loss"]["mean"] for name, row in rows.items()}
    target = losses[target_method] if target_method else max(losses.values())
    sent = {name: row["evaluated_bytes"][1] for name, row in rows.items()}
    sent = {name: size for name, size in sent.items() if size > 0}
    whose = target_method
    if whose not in sent:
        whose = min(sent, key=sent.__getitem__, default=None)
    budget = None if whose is None else sent[whose]
    first = next(iter(rows.values()))
    for name, group in groups.items():
        row = rows[name]
        steps = [steps_to_loss(run, target) for run in group]
        reached = [step for step in steps if step is not None]
        # A seed worse than its method's mean may miss a target at that mean.
        row["seeds_at_target"] = len(reached)
        row["steps_to_target"] = statistics.fmean(reached) if reached else None
        row["loss_at_equal_bytes"] = budget and spread(
            [loss_at_bytes(run, budget) for run in group]
        )
        key = "bytes_sent_per_region"
        row["ratios"] = {
            "bytes": _ratio(row[key]["mean"], first[key]["mean"]),
            "steps_to_target": _ratio(row["steps_to_target"], first["steps_to_target"]),
        }
    return {
        "target_method": target_method,
        "target_loss": target,
        "equal_bytes_method": whose,
        "equal_bytes": budget,
        "methods": rows,
        "diverged": dict(diverged or {}),
    }


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Return mean and half the range over seeds; None if any value is missing.

    >>> spread([1.0, 2.0, 1.5])
    {'mean': 1.5, 'half_range': 0.5}
    """
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return None
    half_range = (max(known) - min(known)) / 2
    return {"mean": statistics.fmean(known), "half_range": half_range}


def _row(runs: Sequence[Run]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "seeds": [run.seed for run in runs],
        "runs": [dict(run.summary) for run in runs],
    }
    for measure in MEASURES:
        row[measure] = spread([run.summary[measure] for run in runs])
    evals = [run.losses_by("bytes_sent_per_region") for run in runs]
    row["evaluated_bytes"] = [max(x[0][0] for x in evals), min(x[-1][0] for x in evals)]
    return row


def _ratio(value: float | None, reference: float | None) -> float | None:
    if value is None or not reference:
        return None
    return value / reference


@dataclasses.dataclass(frozen=True)
class Point:
    """A configuration on the plane of bytes and loss."""

    label: str  # What it is, in a few words.
    family: str  # Method; points of one have one marker and color.
    bytes_per_step: float  # That a region sends, above 0.
    loss: float  # Nats per token.
    half: float = 0.0  # Half of the loss's interval, 0 if unknown.


def pareto(points: Sequence[Point]) -> list[int]:
    """Return the indices of the points on the frontier, by bytes.

    No other point has less loss for at most the bytes of one of these. Of points with
    the same bytes the one of least loss counts; of equal ones the first.

    >>> at = lambda sent, loss: Point("", "", sent, loss)
    >>> pareto([at(4, 2.0), at(1, 3.0), at(2, 3.0), at(8, 1.5)])
    [1, 0, 3]
    """
    order = sorted(
        range(len(points)), key=lambda i: (points[i].bytes_per_step, points[i].loss)
    )
    found: list[int] = []
    for i in order:
        if not found or points[i].loss < points[found[-1]].loss:
            found.append(i)
    return found
