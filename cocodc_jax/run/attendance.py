"""What a region reports to the others each turn, and what its folder records of it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from cocodc_jax.core.state import TrainState
from cocodc_jax.elastic import inside
from cocodc_jax.elastic.link import LeftBehindError, Link
from cocodc_jax.program.region_program import Output, RegionProgram
from cocodc_jax.train import joining
from cocodc_jax.train.hooks import Hooks

SYNCS_FILE, JOINS_FILE = "syncs.jsonl", "joins.jsonl"
_TAIL_BYTES = 65536  # Enough to contain the last full line.


class Attendance:
    """One region's part in a run, from its start to its end.

    Attributes:
      step: the last one that was reported to the others.
    """

    def __init__(
        self,
        program: RegionProgram,
        link: Link | inside.Speaker | inside.Listener,
        folder: pathlib.Path,
        digests: bool,
    ):
        """Open the region's own folder for writing."""
        self._program, self._exchange, self._link = program, program.elastic, link
        self._folder, self._digests = folder, digests
        self._view, self.step = link.view, 0
        self._shared: Any = None
        self._merged: Callable[[bool], None] = lambda own_counts: None

    @property
    def num_members(self) -> int:
        """Regions that take part, as far as this one knows."""
        return len(self._link.view.seats)

    def told_by(self, hooks: Hooks, merged: Callable[[bool], None]) -> Hooks:
        """Return a loop's hooks, extended to report to the other regions."""
        self._merged = merged
        return dataclasses.replace(
            hooks, handed_out=self.handed_out, stopping=self.leave
        )

    def leave(self) -> None:
        """Announce that this region was asked to stop."""
        print(
            f"asked to stop: leaving the other regions at step {self.step}",
            file=sys.stderr,
            flush=True,
        )
        self._link.leave()

    def finish(self) -> None:
        """Wait until the other regions have all they need of this one to end too."""
        self._link.finish(self._link.place.timing.grace_s)

    def handed_out(self, state: TrainState, output: Output) -> None:
        """Report this region's progress to the others, and admit regions that wait."""
        assert state.sync is not None
        starts = [start for _, start in state.sync.in_flight]
        self.step, oldest = state.step, min(starts, default=state.step)
        self._note_shared(state)
        try:
            waiting = self._link.at(oldest)
        except LeftBehindError as error:
            error.state = joining.Carried(state, self._shared)
            raise
        for region, boot in waiting.items():
            copy = joining.copy_of(self._program, state)
            self._link.let_in(region, boot, copy, oldest)
        for sync in output.syncs:
            k = sync.fragment_id
            regions = self._exchange.in_mean.pop((k, sync.start_step), None)
            if regions is not None:
                self._merged(self._exchange.region in regions)
            line = {
                "fragment": k,
                "start_step": sync.start_step,
                "apply_step": sync.apply_step,
                "epoch": self._link.view.epoch,
                "regions": regions,
                "time": time.time(),
            }
            if self._digests:
                line["digest"] = _digest(state.sync.outer.params[k])
            self._write(SYNCS_FILE, line)

    def _note_shared(self, state: TrainState) -> None:
        """Keep the last outer parameters that both parts of a cut network share.

        Those are from the end of the turn in which regions were first missed; it is not
        yet known which part goes on.
        """
        assert state.sync is not None
        before, self._view = self._view, self._link.view
        if before.seats.keys() - self._view.seats.keys():
            if self._shared is None:
                self._shared = jax.tree.map(jax.numpy.copy, state.sync.outer.params)
        elif self._view.seats.keys() - before.seats.keys():
            self._shared = None

    def joined(self, line: dict[str, Any]) -> None:
        """Record that this region takes part now."""
        self._write(JOINS_FILE, line)

    def _write(self, name: str, line: dict[str, Any]) -> None:
        with (self._folder / name).open("a") as file:
            file.write(json.dumps(line) + "\n")


def _digest(fragment: Any) -> str:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(fragment):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]


def last_merge(folder: pathlib.Path) -> int:
    """Return the last step whose merge a region has recorded, 0 for none."""
    try:
        with (folder / SYNCS_FILE).open("rb") as file:
            file.seek(-min(_TAIL_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return 0
    for line in reversed(lines[:-1]):  # A kill may have cut off the last.
        with contextlib.suppress(ValueError, KeyError):
            return json.loads(line)["apply_step"]
    return 0
