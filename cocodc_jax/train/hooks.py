"""The loop's cadence, its callbacks, and its result."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from cocodc_jax.core.state import TrainState
from cocodc_jax.fields import check_least
from cocodc_jax.program.region_program import Output, RegionProgram
from cocodc_jax.train.records import Record
from cocodc_jax.train.run_steps import scan_steps


@dataclasses.dataclass(frozen=True)
class Cadence:
    """Inner steps between the loop's actions; 0 means only at the end.

    Attributes:
      log_every: steps that one training record averages over, at least 1.
      eval_every: steps between evaluations.
      checkpoint_every: steps between checkpoints.
    """

    log_every: int = 10
    eval_every: int = 0
    checkpoint_every: int = 0

    def __post_init__(self):
        check_least(self, 1, "log_every")
        check_least(self, 0, "eval_every", "checkpoint_every")

    def steps_to_cut(self, program: RegionProgram, state: TrainState, last: int) -> int:
        """Return the inner steps to dispatch at once, up to the next action.

        `last` is the step at which the run ends.
        """
        ahead = [last - state.step]
        every = [self.eval_every, self.checkpoint_every]

        event = program.steps_to_event(state)
        if event is not None:
            ahead.append(event)
        else:  # Long scans would delay records.
            every.append(self.log_every)

        ahead.extend(n - state.step % n for n in every if n)
        schedule = program.method.schedule

        num_steps = scan_steps(program, min(ahead))
        if program.length_bucket or schedule is None or not schedule.is_measured:
            return num_steps
        # Events may be any number of steps apart, and every scan length is a
        # program of its own: use powers of two.
        return 1 << (num_steps.bit_length() - 1)


EVERY_TEN = Cadence()  # Records only, until the end.


def is_due(every: int, step: int, last: int) -> bool:
    """Return whether an action that happens every so many steps is due."""
    return step == last or (every > 0 and step % every == 0)


class Clock(NamedTuple):
    """Timing after a turn, for progress bars and timing files."""

    step: int  # Inner steps whose losses were read.
    loss: float  # Mean over regions at that step.
    wall_s: float  # Seconds since training began in this process.
    # Of all regions, between the ends of the previous turn and this one, without
    # evaluations and checkpoints.
    tokens_per_second: float
    stall_s: float  # Total seconds that regions waited for an outer fragment.
    in_flight: int  # Fragments in flight.
    bytes_sent: int  # Bytes one region has sent.
    # Without the time of compilation; None as long as it is not known.
    steady_tokens_per_second: float | None = None  # As `tokens_per_second`.
    step_s: float | None = None  # Seconds of an inner step.


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Callbacks of the loop; all optional.

    Attributes:
      record: called with each record, in order: kinds "train", "sync" and "eval".
      clock: called with a `Clock` after each turn.
      snapshot: called with this process's sums of the records so far; returns the
        JSON value to keep with a checkpoint, the sums and positions (data, files).
      should_stop: called every turn; True ends the run early, after a checkpoint.
      stopping: called before that checkpoint, after everything in flight has arrived.
      handed_out: called with the state and output of every turn, still on their
        devices.
      of_all: gathers a value of every process into a list, ordered by process.
    """

    record: Callable[[Record], None] = lambda record: None
    clock: Callable[[Clock], None] = lambda clock: None
    snapshot: Callable[[dict], dict] = lambda progress: {"progress": progress}
    should_stop: Callable[[], bool] = lambda: False
    stopping: Callable[[], None] = lambda: None
    handed_out: Callable[[TrainState, Output], None] = lambda state, output: None
    of_all: Callable[[Any], list] = lambda value: [value]


NO_HOOKS = Hooks()


class Result(NamedTuple):
    """A finished run.

    Attributes:
      state: after the last step.
      last_eval: the last "eval" record, None if nothing was evaluated.
      correction_ratio: mean over all syncs, None without compensation.
      seconds: wall time in the loop, evaluation and checkpoints included.
      stall_seconds: the part of it in which regions waited for an outer fragment.
      tokens_per_second: of all regions, over the turns that compiled nothing; None if
        the run was too short to have one.
      timeline: times of steps, syncs, arrivals and merges; see `FlightRecorder`.
      left_out: how often each region was left out of a mean, by region and reason; None
        without a filter.
    """

    state: TrainState
    last_eval: Record | None
    correction_ratio: float | None
    seconds: float
    stall_seconds: float
    tokens_per_second: float | None
    timeline: dict[str, Any] = {}
    left_out: dict[str, int] | None = None
