"""Evaluation curves: of a method's seeds, the step at a loss, the loss at a size."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from cocodc_jax.report.records import Record
from cocodc_jax.report.runs import Run


@dataclasses.dataclass(frozen=True)
class Curve:
    """Evaluation loss over the seeds of one method; all arrays have shape [points].

    Attributes:
      steps: inner steps at which every seed was evaluated.
      bytes_sent: bytes one region had sent by then, mean over seeds.
      mean: loss in nats per token, mean over seeds.
      low: least loss of a seed.
      high: greatest loss of a seed.
    """

    steps: np.ndarray
    bytes_sent: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def eval_curve(runs: Sequence[Run]) -> Curve:
    """Join the evaluations of one method's seeds at the steps that all of them have.

    Args:
      runs: runs of one method, at least one.

    Raises:
      ValueError: no step was evaluated in all of the runs.
    """
    by_step = [
        {record["step"]: record for record in run.of_kind("eval")} for run in runs
    ]
    steps = sorted(set.intersection(*(set(evals) for evals in by_step)))
    if not steps:
        raise ValueError(
            f"the runs of {runs[0].method!r} have no evaluated step in common; "
            "evaluate all of them at the same steps"
        )
    loss = _table(by_step, steps, "eval_loss")
    sent = _table(by_step, steps, "bytes_sent_per_region")
    return Curve(np.array(steps), sent.mean(0), loss.mean(0), loss.min(0), loss.max(0))


def steps_to_loss(
    curve: Run | Iterable[tuple[float, float]], target: float
) -> float | None:
    """Return the step at which an evaluation loss first reaches the target.

    Between two evaluations the loss is taken as linear in the step, so that the answer
    does not depend on which evaluation happens to lie just behind the target.

    Args:
      curve: a run, or (step, loss) pairs, steps increasing.
      target: loss in nats per token.

    Returns:
      Inner steps, or None where the curve never gets there.

    >>> steps_to_loss([(0, 4.0), (100, 3.0), (200, 2.0)], 2.5)
    150.0
    """
    if isinstance(curve, Run):
        curve = [
            (record["step"], record["eval_loss"]) for record in curve.of_kind("eval")
        ]
    before = None
    for step, loss in curve:
        if loss <= target:
            if before is None:
                return float(step)
            share = (before[1] - target) / (before[1] - loss)
            return before[0] + share * (step - before[0])
        before = step, loss
    return None


def loss_at_bytes(
    curve: Run | Iterable[tuple[float, float]], budget_bytes: float
) -> float | None:
    """Return the evaluation loss when a region has sent so many bytes.

    Between two evaluations the loss is taken as linear in the bytes. A region that
    sends nothing more goes on training: of evaluations at the same bytes the last
    counts.

    >>> loss_at_bytes([(10, 4.0), (20, 3.0), (20, 2.5), (40, 2.0)], 30)
    2.25
    >>> loss_at_bytes([(10, 4.0), (20, 3.0)], 5)
    """
    if isinstance(curve, Run):
        curve = [
            (record["bytes_sent_per_region"], record["eval_loss"])
            for record in curve.of_kind("eval")
        ]
    before = None
    for sent, loss in curve:
        if sent > budget_bytes:
            if before is None:
                return None
            share = (budget_bytes - before[0]) / (sent - before[0])
            return before[1] + share * (loss - before[1])
        before = sent, loss
    return before[1] if before and before[0] == budget_bytes else None


def _table(
    by_step: Sequence[dict[int, Record]], steps: Sequence[int], field: str
) -> np.ndarray:
    """Return the values of a field, shape [seeds, points]."""
    return np.array([[evals[step][field] for step in steps] for evals in by_step])
