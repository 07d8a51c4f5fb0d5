"""What the loop calls as it goes, and what it gives back at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from cocodc_jax.core.state import TrainState
from cocodc_jax.program.region_program import Output
from cocodc_jax.train.records import Record


class Clock(NamedTuple):
    """What the clock says after a turn, for progress bars and timing files.

    Attributes:
      step: inner steps whose losses were read.
      loss: mean over regions at that step.
      wall_s: seconds since training began in this process.
      tokens_per_second: of all regions, from the end of the turn before to that of this
        one; evaluations and checkpoints are left out.
      stall_s: seconds regions have waited for an outer fragment so far.
      in_flight: fragments on their way.
      bytes_sent: bytes one region has sent.
    """

    step: int
    loss: float
    wall_s: float
    tokens_per_second: float
    stall_s: float
    in_flight: int
    bytes_sent: int


@dataclasses.dataclass(frozen=True)
class Hooks:
    """What the loop calls; all optional.

    Attributes:
      record: takes each record, in order: kinds "train", "sync" and "eval".
      clock: takes a `Clock` after each turn.
      snapshot: what to keep with a checkpoint, JSON-able: given the sums of the
        records so far, this process's own, it adds positions (data, files).
      should_stop: asked every turn; True ends the run early, after a checkpoint.
      stopping: called then, once all that was on its way is there, before it is saved.
      handed_out: takes the state and the output of every turn, still on their devices.
      of_all: makes one list of what every process has to say, in their order.
    """

    record: Callable[[Record], None] = lambda record: None
    clock: Callable[[Clock], None] = lambda clock: None
    snapshot: Callable[[dict], dict] = lambda progress: {"progress": progress}
    should_stop: Callable[[], bool] = lambda: False
    stopping: Callable[[], None] = lambda: None
    handed_out: Callable[[TrainState, Output], None] = lambda state, output: None
    of_all: Callable[[Any], list] = lambda own: [own]


NO_HOOKS = Hooks()


class Result(NamedTuple):
    """A finished run.

    Attributes:
      state: after the last step.
      last_eval: the last "eval" record, None if nothing was evaluated.
      correction_ratio: mean over all syncs, None where nothing is compensated.
      seconds: wall time in the loop, evaluation and checkpoints included.
      stall_seconds: of it, time in which regions waited for an outer fragment.
      tokens_per_second: of all regions, over the turns that compiled nothing; None
        for a run that was too short to have one.
      timeline: when steps, syncs, arrivals and merges were; see `FlightRecorder`.
      left_out: how often each region was left out of a mean, by region and reason; None
        where nobody is.
    """

    state: TrainState
    last_eval: Record | None
    correction_ratio: float | None
    seconds: float
    stall_seconds: float
    tokens_per_second: float | None
    timeline: dict[str, Any] = {}
    left_out: dict[str, int] | None = None
