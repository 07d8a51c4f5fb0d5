"""The loop: inner steps and syncs, records, evaluation, checkpoints.

The order is a contract. Each turn

1. takes the batches up to the next event, evaluation or checkpoint, and dispatches the
   work (inner steps, syncs) without waiting for it;
2. reads the losses of the previous turn while the devices are busy, and writes its
   records: one turn late, so that reading never blocks the devices;
3. if an evaluation or a checkpoint is due, first reads everything: no checkpoint has a
   non-finite loss or parameter.

If the method restores regions (`sync.robust`), a non-finite loss does not end the run,
and step 3 restores regions with non-finite parameters. A sync that leaves out all
regions ends the run.
"""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from cocodc_jax.core.state import PyTree, TrainState, landed
from cocodc_jax.engine import transfer
from cocodc_jax.program.region_program import Output, RegionProgram
from cocodc_jax.train.checkpoint import Checkpoints
from cocodc_jax.train.clock import FlightRecorder
from cocodc_jax.train.finite import FiniteWatch
from cocodc_jax.train.hooks import (
    EVERY_TEN,
    NO_HOOKS,
    Cadence,
    Clock,
    Hooks,
    Result,
    is_due,
)
from cocodc_jax.train.records import Records, finite_mean, recorded_of
from cocodc_jax.train.run_steps import take_batches
from cocodc_jax.train.spikes import NO_SPIKES, LossSpikeError, Spike, Spikes, SpikeWatch


def train(
    program: RegionProgram,
    state: TrainState,
    batches: Iterator[PyTree],
    num_steps: int,
    tokens_at: Callable[[int], int],
    *,
    cadence: Cadence = EVERY_TEN,
    hooks: Hooks = NO_HOOKS,
    evaluate: Callable[..., jax.Array] | None = None,
    checkpoints: Checkpoints | None = None,
    progress: dict | None = None,
    earlier_s: float = 0.0,
    spikes: SpikeWatch = NO_SPIKES,
) -> Result:
    """Train up to inner step `num_steps`.

    Args:
      program: a method, compiled for a model on a mesh.
      state: from `program.init` or a checkpoint; donated.
      batches: endless iterable of one step's host batches, leaves `[R, B, ...]`.
      num_steps: the step to end at.
      tokens_at: tokens that all regions have trained on by a step.
      cadence: how often to log, evaluate and save.
      hooks: callbacks.
      evaluate: from `make_evaluate`.
      checkpoints: where to save.
      progress: the sums of the records so far, as passed to `Hooks.snapshot`.
      earlier_s: seconds that the run took before, for its timeline.
      spikes: whether to look for loss spikes, and to refuse to save after one.

    Raises:
      LossSpikeError: if a checkpoint is due after a spike.
      NonFiniteLossError: naming step, region and the last good checkpoint.
      CheckpointError: naming the folder and the last good checkpoint.
      ValueError: if `batches` ends.
    """
    batches = iter(batches)  # A list would restart at every turn.
    with FlightRecorder(earlier_s) as flights:
        loop = _Loop(
            program=program,
            tokens_at=tokens_at,
            cadence=cadence,
            hooks=hooks,
            checkpoints=checkpoints,
            flights=flights,
            spikes=spikes,
            first_step=state.step,
            progress=progress,
        )
        while state.step < num_steps and not hooks.should_stop():
            state = loop.turn(state, batches, num_steps)
            if evaluate and is_due(cadence.eval_every, state.step, num_steps):
                state = loop.evaluate(state, evaluate)
            if checkpoints and is_due(cadence.checkpoint_every, state.step, num_steps):
                state = loop.save(state)

        if state.step < num_steps:
            state = loop.synchronize(state)
            hooks.stopping()
        elif evaluate and not loop.is_evaluated(state):  # It began at its last step.
            state = loop.evaluate(state, evaluate)

        if checkpoints and checkpoints.latest_step != state.step:
            state = loop.save(state)  # Asked to stop between two checkpoints.
        state = loop.synchronize(state)

    if checkpoints:
        checkpoints.wait()
    return loop.result(state)._replace(timeline=flights.to_json())


class _Turn(NamedTuple):
    """Dispatched work whose results were not read yet."""

    first_step: int
    in_flight: int
    is_warm: bool
    output: Output


class _Loop:
    """State of the loop: unread turns, and sums for the records."""

    def __init__(
        self,
        program: RegionProgram,
        tokens_at: Callable[[int], int],
        cadence: Cadence,
        hooks: Hooks,
        checkpoints: Checkpoints | None,
        flights: FlightRecorder,
        spikes: SpikeWatch,
        first_step: int,
        progress: dict | None,
    ):
        self._program = program
        self._tokens_at = tokens_at
        self._cadence = cadence
        self._hooks = hooks
        self._checkpoints = checkpoints
        self._flights = flights
        self._finite = FiniteWatch(program, checkpoints)
        self._unread: list[_Turn] = []

        self._rolls_back = spikes.rolls_back
        watch = Spikes(spikes.zscore) if spikes.zscore else None
        self._records = Records(hooks.record, cadence.log_every, tokens_at, watch)
        if progress:  # The sums of a checkpoint.
            self._records.continue_from(progress)

        schedule = program.method.schedule
        self._is_measured = schedule is not None and schedule.is_measured
        self._warm_step = first_step + (schedule.warm_up_steps if schedule else 0)
        self._lengths_seen: set[int] = set()
        self._was_warm = True  # The last turn that was read compiled nothing.

        self._began_s = time.perf_counter()
        self._free_s = self._began_s  # When the devices ended the last turn read.
        # Of the turns that compiled nothing.
        self._steady_tokens = 0
        self._steady_steps = 0
        self._steady_s = 0.0

    def turn(
        self, state: TrainState, batches: Iterator[PyTree], num_steps: int
    ) -> TrainState:
        """Dispatch the work up to the next cut, and read the previous turn."""
        first_step = state.step
        length = self._cadence.steps_to_cut(self._program, state, num_steps)
        chunk = take_batches(batches, first_step, length)

        flights = self._flights
        step_s = flights.step_s if self._is_measured else flights.recent_step_s
        times = (step_s, flights.sync_s)
        state, output = self._program.advance(state, chunk, times, flights.stepped)
        flights.watch(state, output)
        self._hooks.handed_out(state, output)

        # The devices are busy now: read what the previous turn computed.
        self.flush(state)

        is_warm = length in self._lengths_seen and first_step >= self._warm_step
        self._lengths_seen.add(length)
        turn = _Turn(
            first_step=first_step,
            in_flight=state.sync.num_in_flight if state.sync else 0,
            is_warm=is_warm,
            output=output,
        )
        self._unread.append(turn)
        return state

    def flush(self, state: TrainState) -> None:
        for turn in self._unread:
            self._read(turn, state)
        self._unread = []

    def synchronize(self, state: TrainState) -> TrainState:
        """Read everything: a state that is evaluated, saved or returned is finite."""
        self.flush(state)
        in_flight = state.sync.in_flight if state.sync else {}
        for flight in in_flight.values():
            landed(flight)  # Of other regions: a request to stop ends this wait.
        # The collectives that follow must not overtake messages in flight.
        jax.block_until_ready(in_flight)
        return self._finite.restored(state)

    def _read(self, turn: _Turn, state: TrainState) -> None:
        losses = transfer.local_rows(turn.output.losses, axis=1)
        first_region = transfer.first_local_row(turn.output.losses, axis=1)
        # An elastic program has one row, of its own region.
        first_region += getattr(self._program.exchange, "region", 0)
        self._finite.check_losses(turn.first_step, losses, first_region)

        recorded = recorded_of(turn.output.aux).items()
        aux = {name: transfer.local_rows(x, axis=1) for name, x in recorded}
        for i, loss in enumerate(losses):
            self._records.step(
                step=turn.first_step + i + 1,
                loss=loss,
                bytes_sent=turn.output.bytes_sent[i],
                first_region=first_region,
                aux={name: values[i] for name, values in aux.items()},
            )

        for sync in turn.output.syncs:  # Applied after the last step.
            self._finite.check_sync(sync, state)
            self._records.sync(sync)
        self._tell_clock(turn, losses)

    def _tell_clock(self, turn: _Turn, losses: np.ndarray) -> None:
        """Report the time of a turn, from when the devices were free to its last step.

        It is known after the turn was read, when the next turn was dispatched already
        or, on a CPU, has perhaps ended.
        """
        done = turn.first_step + len(losses)
        done_s = self._flights.done_s(done)
        seconds = done_s - self._free_s
        self._free_s = done_s
        tokens = self._tokens_at(done) - self._tokens_at(turn.first_step)

        # A turn waits for what the events of the turn before compile.
        is_steady = turn.is_warm and self._was_warm
        if is_steady:
            self._steady_tokens += tokens
            self._steady_steps += len(losses)
            self._steady_s += seconds

        self._was_warm = turn.is_warm

        step_s = self._step_s()
        rate = None
        if is_steady:
            rate = tokens / seconds
        elif self._steady_steps:
            assert step_s is not None
            rate = tokens / (len(losses) * step_s)

        clock = Clock(
            step=done,
            loss=float(finite_mean(losses[-1])),
            wall_s=time.perf_counter() - self._began_s,
            tokens_per_second=tokens / seconds,
            stall_s=self._flights.stall_s,
            in_flight=turn.in_flight,
            bytes_sent=turn.output.bytes_sent[-1],
            steady_tokens_per_second=rate,
            step_s=step_s,
        )
        self._hooks.clock(clock)

    def _step_s(self) -> float | None:
        """Return seconds of a step without compilation, None if not yet known."""
        if self._steady_steps:
            return self._steady_s / self._steady_steps
        return self._flights.own_step_s  # Until all programs are compiled.

    def is_evaluated(self, state: TrainState) -> bool:
        return (self._records.last_eval or {}).get("step") == state.step

    def evaluate(
        self, state: TrainState, evaluate: Callable[..., jax.Array]
    ) -> TrainState:
        """Evaluate the regions' mean and the outer parameters, and record it."""
        state = self.synchronize(state)
        program = self._program
        model_state = (program.mean_model_state(state),) if program.model_state else ()
        mean_params = program.mean_params(state)
        drift = float(program.region_drift(state))
        loss = float(evaluate(mean_params, *model_state))

        if drift:  # The mean cannot equal the outer parameters: free the copy.
            mean_params = None
        outer_loss = loss
        if program.method.sync is not None:
            outer_params = program.outer_params(state)
            # They are equal right after a sync without delay.
            if mean_params is None or not program.are_equal(mean_params, outer_params):
                outer_loss = float(evaluate(outer_params, *model_state))

        for name, value, where in (
            ("eval_loss", loss, "the mean of all regions"),
            ("eval_loss_outer", outer_loss, "the outer parameters"),
            ("region_drift", drift, "the mean of all regions"),
        ):
            if not np.isfinite(value):
                self._finite.stop(f"{name} is {value}", state.step, where)

        self._records.evaluation(
            step=state.step,
            bytes_sent=state.bytes_sent,
            loss=loss,
            loss_outer=outer_loss,
            drift=drift,
        )
        self._free_s = time.perf_counter()  # Not training time.
        return state

    def save(self, state: TrainState) -> TrainState:
        """Read everything, then start to save, or raise in all processes at once."""
        state = self.synchronize(state)
        assert self._checkpoints is not None
        if self._rolls_back:
            of_processes = self._hooks.of_all(self._records.spikes)
            # A process's own are tuples once they were gathered.
            spikes = [Spike(*row) for rows in of_processes for row in rows]
            if spikes:
                self._checkpoints.wait()
                raise LossSpikeError(spikes, self._checkpoints.latest_step)

        extra = self._hooks.snapshot(self._records.progress())
        state = self._checkpoints.save(self._program, state, extra)
        self._free_s = time.perf_counter()
        return state

    def result(self, state: TrainState) -> Result:
        records = self._records
        steady_s = self._steady_s
        return Result(
            state,
            records.last_eval,
            records.correction_ratio,
            seconds=time.perf_counter() - self._began_s,
            stall_seconds=self._flights.stall_s,
            tokens_per_second=self._steady_tokens / steady_s if steady_s else None,
            left_out=records.left_out if self._program.method.can_restore else None,
        )
