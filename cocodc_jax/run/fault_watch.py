"""Detect faulty regions and links among elastic regions, while they train."""

import contextlib
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

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
# Of `robust_z`: a step counts as slow above 2.2 times its own past, unless those of the
# others do too.
_STEP_FLOOR = 0.2


class FaultWatch:
    """Evaluates the times of messages and steps, sync by sync.

    Findings go to the console and to a file, with the evidence, when they begin and
    end.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        on_fault: str,
        least_s: float,
        observe: Callable[[bool, Finding, str], None] = lambda *_: None,
    ):
        self._path, self._on_fault = folder / FAULTS_FILE, on_fault
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
        found = self._messages.observe(np.array(measured.seconds))
        found += self._steps.observe(np.array(measured.step_s))
        self._seen |= set(present)
        found = [x for x in found if set(x.where) <= set(present)]
        found += [
            Finding("gone", (r,), np.inf, 0.0, np.inf)
            for r in sorted(self._seen - set(present))
        ]
        named: dict[tuple, Finding] = {(x.kind, x.where): x for x in found}
        self._tell_changes(self._named, named)
        self._named = named
        shunned = {where[0] for kind, where in named if kind in _OF_A_REGION}
        detours = {where for kind, where in named if kind == "link"}
        return (
            frozenset(shunned if self._on_fault == "exclude" else ()),
            frozenset(detours if self._on_fault == "route" else ()),
        )

    def silent(self, silences: Mapping[int, Silence]) -> None:
        """Add which regions are silent; see `elastic.link.Watch`."""
        found = {}
        for region, (seconds, usual) in silences.items():
            ratio = seconds / usual if usual else np.inf
            found[region] = Finding("silent", (region,), seconds, usual, ratio)
        self._tell_changes(self._silent, found)
        self._silent = found

    def _tell_changes(self, before: dict, now: dict) -> None:
        for key in sorted(now.keys() - before.keys()):
            self._tell("begins", now[key])
        for key in sorted(before.keys() - now.keys()):
            self._tell("ends", before[key])

    def _tell(self, what: str, finding: Finding) -> None:
        units = {"slow": "s a step", "silent": "s"}
        text = finding.explain(unit=units.get(finding.kind, "s a message"))
        fragment, start_step = self._last
        line = {
            "fault": what,
            "kind": finding.kind,
            "where": finding.where,
            "fragment": fragment,
            "start_step": start_step,
            "seconds": finite_or_none(finding.seconds),
            "usual": finding.usual,
            "score": finite_or_none(finding.score),
            "time": time.time(),
        }
        with contextlib.suppress(OSError):  # The link's thread goes on.
            append_line(self._path, line)
        say(f"fault {what} at the sync of step {start_step}: {text}")
        self._observe(what == "begins", finding, text)
