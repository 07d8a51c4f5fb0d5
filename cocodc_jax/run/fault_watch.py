"""Detect faulty regions and links among elastic regions, while they train."""

import contextlib
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cocodc_jax.elastic.link import Faulty
from cocodc_jax.elastic.messages import SyncId
from cocodc_jax.elastic.times import Measured, Silence
from cocodc_jax.files import append_line, say
from cocodc_jax.network.faults import Finding, Messages, Regions
from cocodc_jax.train.records import finite_or_none

FAULTS_FILE = "faults.jsonl"
ON_FAULT = ("warn", "exclude", "route")
# Findings about a region, not a link.
_OF_A_REGION = ("sender", "region", "slow")
# Floor of `robust_z`: a region's step counts as slow above 2.2 times its past ones,
# unless the other regions' steps do too.
_STEP_FLOOR = 0.2


class FaultWatch:
    """Evaluates the times of messages and steps, sync by sync.

    When a finding begins or ends, it goes to the console and to a file, with the
    evidence. The file also says why this region left the others (`note_left`).
    """

    def __init__(
        self,
        folder: pathlib.Path,
        on_fault: str,
        least_s: float,
        observe: Callable[[bool, Finding, str], None] = lambda *_: None,
    ):
        self._path = folder / FAULTS_FILE
        self._on_fault = on_fault
        self._observe = observe
        self._messages = Messages(least=least_s)
        self._steps = Regions(floor=_STEP_FLOOR, against_others=True)
        self._named: dict[tuple, Finding] = {}
        self._silent: dict[int, Finding] = {}
        self._seen: set[int] = set()
        self._last: SyncId = (0, 0)

    def __call__(self, measured: Measured, present: Sequence[int]) -> Faulty:
        """Add one sync; see `elastic.link.Watch`."""
        self._last = measured.sync
        self._seen |= set(present)

        findings = [
            *self._messages.observe(np.array(measured.seconds)),
            *self._steps.observe(np.array(measured.step_s)),
        ]
        findings = [x for x in findings if set(x.where) <= set(present)]
        findings += [
            Finding(
                kind="gone", where=(region,), seconds=np.inf, usual=0.0, score=np.inf
            )
            for region in sorted(self._seen - set(present))
        ]
        named: dict[tuple, Finding] = {(x.kind, x.where): x for x in findings}
        self._report_changes(self._named, named)
        self._named = named

        excluded: frozenset[int] = frozenset()
        detours: frozenset[tuple[int, int]] = frozenset()
        if self._on_fault == "exclude":
            excluded = frozenset(w[0] for kind, w in named if kind in _OF_A_REGION)
        if self._on_fault == "route":
            detours = frozenset(where for kind, where in named if kind == "link")
        return excluded, detours

    def silent(self, silences: Mapping[int, Silence]) -> None:
        """Add which regions are silent; see `elastic.link.Watch`."""
        silent = {}
        for region, (seconds, usual) in silences.items():
            ratio = seconds / usual if usual else np.inf
            silent[region] = Finding(
                kind="silent",
                where=(region,),
                seconds=seconds,
                usual=usual,
                score=ratio,
            )

        self._report_changes(self._silent, silent)
        self._silent = silent

    def note_left(self, region: int, reason: str) -> None:
        """Append why this region takes part no more, or until it returns."""
        self._append(fault="left", kind="left", where=(region,), reason=reason)

    def _report_changes(self, before: dict, now: dict) -> None:
        for key in sorted(now.keys() - before.keys()):
            self._report("begins", now[key])
        for key in sorted(before.keys() - now.keys()):
            self._report("ends", before[key])

    def _report(self, change: str, finding: Finding) -> None:
        units = {"slow": "s a step", "silent": "s"}
        text = finding.explain(unit=units.get(finding.kind, "s a message"))

        fragment, start_step = self._last
        self._append(
            fault=change,
            kind=finding.kind,
            where=finding.where,
            fragment=fragment,
            start_step=start_step,
            seconds=finite_or_none(finding.seconds),
            usual=finding.usual,
            score=finite_or_none(finding.score),
        )
        say(f"fault {change} at the sync of step {start_step}: {text}")
        self._observe(change == "begins", finding, text)

    def _append(self, **line: Any) -> None:
        """Append a line to the file, with the time; training goes on if it cannot."""
        with contextlib.suppress(OSError):
            append_line(self._path, line | {"time": time.time()})
