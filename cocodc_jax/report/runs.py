"""A finished run as plots and comparisons read it, and runs grouped by method."""

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
