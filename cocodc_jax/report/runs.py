"""Finished runs and their evaluation curves: the step at a loss, the loss at a size."""

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cocodc_jax.files import read_table
from cocodc_jax.report.records import METRICS_FILE, Record, read_records

SUMMARY_FILE = "summary.json"


class DamagedRunError(ValueError):
    """A file of a finished run is not what was written."""


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
    """Join the evaluations of one method's seeds at the steps that all of them have."""
    evals = [{record["step"]: record for record in run.of_kind("eval")} for run in runs]
    steps = sorted(set.intersection(*map(set, evals)))
    if not steps:
        raise ValueError(
            f"the runs of {runs[0].method!r} have no evaluated step in common; "
            "evaluate all of them at the same steps"
        )

    def table(field: str) -> np.ndarray:  # [seeds, points]
        return np.array([[seed[step][field] for step in steps] for seed in evals])

    loss, sent = table("eval_loss"), table("bytes_sent_per_region")
    return Curve(np.array(steps), sent.mean(0), loss.mean(0), loss.min(0), loss.max(0))


def steps_to_loss(
    curve: Run | Iterable[tuple[float, float]], target: float
) -> float | None:
    """Return the step at which an evaluation loss first reaches the target.

    Between two evaluations the loss is taken as linear in the step, so that the answer
    does not depend on which evaluation happens to lie just behind the target. `curve`
    may also be (step, loss) pairs, steps increasing; None where it never gets there.

    >>> steps_to_loss([(0, 4.0), (100, 3.0), (200, 2.0)], 2.5)
    150.0
    """
    before = None
    for step, loss in curve.losses_by("step") if isinstance(curve, Run) else curve:
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
        curve = curve.losses_by("bytes_sent_per_region")
    before = None
    for sent, loss in curve:
        if sent > budget_bytes:
            if before is None:
                return None
            share = (budget_bytes - before[0]) / (sent - before[0])
            return before[1] + share * (loss - before[1])
        before = sent, loss
    return before[1] if before and before[0] == budget_bytes else None
