"""The loop: inner steps and syncs, records, evaluation, checkpoints.

The order is a contract. Each turn

1. takes the batches up to the next event, evaluation or checkpoint, and hands the
   devices their work (inner steps, syncs), without waiting for it;
2. reads the losses of the turn before, while the devices are busy, and writes its
   records: one step late, so that reading never holds the devices up;
3. where an evaluation or a checkpoint is due, reads everything first: no checkpoint
   holds a loss or a parameter that is not finite.

Where the method restores regions (`sync.robust`) a loss that is not finite ends
nothing, and in 3. a region whose parameters are not is restored; a sync that leaves out
all regions ends the run.

Records hold only what a resumed run repeats bit for bit; what the clock says goes to
`Clock`. Where the scans are cut changes no number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from cocodc_jax.runtime.devices import transfer
from cocodc_jax.runtime.loop.checkpoint import CheckpointError, Checkpoints
from cocodc_jax.runtime.loop.clock import FlightRecorder
from cocodc_jax.runtime.loop.records import Record, Records, finite_mean
from cocodc_jax.runtime.loop.spikes import (
    NO_SPIKES,
    LossSpikeError,
    Spike,
    Spikes,
    SpikeWatch,
)
from cocodc_jax.runtime.program import Output, RegionProgram
from cocodc_jax.runtime.running import MAX_SCAN_STEPS, scan_steps, take_batches
from cocodc_jax.runtime.state import SyncId, TrainState
from cocodc_jax.runtime.turns import AppliedSync
from cocodc_jax.sync.robust import told

PyTree = Any


class NonFiniteLossError(ArithmeticError):
    """A loss, a parameter or what regions sent one another became NaN or infinite."""


@dataclasses.dataclass(frozen=True)
class Cadence:
    """How often things happen, in inner steps; 0 is never (but at the end).

    Attributes:
      log_every: steps that one training record averages over, at least 1.
      eval_every: steps between evaluations.
      checkpoint_every: steps between checkpoints.
    """

    log_every: int = 10
    eval_every: int = 0
    checkpoint_every: int = 0

    def __post_init__(self):
        """Check the numbers.

        Raises:
          ValueError: for a `log_every` below 1 or another number below 0.
        """
        if self.log_every < 1:
            raise ValueError(f"log_every={self.log_every} must be at least 1 step")
        for name in ("eval_every", "checkpoint_every"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at least 0 (0 is never)"
                )


class Clock(NamedTuple):
    """What the clock says after a turn, for progress bars and timing files.

    Attributes:
      step: inner steps whose losses were read.
      loss: mean over regions at that step.
      wall_s: seconds since training began in this process.
      tokens_per_second: of all regions, since the turn before.
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
      handed_out: takes the state and the output of every turn, still on their devices.
      of_all: makes one list of what every process has to say, in their order.
    """

    record: Callable[[Record], None] = lambda record: None
    clock: Callable[[Clock], None] = lambda clock: None
    snapshot: Callable[[dict], dict] = lambda progress: {"progress": progress}
    should_stop: Callable[[], bool] = lambda: False
    handed_out: Callable[[TrainState, Output], None] = lambda state, output: None
    of_all: Callable[[Any], list] = lambda own: [own]


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


def train(
    program: RegionProgram,
    state: TrainState,
    batches: Iterator[PyTree],
    num_steps: int,
    tokens_at: Callable[[int], int],
    *,
    cadence: Cadence = Cadence(),
    hooks: Hooks = Hooks(),
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
      batches: one step's host batches at a time, leaves `[R, B, ...]`, endless.
      num_steps: the step to end at.
      tokens_at: tokens that all regions have trained on by a step.
      cadence: how often to log, evaluate and save.
      hooks: what to call.
      evaluate: from `make_evaluate`.
      checkpoints: where to save.
      progress: the sums of the records so far, as `Hooks.snapshot` was given them.
      earlier_s: seconds that the run has taken before, for its timeline.
      spikes: whether to look for spikes of the loss, and not to save any.

    Raises:
      LossSpikeError: where a checkpoint is due after a spike.
      NonFiniteLossError: naming step, region and the last good checkpoint.
      CheckpointError: naming the folder and the last good checkpoint.
      ValueError: if `batches` ends.
    """
    batches = iter(batches)  # A list would begin anew with every turn.
    with FlightRecorder(earlier_s) as flights:
        loop = _Loop(program, tokens_at, cadence, hooks, checkpoints, flights, spikes)
        loop.continue_from(state.step, progress)
        while state.step < num_steps and not hooks.should_stop():
            state = loop.turn(state, batches, num_steps)
            if evaluate and _is_due(state.step, cadence.eval_every, num_steps):
                state = loop.evaluate(state, evaluate)
            if checkpoints and _is_due(state.step, cadence.checkpoint_every, num_steps):
                state = loop.save(state)
        if checkpoints and checkpoints.latest_step != state.step:
            state = loop.save(state)  # Asked to stop between two checkpoints.
        state = loop.synchronize(state)
    if checkpoints:
        checkpoints.wait()
    return loop.result(state)._replace(timeline=flights.to_json())


def _is_due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


class _Turn(NamedTuple):
    """Work handed to the devices and not yet read."""

    first_step: int
    bytes_before: int
    bytes_after: int
    in_flight: int
    output: Output


class _Loop:
    """The loop's own memory: turns not yet read, and sums for the records."""

    def __init__(
        self, program, tokens_at, cadence, hooks, checkpoints, flights, spikes
    ):
        self._program = program
        self._tokens_at = tokens_at
        self._cadence = cadence
        self._hooks = hooks
        self._checkpoints = checkpoints
        self._flights = flights
        self._unread: list[_Turn] = []
        self._leaving: dict[SyncId, jax.Array] = {}
        self._rolls_back = spikes.rolls_back
        watch = Spikes(spikes.zscore) if spikes.zscore else None
        self._records = Records(hooks.record, cadence.log_every, tokens_at, watch)
        schedule = program.method.schedule
        self._is_measured = schedule is not None and schedule.is_measured
        self._lengths_seen: set[int] = set()
        self._warm_step = 0
        self._has_compiled = False
        self._began_s = self._read_s = time.perf_counter()
        self._steady_tokens = 0
        self._steady_s = 0.0

    def continue_from(self, step: int, progress: dict | None) -> None:
        """Begins at `step`, with the sums that a checkpoint kept."""
        schedule = self._program.method.schedule
        if schedule:
            self._warm_step = step + schedule.warm_up_steps
        if progress:
            self._records.continue_from(progress)

    def turn(self, state: TrainState, batches, num_steps: int) -> TrainState:
        """Hands out the work up to the next cut, and reads the turn before."""
        length = self._steps_to_cut(state, num_steps)
        first_step, before = state.step, state.bytes_sent
        chunk = take_batches(batches, first_step, length)
        times = (self._flights.recent_step_s, self._flights.sync_s)
        if self._is_measured:
            times = (self._flights.step_s, self._flights.sync_s)
        state, output = self._program.advance(
            state, chunk, times, self._flights.handed_out
        )
        self._watch(state, output)
        self._hooks.handed_out(state, output)
        is_warm = length in self._lengths_seen and first_step >= self._warm_step
        self._has_compiled |= not is_warm
        self._lengths_seen.add(length)
        self.flush(state)
        self._unread.append(
            _Turn(
                first_step,
                before,
                state.bytes_sent,
                state.sync.num_in_flight if state.sync else 0,
                output,
            )
        )
        return state

    def _watch(self, state: TrainState, output: Output) -> None:
        """Has the clock read when the devices get to what was just handed out."""
        for sync in output.syncs:
            if sync.start_step == state.step:  # Blocking: started and applied at once.
                self._flights.started(
                    sync.fragment_id, state.step, output.losses, sync.norm
                )
        in_flight = state.sync.in_flight if state.sync else {}
        for (fragment_id, start_step), flight in in_flight.items():
            if start_step == state.step:
                self._flights.started(
                    fragment_id, start_step, output.losses, flight.mean
                )
        self._watch_left(in_flight, output)
        leaving = state.sync.leaving if state.sync else ()
        self._leaving = {each.event.sync_id: output.losses for each in leaving}
        self._flights.stepped(state.step, output.losses, output.syncs)

    def _watch_left(self, in_flight: dict, output: Output) -> None:
        """Watch what waited for these inner steps, and left with them."""
        for sync_id, losses in self._leaving.items():
            arrivals = [
                sync.norm
                for sync in output.syncs
                if (sync.fragment_id, sync.start_step) == sync_id
            ]
            if sync_id in in_flight:
                arrivals.append(in_flight[sync_id].mean)
            self._flights.started(*sync_id, losses, arrivals[0])

    def _steps_to_cut(self, state: TrainState, num_steps: int) -> int:
        ahead = [num_steps - state.step]
        event = self._program.steps_to_event(state)
        if event is not None:
            ahead.append(event)
        every = (self._cadence.eval_every, self._cadence.checkpoint_every)
        # Without events, records would come as late as scans are long.
        every += () if event is not None else (self._cadence.log_every,)
        ahead.extend(n - state.step % n for n in every if n)
        schedule = self._program.method.schedule
        if schedule is not None and schedule.is_measured:
            # Its events may be any number of steps apart, and every length of a scan
            # is compiled: powers of two are few.
            return 1 << (min(*ahead, MAX_SCAN_STEPS).bit_length() - 1)
        return scan_steps(self._program.mesh, min(ahead))

    def flush(self, state: TrainState) -> None:
        """Read every turn handed out so far, and write its records.

        Args:
          state: of now, which tells whose parameters are finite if a number is not.
        """
        for turn in self._unread:
            self._read(turn, state)
        self._unread = []

    def synchronize(self, state: TrainState) -> TrainState:
        """Read everything: what is judged, kept or given back is finite.

        Messages on their way are waited for: what follows has collectives of its own,
        which must not overtake them.
        """
        self.flush(state)
        jax.block_until_ready(state.sync.in_flight if state.sync else ())
        return self._check_params(state)

    def _read(self, turn: _Turn, state: TrainState) -> None:
        losses = transfer.local_rows(turn.output.losses, axis=1)
        first_region = transfer.first_local_row(turn.output.losses, axis=1)
        self._check_losses(turn.first_step, losses, first_region)
        stage_bytes = turn.output.aux.get("stage_bytes")
        if stage_bytes is not None:
            stage_bytes = transfer.local_rows(stage_bytes, axis=1)
        for i, loss in enumerate(losses):
            is_last = i + 1 == len(losses)
            sent = turn.bytes_before + (i + 1) * self._program.bytes_per_step
            step = turn.first_step + i + 1
            self._records.step(
                step,
                loss,
                turn.bytes_after if is_last else sent,
                None if stage_bytes is None else stage_bytes[i],
                first_region,
            )
        for sync in turn.output.syncs:
            self._check_sync(sync, state)
            self._records.sync(sync)
        self._tell_clock(turn, losses)

    def _check_losses(self, first_step: int, losses, first_region: int) -> None:
        bad = np.argwhere(~np.isfinite(losses))
        if len(bad) and not self._program.method.can_restore:
            step = first_step + int(bad[0][0]) + 1
            region = first_region + int(bad[0][1])
            self._stop(f"loss is {losses[tuple(bad[0])]}", step, f"region {region}")

    def _check_sync(self, sync: AppliedSync, state: TrainState) -> None:
        """Refuse a merge whose numbers are not finite: the losses after it may be."""
        if sync.verdict is not None:
            out = told(np.asarray(sync.verdict))
            if len(out) == self._program.regions.num:
                why = ", ".join(f"region {m}: {reason}" for m, reason in out.items())
                what = f"no message of fragment {sync.fragment_id} was fit for a mean"
                self._stop(f"{what} ({why})", sync.apply_step, "all regions")
        ratios = sync.metrics.get("correction_ratio")
        if ratios is not None and sync.verdict is None:
            (bad,) = np.nonzero(~np.isfinite(transfer.local_rows(ratios)))
            if len(bad):
                region = transfer.first_local_row(ratios) + int(bad[0])
                what = f"correction_ratio of fragment {sync.fragment_id}"
                self._stop(f"{what} is not finite", sync.apply_step, f"region {region}")
        if not np.isfinite(float(sync.norm)):
            (bad,) = np.nonzero(~np.asarray(self._program.finite_regions(state)))
            where = f"region {bad[0]}" if len(bad) else "the mean of all regions"
            what = f"pseudo_gradient_norm of fragment {sync.fragment_id}"
            self._stop(f"{what} is not finite", sync.apply_step, where)

    def _check_params(self, state: TrainState) -> TrainState:
        """Restore, or refuse, parameters not finite, which a finite loss may hide."""
        is_bad = ~np.asarray(self._program.finite_regions(state))
        (bad,) = np.nonzero(is_bad)
        if not len(bad):
            return state
        if self._program.method.can_restore and not is_bad.all():
            return self._program.restore_regions(state, is_bad)
        self._stop("a parameter is not finite", state.step, f"region {bad[0]}")

    def _stop(self, what: str, step: int, where: str) -> NoReturn:
        saved = None
        if self._checkpoints:
            with contextlib.suppress(CheckpointError):  # Then it is not the last good.
                self._checkpoints.wait()
            saved = self._checkpoints.latest_step
        last_good = "there is none" if saved is None else f"step {saved}"
        raise NonFiniteLossError(
            f"{what} at step {step} in {where}; last good checkpoint: {last_good}. "
            "Lower inner_lr or outer_lr, or clip gradients (grad_clip)"
        )

    def _tell_clock(self, turn: _Turn, losses: np.ndarray) -> None:
        now = time.perf_counter()
        seconds, self._read_s = now - self._read_s, now
        done = turn.first_step + len(losses)
        tokens = self._tokens_at(done) - self._tokens_at(turn.first_step)
        if not self._has_compiled:  # Since the turn read before this one.
            self._steady_tokens += tokens
            self._steady_s += seconds
        self._has_compiled = False
        self._hooks.clock(
            Clock(
                step=turn.first_step + len(losses),
                loss=float(finite_mean(losses[-1])),
                wall_s=now - self._began_s,
                tokens_per_second=tokens / seconds,
                stall_s=self._flights.stall_s,
                in_flight=turn.in_flight,
                bytes_sent=turn.bytes_after,
            )
        )

    def evaluate(self, state: TrainState, evaluate) -> TrainState:
        """Judges the regions' mean and the outer parameters, and records it."""
        state = self.synchronize(state)
        program = self._program
        of_model = (program.mean_model_state(state),) if program.model_state else ()
        loss = evaluate(program.mean_params(state), *of_model)
        outer = loss
        if program.method.sync is not None:
            outer = evaluate(program.outer_params(state), *of_model)
        loss, outer = float(loss), float(outer)
        drift = float(self._program.region_drift(state))
        for what, value, where in (
            ("eval_loss", loss, "the mean of all regions"),
            ("eval_loss_outer", outer, "the outer parameters"),
            ("region_drift", drift, "the mean of all regions"),
        ):
            if not np.isfinite(value):
                self._stop(f"{what} is {value}", state.step, where)
        self._records.evaluation(state.step, state.bytes_sent, loss, outer, drift)
        self._read_s = time.perf_counter()  # Not training time.
        return state

    def save(self, state: TrainState) -> TrainState:
        """Read everything, then start to save; or go back, all processes at once."""
        state = self.synchronize(state)
        if self._rolls_back:
            found = sum(self._hooks.of_all(self._records.spikes), [])
            if found:
                self._checkpoints.wait()
                spikes = [Spike(*each) for each in found]
                raise LossSpikeError(spikes, self._checkpoints.latest_step)
        extra = self._hooks.snapshot(self._records.progress())
        state = self._checkpoints.save(self._program, state, extra)
        self._read_s = time.perf_counter()
        return state

    def result(self, state: TrainState) -> Result:
        """Return what the run came to."""
        can_restore = self._program.method.can_restore
        seconds = time.perf_counter() - self._began_s
        steady = self._steady_tokens / self._steady_s if self._steady_s else None
        return Result(
            state,
            self._records.last_eval,
            self._records.correction_ratio,
            seconds,
            self._flights.stall_s,
            steady,
            left_out=self._records.left_out if can_restore else None,
        )
