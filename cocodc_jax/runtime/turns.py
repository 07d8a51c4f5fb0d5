"""A run on its way through the events of one step, and what comes out of them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax

from cocodc_jax.runtime.state import RegionState, SyncId, SyncState, TrainState
from cocodc_jax.sync.schedules.base import Applied, Pending

PyTree = Any
Times = tuple[float, float]


class AppliedSync(NamedTuple):
    """One applied sync.

    Attributes:
      fragment_id: which fragment.
      start_step: step it started at.
      apply_step: step it was merged at.
      num_bytes: bytes one region sent for it.
      norm: L2 norm of the mean pseudo-gradient, float32 scalar on its device.
      metrics: the merge's metrics, float32 `[R]` on their devices.
      verdict: who was left out of the mean, int32 `[R]` on its device, see
        `sync.robust`; None where nobody is.
    """

    fragment_id: int
    start_step: int
    apply_step: int
    num_bytes: int
    norm: jax.Array
    metrics: dict[str, jax.Array]
    verdict: jax.Array | None = None


class Turns:
    """Has programs with collectives take turns, where they share a CPU's threads."""

    def __init__(self, are_needed: bool):
        self._are_needed = are_needed
        self._last: PyTree = None

    def wait(self) -> None:
        """Wait for the collectives that were handed out before."""
        if self._are_needed:
            jax.block_until_ready(self._last)

    def took(self, arrays: PyTree) -> None:
        """Remember what was handed out."""
        self._last = arrays


class Observers(Protocol):
    """What answers a schedule."""

    def measure(self, name: str, region: RegionState, sync: SyncState) -> list[float]:
        """Measure a need of `needs.MEASURED_NOW`."""
        ...

    def read(self, sync: SyncState) -> list[Applied]:
        """Read what the schedule has not been told."""
        ...


class Turn:
    """A run on its way through the events of one step."""

    def __init__(
        self,
        programs: Observers,
        state: TrainState,
        batch: PyTree = None,
        times: Times = (0.0, 0.0),
        finished: dict[SyncId, Any] | None = None,
    ):
        """Begin.

        Args:
          programs: that answer the schedule.
          state: at the step.
          batch: the last one trained on, `[R, ...]`, where a merge needs it.
          times: see `SyncPrograms.after_steps`.
          finished: likewise.
        """
        assert state.sync is not None
        self._programs = programs
        self.region, self.sync, self.step = state.region, state.sync, state.step
        self.frozen = state.frozen
        self.batch, self.times = batch, times
        self.finished = finished or {}
        self.bytes_sent = 0
        self.applied: list[AppliedSync] = []
        self.late: list[Pending] = []

    def observe(self, name: str) -> Any:
        """Answer a schedule, see `Schedule.next_event`."""
        if name != "applied":
            return self._programs.measure(name, self.region, self.sync)
        found = self._programs.read(self.sync)
        self.sync = dataclasses.replace(self.sync, observed=())
        return found
