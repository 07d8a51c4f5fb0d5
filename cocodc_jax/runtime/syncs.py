"""The syncs of a method: its schedule's events, carried out on devices.

The order at a step is a contract, the same on every region:

1. syncs that arrive are applied, oldest first: outer step, then merge;
2. the sync that starts now leaves with what was merged;
3. with a delay of 0 it is applied at once.

Nothing here waits for a device, but for adaptive transmission, which before it
chooses reads the norm of the updates applied since the slot before.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from cocodc_jax.runtime import exchange
from cocodc_jax.runtime.inner import Block
from cocodc_jax.runtime.layout import Layout, place
from cocodc_jax.runtime.sources import Sources, needs_batch
from cocodc_jax.runtime.state import InFlight, Observation, OuterState, TrainState
from cocodc_jax.sync.fragments import Fragments
from cocodc_jax.sync.methods import Method

PyTree = Any


class Sync(NamedTuple):
    """One applied sync.

    Attributes:
      fragment: which.
      start_step: step it started at.
      apply_step: step it was merged at.
      num_bytes: bytes one region sent for it.
      norm: L2 norm of the mean pseudo-gradient, float32 scalar on its device.
      metrics: the merge's metrics, float32 `[R]` on their devices.
    """

    fragment: int
    start_step: int
    apply_step: int
    num_bytes: int
    norm: jax.Array
    metrics: dict[str, jax.Array]


class SyncPrograms:
    """The compiled programs of every fragment, and the order they run in."""

    def __init__(
        self,
        method: Method,
        mesh: Mesh,
        fragments: Fragments,
        layout: Layout,
        block: Block,
        sources: Sources,
    ):
        """Wraps every program in one jit; see `RegionProgram` for the arguments.

        Raises:
          ValueError: if the merge needs what is not given.
        """
        sources.check(method)
        assert method.schedule is not None
        self._merge_rule, self._schedule = method.merge, method.schedule
        self._fragments, self._layout = fragments, layout
        self._sources = sources
        each = range(len(fragments))
        self._start = [
            jax.jit(
                exchange.make_start(mesh, fragments, k, method.merge.needs_staged),
                out_shardings=layout.flight(k, method.merge.needs_staged),
            )
            for k in each
        ]
        self._outer = jax.jit(
            functools.partial(exchange.outer_step, method.outer_optimizer),
            donate_argnums=(0, 1),
        )
        self._merge = [
            jax.jit(
                exchange.make_merge(
                    mesh,
                    fragments,
                    k,
                    method.merge,
                    method.schedule.delay_steps,
                    sources,
                    block,
                ),
                donate_argnums=0,
                out_shardings=(layout.region.params, None),
            )
            for k in each
        ]
        self._drift = jax.jit(exchange.make_drift(mesh, fragments))

    def abstract_flight(
        self, fragment: int, params: PyTree, outer: tuple[PyTree, ...]
    ) -> InFlight:
        """Shapes and shardings of a fragment in flight."""
        shapes = jax.eval_shape(self._start[fragment], params, outer[fragment])
        where = self._layout.flight(fragment, self._merge_rule.needs_staged)
        return InFlight(*place(shapes, where))

    def after_steps(
        self, state: TrainState, batches: PyTree
    ) -> tuple[TrainState, tuple[Sync, ...]]:
        """Carries out the events of `state.step`, in the order the module says.

        Args:
          state: region parameters and outer state are donated.
          batches: of the steps just done, `[T, R, ...]`.
        """
        last = None
        if needs_batch(self._merge_rule.needs):
            last = jax.tree.map(lambda x: x[-1], batches)
        state, early = self._finish_due(state, last)
        state, has_started = self._start_due(state)
        if not has_started or self._schedule.delay_steps:
            return state, early
        state, late = self._finish_due(state, last)
        return state, early + late

    def settle(self, state: TrainState) -> TrainState:
        """Tells the schedule of every update applied; waits for their norms."""
        memory = state.schedule
        assert memory is not None
        for fragment, norm in state.observed:
            memory = self._schedule.observe(
                memory, fragment, float(norm), self._fragments.num_params[fragment]
            )
        return dataclasses.replace(state, schedule=memory, observed=())

    def _start_due(self, state: TrainState) -> tuple[TrainState, bool]:
        if self._schedule.score is not None and self._schedule.is_slot(state.step):
            state = self.settle(state)
        assert state.schedule is not None
        memory, event = self._schedule.start(
            state.schedule, state.step, lambda: self._measure_drift(state)
        )
        state = dataclasses.replace(state, schedule=memory)
        if event is None:
            return state, False
        k = event.fragment
        outer = jax.device_put(state.outer.params[k], self._layout.fragments[k])
        flight = InFlight(*self._start[k](state.region.params, outer))
        return dataclasses.replace(
            state,
            in_flight={**state.in_flight, k: flight},
            bytes_sent=state.bytes_sent + _num_bytes(flight.mean_pseudo_gradient),
        ), True

    def _finish_due(
        self, state: TrainState, batch: PyTree
    ) -> tuple[TrainState, tuple[Sync, ...]]:
        assert state.schedule is not None
        memory, events = self._schedule.finishes(state.schedule, state.step)
        state = dataclasses.replace(state, schedule=memory)
        syncs = []
        for _, k, start_step in events:
            num_bytes = _num_bytes(state.in_flight[k].mean_pseudo_gradient)
            state, norm, metrics = self._finish(state, k, batch)
            syncs.append(Sync(k, start_step, state.step, num_bytes, norm, metrics))
        return state, tuple(syncs)

    def _finish(self, state: TrainState, k: int, batch: PyTree):
        flight = state.in_flight[k]
        mean = jax.device_put(flight.mean_pseudo_gradient, self._layout.outer)
        params, opt_state, norm = self._outer(
            state.outer.params[k], state.outer.opt_states[k], mean
        )
        local, metrics = self._merge[k](
            state.region.params,
            state.region._replace(params=None),
            flight.staged,
            jax.device_put(params, self._layout.fragments[k]),
            batch,
            self._rate(state.step),
        )
        outer = OuterState(
            _set(state.outer.params, k, params),
            _set(state.outer.opt_states, k, opt_state),
        )
        observed = state.observed
        if self._schedule.score is not None:
            observed = (*observed, Observation(k, norm))
        state = dataclasses.replace(
            state,
            region=state.region._replace(params=local),
            outer=outer,
            in_flight={i: v for i, v in state.in_flight.items() if i != k},
            observed=observed,
        )
        return state, norm, metrics

    def _measure_drift(self, state: TrainState) -> list[float]:
        outer = jax.device_put(state.outer.params, self._layout.fragments)
        return np.asarray(self._drift(state.region.params, outer)).tolist()

    def _rate(self, step: int) -> jax.Array | None:
        if "learning_rate" not in self._merge_rule.needs:
            return None
        return self._sources.rate(step)


def _num_bytes(message: PyTree) -> int:
    """Bytes of the arrays that one region sends."""
    return sum(x.nbytes for x in jax.tree.leaves(message))


def _set(values: tuple, index: int, value: Any) -> tuple:
    return (*values[:index], value, *values[index + 1 :])
