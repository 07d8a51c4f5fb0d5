"""The run of all lanes of one rule and delay: the schedule's events, in order.

The order at a step is that of `cocodc_jax.runtime.syncs`: what arrives is applied, then
a fragment leaves, and with a delay of 0 it is applied at once. A test holds this and
`RegionProgram` to the same numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.sync.schedule import Schedule
from experiments.ablation.lanes import Flight, Lanes, Trainer


@dataclasses.dataclass(frozen=True)
class Plan:
    """How lanes synchronise.

    Attributes:
      schedule: when fragments start and arrive.
      finish: from `lanes.make_finish`, with the schedule's delay.
      with_midway: keep the fragment in the middle of its overlap.
    """

    schedule: Schedule
    finish: Callable
    with_midway: bool = False

    def next_step(self, memory, step: int) -> int:
        """The nearest step after `step` at which something happens."""
        ahead = [self.schedule.next_step(memory)]
        if self.with_midway:
            ahead += [s for _, s in self._middles(memory) if s > step]
        return min(ahead)

    def at_middle(self, memory, step: int) -> list[int]:
        """Fragments in the middle of their overlap."""
        if not self.with_midway:
            return []
        return [k for k, middle in self._middles(memory) if middle == step]

    def _middles(self, memory):
        half = self.schedule.delay_steps // 2
        return [(k, start + half) for k, start in memory.in_flight]


class Outcome(NamedTuple):
    """What lanes did.

    Attributes:
      steps: where they were evaluated, `[P]`.
      losses: of the mean of the regions' parameters, float32 `[E, P]`.
      correction_ratio: mean over syncs and regions, float32 `[E]`.
      lanes: the state after the last step.
      num_syncs: fragments applied.
      bytes_sent: by one region.
    """

    steps: list[int]
    losses: np.ndarray
    correction_ratio: np.ndarray
    lanes: Lanes
    num_syncs: int
    bytes_sent: int


def simulate(
    trainer: Trainer,
    lanes: Lanes,
    tokens: Any,
    outer_lr: Sequence[float],
    strength: Sequence[float],
    plan: Plan | None,
    *,
    eval_tokens: Any = None,
    eval_every: int = 0,
) -> Outcome:
    """Trains all lanes over all of `tokens`.

    Args:
      trainer: the compiled parts.
      lanes: the state before the first step.
      tokens: leaves `[T, E, R, ...]`, one batch a step.
      outer_lr: of each lane.
      strength: of each lane; any number where the rule has none.
      plan: how lanes synchronise; None averages gradients at every step instead.
      eval_tokens: one batch, the same for all lanes.
      eval_every: steps between evaluations, the first before step 1; 0 for none.

    Returns:
      Curves and final state.
    """
    run = _Run(
        trainer, lanes, tokens, jnp.asarray(outer_lr), jnp.asarray(strength), plan
    )
    num_steps = jax.tree.leaves(tokens)[0].shape[0]
    curve: dict[int, jax.Array] = {}
    while True:
        if eval_every and run.step % eval_every == 0:
            curve[run.step] = trainer.evaluate(run.lanes.params, eval_tokens)
        if run.step == num_steps:
            break
        next_eval = (run.step // (eval_every or 1) + 1) * (eval_every or num_steps)
        run.advance(min(num_steps, next_eval, run.next_event(num_steps)))
    num_lanes = len(outer_lr)
    return Outcome(
        [*curve],
        np.stack([*curve.values()], axis=1) if curve else np.zeros((num_lanes, 0)),
        np.mean(run.ratios, axis=0) if run.ratios else np.zeros(num_lanes),
        run.lanes,
        len(run.ratios),
        run.bytes_sent,
    )


class _Run:
    """The state of a run between its events."""

    def __init__(self, trainer, lanes, tokens, outer_lr, strength, plan):
        self.lanes: Lanes = lanes
        self.step = self.bytes_sent = 0
        self.ratios: list[jax.Array] = []
        self._trainer, self._tokens, self._plan = trainer, tokens, plan
        self._outer_lr, self._strength = outer_lr, strength
        self._memory = plan and plan.schedule.init()
        self._flights: dict[int, Flight] = {}
        self._key = jax.random.key(0)

    def next_event(self, num_steps: int) -> int:
        if self._plan is None:
            return num_steps
        return self._plan.next_step(self._memory, self.step)

    def advance(self, step: int) -> None:
        """Trains up to `step`, then carries out its events."""
        params, opt_state = self._trainer.advance(
            self.lanes.params,
            self.lanes.opt_state,
            self._tokens,
            self.step,
            step,
            self._plan is None,
        )
        self.lanes = self.lanes._replace(params=params, opt_state=opt_state)
        num_steps, self.step = step - self.step, step
        if self._plan is None:
            self.bytes_sent += num_steps * sum(self._trainer.fragments.num_bytes)
            return
        for k in self._plan.at_middle(self._memory, step):
            middle = self._trainer.take(params, k)
            self._flights[k] = self._flights[k]._replace(midway=middle)
        self._finish_due()
        if self._start_due():
            self._finish_due()

    def _start_due(self) -> bool:
        self._memory, event = self._plan.schedule.start(self._memory, self.step)
        if event is None:
            return False
        k = event.fragment
        started = self._trainer.start(self.lanes.params, self.lanes.outer[k], k)
        self._flights[k] = Flight(*started)
        self.bytes_sent += self._trainer.fragments.num_bytes[k]
        return True

    def _finish_due(self) -> None:
        schedule = self._plan.schedule
        self._memory, events = schedule.finishes(self._memory, self.step)
        batch = jax.tree.map(lambda x: x[self.step - 1], self._tokens)
        for k in (event.fragment for event in events):
            # Another key for every sync of the run.
            draw = self.step * schedule.num_fragments + k
            self.lanes, ratio = self._plan.finish(
                self.lanes,
                self._flights.pop(k),
                batch,
                jax.random.fold_in(self._key, draw),
                self._trainer.sources.rate(self.step),
                self._outer_lr,
                self._strength,
                k,
            )
            self.ratios.append(ratio)
