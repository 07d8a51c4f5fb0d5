"""The syncs of a method: its schedule's events, carried out on devices.

The order at a step is a contract, the same on every region:

1. syncs that arrive are applied, oldest first: outer step, then merge;
2. the syncs that start now leave with what was merged;
3. with a delay of 0 each is applied at once.

Where a method is one whole round late (`Schedule.sends_first`), what starts leaves
before anything is applied, so that its message tells what the round itself learned.

Nothing here waits for a device, but for two things. A schedule that chooses by what was
applied reads it before it chooses, at the next slot. And on CPU devices, which share
few threads, a program with collectives waits for the one before: two at once could
each hold threads that the other needs, for ever.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cocodc_jax.runtime import merging, transfer
from cocodc_jax.runtime.inner import Block
from cocodc_jax.runtime.layout import Layout
from cocodc_jax.runtime.regional import RegionalOuters
from cocodc_jax.runtime.shared import SharedOuter
from cocodc_jax.runtime.sources import Sources, needs_batch
from cocodc_jax.runtime.state import (
    InFlight,
    Observation,
    OuterState,
    Sender,
    TrainState,
)
from cocodc_jax.sync.events import Event, ScheduleState
from cocodc_jax.sync.fragments import Fragments
from cocodc_jax.sync.methods import Method
from cocodc_jax.sync.regional import RegionalOuter
from cocodc_jax.sync.regions import Regions

PyTree = Any
Times = tuple[float, float]


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
        regions: Regions,
        params: PyTree,
        sources: Sources,
        crosses_outside: bool = False,
        all_reduce: str = "direct",
    ):
        """Wraps every program in one jit; see `RegionProgram` for the arguments.

        Raises:
          ValueError: if the merge needs what is not given.
        """
        sources.check(method)
        assert method.schedule is not None
        self._method, self._schedule = method, method.schedule
        self._fragments, self._layout = fragments, layout
        self._sources, self._regions = sources, regions
        is_cpu = mesh.devices.flat[0].platform == "cpu"
        # On the outer mesh a message has a device, and so its threads, to itself.
        is_inside = is_cpu and not crosses_outside
        self._shares_threads = is_inside and mesh.devices.size > 1
        self._crossing: PyTree = None
        block = Block.of(mesh, regions.num)
        is_regional = isinstance(method.outer_optimizer, RegionalOuter)
        parts = (method, fragments, layout, block, params)
        self.outer = (
            RegionalOuters(*parts)
            if is_regional
            else SharedOuter(*parts, crosses_outside, all_reduce)
        )
        each = range(len(fragments))
        self._abstract_params = params
        self._looks = method.schedule.measures or method.schedule.observes is not None
        delay = None if method.schedule.measures else method.schedule.delay_steps
        self._merge = [
            jax.jit(
                merging.make_merge(
                    mesh,
                    fragments,
                    k,
                    method.merge,
                    delay,
                    sources,
                    block,
                    is_regional,
                ),
                donate_argnums=0,
                out_shardings=(layout.region.params, layout.region.key),
            )
            for k in each
        ]
        self._copy = [
            jax.jit(
                functools.partial(fragments.take, fragment=k, lead=1),
                out_shardings=layout.staged[k],
            )
            for k in each
        ]
        self._drift = jax.jit(merging.make_drift(mesh, fragments))

    def init(
        self, params: PyTree, region_params: PyTree
    ) -> tuple[OuterState, tuple[Sender, ...], dict[int, InFlight], ScheduleState]:
        """What a run has besides its regions before the first step.

        Args:
          params: one region's parameters, on the mesh.
          region_params: of all regions, `[R, ...]`.
        """
        outer, senders = self.outer.init(params)
        memory = self._schedule.init()
        in_flight = {
            k: self._first_flight(k, params, region_params) for k, _ in memory.in_flight
        }
        return outer, senders, in_flight, memory

    def _first_flight(self, fragment: int, params, region_params) -> InFlight:
        """The message of zero that arrives at a round-late schedule's first slot."""
        outer, _ = self.outer.abstract(params)
        region = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            region_params,
        )
        key = jax.ShapeDtypeStruct((self._regions.num, 2), jnp.uint32)
        shapes = self.outer.abstract_flight(fragment, region, key, outer)
        flight: InFlight = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes
        )
        if flight.staged is not None:
            staged = self._fragments.take(region_params, fragment, lead=1)
            flight = flight._replace(staged=jax.tree.map(jnp.copy, staged))
        if flight.reference is not None:
            part = self._fragments.take(params, fragment)
            where = jax.tree.map(lambda x: x.sharding, flight.reference)
            flight = flight._replace(
                reference=jax.tree.map(
                    lambda x, r: jnp.array(x, r.dtype, copy=True),
                    transfer.move(part, where),
                    flight.reference,
                )
            )
        return flight

    def abstract(
        self, params: PyTree, memory: ScheduleState | None, region: Any
    ) -> tuple[OuterState, tuple[Sender, ...], dict[int, InFlight]]:
        """Shapes and shardings of what `init` gives, at the time of `memory`.

        Args:
          params: shapes of one region's parameters.
          memory: tells the fragments in flight, and the rank of messages.
          region: abstract `RegionState`.
        """
        outer, senders = self.outer.abstract(params, memory.rank if memory else 0)
        flights = {}
        for k, start_step in memory.in_flight if memory is not None else ():
            flight = self.outer.abstract_flight(k, region.params, region.key, outer)
            assert memory is not None
            half = start_step + self._schedule.midway_steps
            if self._schedule.looks_midway and memory.step >= half:
                flight = flight._replace(midway=flight.staged)
            flights[k] = flight
        return outer, senders, flights

    def after_steps(
        self, state: TrainState, batches: PyTree, times: Times = (0.0, 0.0)
    ) -> tuple[TrainState, tuple[Sync, ...]]:
        """Carries out the events of `state.step`, in the order the module says.

        Args:
          state: region parameters and outer state are donated.
          batches: of the steps just done, `[T, R, ...]`.
          times: seconds of an inner step and of a sync as this process has measured
            them, 0 for not yet; for schedules that go by them.
        """
        state = self._look_midway(state)
        last = None
        if needs_batch(self._method.merge.needs):
            last = jax.tree.map(lambda x: x[-1], batches)
        if self._schedule.sends_first:
            return self._send_then_finish(state, last)
        state, syncs = self._finish_due(state, last)
        while True:
            state, event = self._next_start(state)
            if event is None:
                return state, syncs
            state, flight = self._send(state, event, times)
            flights = {**state.in_flight, event.fragment: flight}
            state = dataclasses.replace(state, in_flight=flights)
            if self._schedule.delay_steps == 0:
                state, more = self._finish_due(state, last, event.regions)
                syncs += more

    def settle(self, state: TrainState) -> TrainState:
        """Tells the schedule of every update applied; waits for what it observes."""
        memory = state.schedule
        assert memory is not None
        for fragment, value, times in state.observed:
            if self._schedule.observes:
                size = self._fragments.num_params[fragment]
                memory = self._schedule.observe(memory, fragment, float(value), size)
            if times is not None:
                rows = transfer.local_rows(times).tolist()
                memory = self._schedule.observe_times(memory, rows)
        return dataclasses.replace(state, schedule=memory, observed=())

    def _send_then_finish(self, state: TrainState, batch: PyTree):
        assert state.schedule is not None
        memory, due = self._schedule.finishes(state.schedule, state.step)
        state, event = self._next_start(dataclasses.replace(state, schedule=memory))
        if event is None:
            return self._finish(state, due, batch)
        state, flight = self._send(state, event)
        state, syncs = self._finish(state, due, batch)
        flights = {**state.in_flight, event.fragment: flight}
        return dataclasses.replace(state, in_flight=flights), syncs

    def _look_midway(self, state: TrainState) -> TrainState:
        """Keeps a copy of each fragment that is halfway to its merge."""
        assert state.schedule is not None
        if not self._schedule.looks_midway:
            return state
        flights = dict(state.in_flight)
        for k, start_step in state.schedule.in_flight:
            if state.step == start_step + self._schedule.midway_steps:
                midway = self._copy[k](state.region.params)
                flights[k] = flights[k]._replace(midway=midway)
        return dataclasses.replace(state, in_flight=flights)

    def _next_start(self, state: TrainState) -> tuple[TrainState, Event | None]:
        assert state.schedule is not None
        may_start = self._schedule.may_start(state.schedule, state.step)
        if self._looks and may_start:
            state = self.settle(state)
        assert state.schedule is not None
        memory, event = self._schedule.start(
            state.schedule, state.step, lambda: self._measure_drift(state)
        )
        if memory.rank != state.schedule.rank:
            assert isinstance(self.outer, SharedOuter)
            state = self.outer.resize(state, memory.rank)
        return dataclasses.replace(state, schedule=memory), event

    def _send(
        self, state: TrainState, event: Event, times: Times = (0.0, 0.0)
    ) -> tuple[TrainState, InFlight]:
        k = event.fragment
        weights = tuple(self._weights(state, event).tolist())
        self._take_turns()
        state, flight = self.outer.send(state, k, weights, times)
        self._crossing = flight.mean_pseudo_gradient
        # Regions that send at different times count as one of them at each time.
        share = 1 / self._regions.num if self._method.is_asynchronous else 1
        sent = state.bytes_sent + round(self.message_bytes(k, event.rank) * share)
        return dataclasses.replace(state, bytes_sent=sent), flight

    def _take_turns(self) -> None:
        """Waits, on CPUs, for the collectives that were handed out before."""
        if self._shares_threads:
            jax.block_until_ready(self._crossing)

    def _weights(self, state: TrainState, event: Event) -> np.ndarray:
        assert state.schedule is not None
        since = state.step - state.schedule.interval[event.fragment]
        return self._regions.weights(
            since, state.step, self._method.weigh, event.regions
        )

    @functools.cache  # noqa: B019  (as long as the programs)
    def message_bytes(self, fragment: int, rank: int = 0) -> int:
        """Bytes that one region sends for a sync; a region alone sends nothing."""
        if self._regions.num == 1:
            return 0
        return self.outer.num_bytes(fragment, self._abstract_params, rank)

    def _finish_due(self, state: TrainState, batch: PyTree, regions=None):
        assert state.schedule is not None
        memory, due = self._schedule.finishes(state.schedule, state.step)
        state = dataclasses.replace(state, schedule=memory)
        return self._finish(state, due, batch, regions)

    def _finish(
        self,
        state: TrainState,
        due: list[Event],
        batch: PyTree,
        regions: tuple[int, ...] | None = None,
    ) -> tuple[TrainState, tuple[Sync, ...]]:
        syncs = []
        for event in due:
            k, start_step = event.fragment, event.start_step
            flight = state.in_flight[k]
            rest = {i: v for i, v in state.in_flight.items() if i != k}
            state = dataclasses.replace(state, in_flight=rest)
            state, norm, metrics = self._apply(
                state, k, flight, batch, state.step - start_step, regions
            )
            num_bytes = 0
            if start_step > 0:  # Not a round-late schedule's message of zero.
                num_bytes = self.message_bytes(k, event.rank)
                state = self._observe(state, k, flight, norm)
            syncs.append(Sync(k, start_step, state.step, num_bytes, norm, metrics))
        return state, tuple(syncs)

    def _apply(
        self, state: TrainState, k: int, flight: InFlight, batch, delay: int, regions
    ):
        """The outer step and the merge of one sync, `delay` steps after its start."""
        if self.outer.steps_on_mesh:
            self._take_turns()
        state, norm = self.outer.receive(state, k, flight)
        if self.outer.steps_on_mesh:
            self._crossing = norm
        outer = self.outer.on_mesh(state, k)
        takes = None
        if self._method.is_asynchronous:
            takes = np.isin(np.arange(self._regions.num), regions or ())
            takes = transfer.put(takes, self._layout.region.key)
            assert isinstance(self.outer, SharedOuter)
            state = self.outer.move_anchors(state, k, outer, takes)
        local, metrics = self._merge[k](
            state.region.params,
            state.region._replace(params=None, sender=()),
            (flight.staged, flight.midway),
            outer,
            batch,
            self._rate(state.step),
            takes,
            np.int32(delay) if self._schedule.measures else None,
        )
        region = state.region._replace(params=local)
        return dataclasses.replace(state, region=region), norm, metrics

    def _observe(self, state: TrainState, k: int, flight: InFlight, norm: jax.Array):
        """The state with what the schedule wants to know of an applied mean."""
        if not self._looks:
            return state
        value = norm
        if self._schedule.observes == "effective_rank":
            assert isinstance(self.outer, SharedOuter)
            value = self.outer.effective_rank(state, k, flight)
        observed = (*state.observed, Observation(k, value, flight.times))
        return dataclasses.replace(state, observed=observed)

    def _measure_drift(self, state: TrainState) -> list[float]:
        each = range(len(self._fragments))
        outer = tuple(self.outer.on_mesh(state, k) for k in each)
        return np.asarray(self._drift(state.region.params, outer)).tolist()

    def _rate(self, step: int) -> jax.Array | None:
        if "learning_rate" not in self._method.merge.needs:
            return None
        return self._sources.rate(step)
