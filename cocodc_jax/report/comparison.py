"""Finished runs, and their comparison: ratios, and the frontier of bytes and loss."""

import dataclasses
import os
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cocodc_jax.files import read_table
from cocodc_jax.report.records import METRICS_FILE, Record, read_records

SUMMARY_FILE = "summary.json"

# What a row is made of, from `summary.json`.
MEASURES = (
    "eval_loss",
    "eval_perplexity",
    "eval_loss_outer",
    "region_drift",
    "outer_bytes",
    "bytes_sent_per_region",
    "stall_seconds",
    "exposed_share",
    "goodput",
    "tokens_per_second",
    "seconds",
    "correction_ratio",
)


class DamagedRunError(ValueError):
    """A file of a finished run is damaged."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One method trained once.

    Attributes:
      method: name of the method; runs of one method differ in their seed.
      seed: seed of the run.
      records: what `metrics.jsonl` holds, in order.
      summary: what `summary.json` holds; losses in nats per token, bytes, seconds.
    """

    method: str
    seed: int
    records: Sequence[Record]
    summary: Mapping[str, Any]

    def of_kind(self, kind: str) -> list[Record]:
        """Return the records of one kind, in order."""
        return [record for record in self.records if record["kind"] == kind]

    def losses_by(self, field: str) -> list[tuple[float, float]]:
        """Return (field, loss) of each evaluation, in order."""
        return [(record[field], record["eval_loss"]) for record in self.of_kind("eval")]


def load_run(workdir: str | os.PathLike[str]) -> Run:
    """Read `summary.json` and `metrics.jsonl` of a finished run.

    Raises:
      FileNotFoundError: the run has not finished.
      DamagedRunError: one of the files is damaged; names it.
    """
    directory = pathlib.Path(workdir)
    try:
        summary = read_table(directory / SUMMARY_FILE)
        records = read_records(directory / METRICS_FILE)
    except ValueError as error:
        raise DamagedRunError(str(error)) from error

    run = Run(summary["method"], summary["seed"], records, summary)
    last = max((record["step"] for record in run.of_kind("eval")), default=0)
    if summary.get("eval_loss") is not None and last != summary["steps"]:
        raise DamagedRunError(
            f"{directory / METRICS_FILE} ends with the evaluation of step {last}, but "
            f"the run at step {summary['steps']}: it was cut; delete the folder"
        )

    return run


def by_method(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Group runs by method, methods in the order of their first run."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.method, []).append(run)
    return groups


@dataclasses.dataclass(frozen=True)
class Curve:
    """Evaluation loss over the seeds of one method; all arrays have shape [points]."""

    steps: np.ndarray  # Inner steps at which every seed was evaluated.
    bytes_sent: np.ndarray  # Bytes one region had sent by then, mean over seeds.
    mean: np.ndarray  # Loss in nats per token, mean over seeds.
    low: np.ndarray  # Least loss of a seed.
    high: np.ndarray  # Greatest loss of a seed.


def eval_curve(runs: Sequence[Run]) -> Curve:
    """Return one method's curve over its seeds, at the steps that all seeds have."""
    evals = [{record["step"]: record for record in run.of_kind("eval")} for run in runs]
    steps = sorted(set.intersection(*map(set, evals)))
    if not steps:
        raise ValueError(
            f"the runs of {runs[0].method!r} have no evaluated step in common; "
            "evaluate all of them at the same steps"
        )

    def table(field: str) -> np.ndarray:  # [seeds, points]
        return np.array([[seed[step][field] for step in steps] for seed in evals])

    loss = table("eval_loss")
    sent = table("bytes_sent_per_region")
    return Curve(
        steps=np.array(steps),
        bytes_sent=sent.mean(0),
        mean=loss.mean(0),
        low=loss.min(0),
        high=loss.max(0),
    )


def steps_to_loss(
    curve: Run | Iterable[tuple[float, float]], target: float
) -> float | None:
    """Return the step at which an evaluation loss first reaches the target.

    Between two evaluations the loss is assumed to be linear in the step, so the result
    does not depend on how soon after reaching the target an evaluation came. `curve`
    may also be (step, loss) pairs, steps increasing. None if it never reaches the
    target.

    >>> steps_to_loss([(0, 4.0), (100, 3.0), (200, 2.0)], 2.5)
    150.0
    """
    if isinstance(curve, Run):
        curve = curve.losses_by("step")

    before = None
    for step, loss in curve:
        if loss <= target:
            if before is None:
                return float(step)
            share = (before[1] - target) / (before[1] - loss)
            return before[0] + share * (step - before[0])
        before = (step, loss)
    return None


def loss_at_bytes(
    curve: Run | Iterable[tuple[float, float]], budget_bytes: float
) -> float | None:
    """Return the evaluation loss when a region has sent so many bytes.

    Between two evaluations the loss is assumed to be linear in the bytes. Of several
    evaluations at the same bytes, as of a region that sends nothing more, the last
    counts.

    >>> loss_at_bytes([(10, 4.0), (20, 3.0), (20, 2.5), (40, 2.0)], 30)
    2.25
    >>> loss_at_bytes([(10, 4.0), (20, 3.0)], 5)
    """
    if isinstance(curve, Run):
        curve = curve.losses_by("bytes_sent_per_region")
    before = None
    for sent, loss in curve:
        if sent > budget_bytes:
            if before is None:
                return None
            share = (budget_bytes - before[0]) / (sent - before[0])
            return before[1] + share * (loss - before[1])
        before = (sent, loss)

    return before[1] if before and before[0] == budget_bytes else None


def compare(
    runs: Sequence[Run],
    target_method: str | None = None,
    diverged: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the content of `comparison.json`.

    Args:
      runs: at least one, each method with the same seeds.
      target_method: the method whose mean final loss is the target; None is the one
        with the greatest. If it sends anything, all are compared at its bytes.
      diverged: methods without a run, because one of theirs became NaN or infinite, and
        the error.

    Returns:
      "methods": for each method, in the order given, its "seeds", its "runs" (their
      summaries), and for every measure its mean and half range over seeds, or None
      if a method has no such quantity. "target_loss" is the greatest of the methods'
      mean final losses, so that every method reaches it, or that of "target_method";
      "steps_to_target" is the mean step at which a method reaches it. "equal_bytes" are
      the bytes that a region has sent by the last evaluation of "equal_bytes_method",
      which is the target method or else, of the methods that send, the one that sends
      the least (the least of its seeds; None if no method sends);
      "loss_at_equal_bytes" is a method's loss there (`loss_at_bytes`), None if a seed's
      evaluations end before it; "evaluated_bytes" are the bytes at the first and the
      last evaluation that all of its seeds span. "ratios" are to the first method:
      "bytes" and "steps_to_target", None if a seed of either misses the target.
      "diverged" is the argument.
    """
    groups = by_method(runs)
    rows = {name: _row(group) for name, group in groups.items()}
    losses = {name: row["eval_loss"]["mean"] for name, row in rows.items()}
    target = losses[target_method] if target_method else max(losses.values())

    sent = {}
    for name, row in rows.items():
        _, last_bytes = row["evaluated_bytes"]
        if last_bytes > 0:
            sent[name] = last_bytes
    least = min(sent, key=sent.__getitem__, default=None)
    equal_bytes_method = target_method if target_method in sent else least
    budget = None if equal_bytes_method is None else sent[equal_bytes_method]

    first = next(iter(rows.values()))
    for name, group in groups.items():
        row = rows[name]
        steps = [steps_to_loss(run, target) for run in group]
        reached = [step for step in steps if step is not None]
        # A seed worse than its method's mean may miss a target at that mean.
        row["seeds_at_target"] = len(reached)
        row["steps_to_target"] = statistics.fmean(reached) if reached else None
        row["loss_at_equal_bytes"] = None
        if budget is not None:
            at_budget = [loss_at_bytes(run, budget) for run in group]
            row["loss_at_equal_bytes"] = spread(at_budget)

        # Means over other seeds than the first method's are not comparable.
        steps_ratio = None
        if all(r["seeds_at_target"] == len(r["seeds"]) for r in (row, first)):
            steps_ratio = _ratio(row["steps_to_target"], first["steps_to_target"])
        key = "bytes_sent_per_region"
        row["ratios"] = {
            "bytes": _ratio(row[key]["mean"], first[key]["mean"]),
            "steps_to_target": steps_ratio,
        }

    return {
        "target_method": target_method,
        "target_loss": target,
        "equal_bytes_method": equal_bytes_method,
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

    label: str  # The configuration in a few words.
    family: str  # Its method; points of one method have one marker and color.
    bytes_per_step: float  # That a region sends, above 0.
    loss: float  # Nats per token.
    half: float = 0.0  # Half of the loss's interval, 0 if unknown.


def pareto(points: Sequence[Point]) -> list[int]:
    """Return the indices of the points on the frontier, by bytes.

    A point is on the frontier if no other one has less loss for at most its bytes. Of
    points with the same bytes the one with the least loss counts; of equal ones the
    first.

    >>> at = lambda sent, loss: Point("", "", sent, loss)
    >>> pareto([at(4, 2.0), at(1, 3.0), at(2, 3.0), at(8, 1.5)])
    [1, 0, 3]
    """
    places = [(point.bytes_per_step, point.loss) for point in points]
    frontier: list[int] = []
    for i in sorted(range(len(places)), key=places.__getitem__):
        if not frontier or points[i].loss < points[frontier[-1]].loss:
            frontier.append(i)
    return frontier
