"""The run of all trials of one rule and delay: the schedule's events, in its order.

A test holds this and `RegionProgram` to the same numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.sync import needs
from cocodc_jax.sync.merge import Merge
from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.schedules import MIDWAY, START, Event, Schedule, events_at

from .trials import Flight, Trainer, Trials, make_finish


@dataclasses.dataclass(frozen=True)
class Plan:
    """How trials synchronise; see `make_plan`.

    Attributes:
      schedule: when fragments start and arrive.
      finish: from `trials.make_finish`, with the schedule's delay.
      remembers: whether what merges leave out goes into the next message.
    """

    schedule: Schedule
    finish: Callable
    remembers: bool = False


def make_plan(
    trainer: Trainer,
    schedule: Schedule,
    make: Callable[[Any, int], Merge],
    num_regions: int,
) -> Plan:
    """Return the plan of one rule, with the copies that it wants kept.

    Args:
      trainer: the compiled parts.
      schedule: of the syncs.
      make: `make(strength, delay_steps) -> Merge`, see `rules.Rule`.
      num_regions: R.
    """
    delay_steps = schedule.delay_steps
    copies = needs.copies(make(1.0, delay_steps).needs)
    bound = schedule.bind(Regions.alike(num_regions), needs.HALFWAY in copies)
    # Of a strength between nothing and all.
    remembers = bool(make(0.5, delay_steps).feedback_weight)
    return Plan(bound, make_finish(trainer, make, delay_steps), remembers)


class Outcome(NamedTuple):
    """What trials did.

    Attributes:
      steps: where they were evaluated, `[P]`.
      losses: of the mean of the regions' parameters, float32 `[E, P]`.
      correction_ratio: mean over syncs and regions, float32 `[E]`.
      trials: the state after the last step.
      num_syncs: fragments applied.
      bytes_sent: by one region.
    """

    steps: list[int]
    losses: np.ndarray
    correction_ratio: np.ndarray
    trials: Trials
    num_syncs: int
    bytes_sent: int


def simulate(
    trainer: Trainer,
    trials: Trials,
    tokens: Any,
    outer_lr: Sequence[float],
    strength: Sequence[float],
    plan: Plan | None,
    *,
    inner_scale: Sequence[float] | None = None,
    eval_tokens: Any = None,
    eval_every: int = 0,
) -> Outcome:
    """Train all trials over all of `tokens`.

    Args:
      trainer: the compiled parts.
      trials: the state before the first step.
      tokens: leaves `[T, E, R, ...]`, one batch a step.
      outer_lr: of each trial.
      strength: of each trial; any number where the rule has none.
      plan: how trials synchronise; None averages gradients at every step instead.
      inner_scale: of each trial, what its inner learning rate is over the trainer's;
        None is 1.
      eval_tokens: one batch, the same for all trials.
      eval_every: steps between evaluations, the first before step 1; 0 for none.

    Returns:
      Curves and final state.
    """
    if plan is not None and plan.remembers:
        trials = trials._replace(memory=trainer.no_memory(trials.params))
    num_trials = len(outer_lr)
    scale = jnp.asarray(inner_scale or [1.0] * num_trials)
    run = _Run(
        trainer,
        trials,
        tokens,
        jnp.asarray(outer_lr),
        jnp.asarray(strength),
        scale,
        plan,
    )
    num_steps = jax.tree.leaves(tokens)[0].shape[0]
    curve: dict[int, jax.Array] = {}
    while True:
        if eval_every and run.step % eval_every == 0:
            curve[run.step] = trainer.evaluate(run.trials.params, eval_tokens)
        if run.step == num_steps:
            break
        next_eval = (run.step // (eval_every or 1) + 1) * (eval_every or num_steps)
        run.advance(min(num_steps, next_eval, run.next_event(num_steps)))
    return Outcome(
        [*curve],
        np.stack([*curve.values()], axis=1) if curve else np.zeros((num_trials, 0)),
        np.mean(run.ratios, axis=0) if run.ratios else np.zeros(num_trials),
        run.trials,
        len(run.ratios),
        run.bytes_sent,
    )


class _Run:
    """The state of a run between its events."""

    def __init__(self, trainer, trials, tokens, outer_lr, strength, scale, plan):
        self.trials: Trials = trials
        self.step = self.bytes_sent = 0
        self.ratios: list[jax.Array] = []
        self._trainer, self._tokens, self._plan = trainer, tokens, plan
        self._outer_lr, self._strength, self._scale = outer_lr, strength, scale
        self._state = plan and plan.schedule.init()
        self._flights: dict[int, Flight] = {}
        self._key = jax.random.key(0)

    def next_event(self, num_steps: int) -> int:
        if self._plan is None:
            return num_steps
        return self._plan.schedule.next_step(self._state)

    def advance(self, step: int) -> None:
        """Trains up to `step`, then carries out its events."""
        params, opt_state = self._trainer.advance(
            self.trials.params,
            self.trials.opt_state,
            self._tokens,
            self.step,
            step,
            self._plan is None,
            self._scale,
        )
        self.trials = self.trials._replace(params=params, opt_state=opt_state)
        num_steps, self.step = step - self.step, step
        if self._plan is None:
            self.bytes_sent += num_steps * sum(self._trainer.fragments.num_bytes)
            return
        for state, event in events_at(self._plan.schedule, self._state, step):
            self._state = state
            if event is not None:
                self._carry_out(event)

    def _carry_out(self, event: Event) -> None:
        k = event.fragment_id
        if event.kind == START:
            memory = self.trials.memory and self.trials.memory[k]
            started = self._trainer.start(
                self.trials.params, self.trials.outer[k], k, memory
            )
            self._flights[k] = Flight(*started)
            self.bytes_sent += self._trainer.fragments.num_bytes[k]
        elif event.kind == MIDWAY:
            middle = self._trainer.take(self.trials.params, k)
            self._flights[k] = self._flights[k]._replace(midway=middle)
        else:
            self._finish(k)

    def _finish(self, k: int) -> None:
        # Another key for every sync of the run.
        draw = self.step * self._plan.schedule.num_fragments + k
        self.trials, ratio = self._plan.finish(
            self.trials,
            self._flights.pop(k),
            jax.tree.map(lambda x: x[self.step - 1], self._tokens),
            jax.random.fold_in(self._key, draw),
            self._trainer.user_inputs.rate(self.step) * self._scale,
            self._outer_lr,
            self._strength,
            k,
        )
        self.ratios.append(ratio)
