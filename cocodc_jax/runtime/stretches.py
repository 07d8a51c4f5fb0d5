"""Stretches of steps as a run goes through them; see `embedded.py`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.runtime.devices.local_regions import for_all_regions
from cocodc_jax.runtime.devices.mesh import regional
from cocodc_jax.runtime.embedded import Carried, Given, Seen, make_stretch
from cocodc_jax.runtime.exchange.shared import SharedOuterModel
from cocodc_jax.runtime.fused import InnerSteps
from cocodc_jax.runtime.listed import Listed
from cocodc_jax.runtime.setting import Setting
from cocodc_jax.runtime.state import (
    InFlight,
    OuterState,
    RegionState,
    SyncState,
    TrainState,
)
from cocodc_jax.runtime.turns import AppliedSync
from cocodc_jax.runtime.window import Finished
from cocodc_jax.sync.needs import NORM
from cocodc_jax.sync.schedules.base import (
    FINISH,
    START,
    Applied,
    Event,
    Pending,
    ScheduleState,
    events_at,
)
from cocodc_jax.sync.schedules.slotted import Slotted
from cocodc_jax.sync.schedules.traced import events_after, memory_of

PyTree = Any


class Done(NamedTuple):
    """What a stretch did, still on its devices.

    Attributes:
      outputs: `(losses, aux)` of the inner steps, leaves `[room, R]`.
      syncs: those that were applied, in order.
      bytes_sent: what one region had sent for syncs by the end of each step, since the
        stretch began.
    """

    outputs: tuple[jax.Array, dict[str, jax.Array]]
    syncs: tuple[AppliedSync, ...]
    bytes_sent: tuple[int, ...]


class Stretches:
    """The compiled program of a run's stretches."""

    def __init__(
        self,
        setting: Setting,
        outer: SharedOuterModel,
        steps: InnerSteps,
        sent_bytes: Callable[[Event], int],
        abstract: Callable[[ScheduleState, RegionState], SyncState],
    ):
        """Compile nothing yet.

        Args:
          setting: of the run.
          outer: the outer model.
          steps: the inner steps.
          sent_bytes: what one region sends for a sync.
          abstract: of `Beginning`.
        """
        self._setting, self._outer, self._sent_bytes = setting, outer, sent_bytes
        self._abstract = abstract
        schedule = setting.sync.schedule
        assert isinstance(schedule, Slotted)
        self._schedule = schedule
        self._chooses = bool(schedule.needs)
        weights = setting.regions.weights(
            0, 1, setting.sync.weigh, schedule.participating
        )
        self._stretch = make_stretch(outer.place, steps.run, self._chooses)
        self._steps = steps
        self._everywhere = NamedSharding(setting.mesh, P())
        self._weights = jax.device_put(weights, regional(setting.mesh))
        self._rows = jax.jit(lambda tree: jax.tree.map(tuple, tree))

    def run(
        self, state: TrainState, batches: PyTree, counted: Any, num_steps: int
    ) -> tuple[TrainState, Done]:
        """Run inner steps and all events of the steps they lead to.

        Waits for them where the program chooses what starts.

        Args:
          state: donated; its schedule knows of all that was applied.
          batches: `[room, R, ...]`.
          counted: `num_steps` on the device, None where it is the room.
          num_steps: how many.

        Returns:
          The state after them, `step` and `bytes_sent` as before; what was done.
        """
        sync, first = state.sync, state.step
        assert sync is not None
        schedule, each = sync.schedule, range(first + 1, first + num_steps + 1)
        events = None
        if not self._chooses:
            schedule, events = self._plan(schedule, each)
        arguments = self._arguments(
            state.region, sync, batches, first, events, self._idle
        )
        carried, outputs, seen = self._program(*arguments, counted)
        region, outer, compressors, flights = carried
        finished = self._rows(seen.finished)
        if events is None:
            schedule, events = self._learn(schedule, each, seen)
        sync = SyncState(
            OuterState(*map(tuple, zip(*outer, strict=True))),
            schedule,
            compressors,
            in_flight={p.sync_id: flights[p.fragment_id] for p in schedule.in_flight},
        )
        state = dataclasses.replace(state, region=region, sync=sync)
        syncs, sent = [], [0]
        for i, (step, of_step) in enumerate(zip(each, events, strict=True)):
            starting = [e for e in of_step if e.kind == START]
            sent.append(sent[-1] + sum(map(self._sent_bytes, starting)))
            ending = [e for e in of_step if e.kind == FINISH]
            syncs += [self._applied(e, step, finished, i) for e in ending]
        return state, Done(outputs, tuple(syncs), tuple(sent[1:]))

    def listed(
        self,
        region: Any,
        sync: SyncState,
        batches: PyTree,
        counted: Any,
        num_steps: int,
    ) -> Listed:
        """List the program, as of the first steps.

        Args:
          region: abstract, as the others are.
          sync: before the first step.
          batches: `[room, R, ...]`.
          counted: as of `run`.
          num_steps: in one call.
        """
        _, events = self._plan(sync.schedule, range(1, num_steps + 1))
        starting = [e for of_step in events for e in of_step if e.kind == START]
        plan = None if self._chooses else events
        arguments = self._arguments(region, sync, batches, 0, plan, self._shapes)
        sent_bytes = sum(map(self._sent_bytes, starting))
        return Listed(
            "inner steps and syncs",
            self._program,
            (*arguments, counted),
            sent_bytes,
            num_steps,
        )

    @functools.cached_property
    def _program(self) -> Callable:
        outer, each = self._outer, range(self._schedule.num_fragments)
        kept = (self._flying.compressors, self._shapes)
        kept = jax.tree.map(lambda x: x.sharding, kept)
        region, entries = self._steps.region, tuple(map(outer.where.entry, each))
        losses, one = self._steps.losses, self._everywhere
        where = (region, entries, *kept), losses, Seen(one, Finished(one, losses))

        def stretch(region, outer, compressors, flights, memory, *rest):
            carried = Carried(region, outer, compressors, flights, memory)
            carried, (outputs, seen) = self._stretch(carried, *rest)
            # Not what the schedule remembers: the host makes that of what was seen.
            return carried[:-1], outputs, seen

        return jax.jit(stretch, donate_argnums=(0, 1, 2), out_shardings=where)

    @functools.cached_property
    def _flying(self) -> SyncState:
        """A state with each fragment in flight: shapes, dtypes and shardings."""
        num_regions = self._setting.regions.num
        params = jax.eval_shape(
            lambda x: for_all_regions(x, num_regions), self._setting.params
        )
        each = range(self._schedule.num_fragments)
        flying = tuple(Pending(k, 0, self._schedule.delay_steps) for k in each)
        schedule = dataclasses.replace(self._schedule.init(), in_flight=flying)
        return self._abstract(schedule, self._steps.region._replace(params=params))

    @property
    def _shapes(self) -> tuple[InFlight, ...]:
        """What is in flight of each fragment: shapes, dtypes and shardings."""
        return tuple(self._flying.in_flight.values())

    @functools.cached_property
    def _idle(self) -> tuple[InFlight, ...]:
        """What stands for a fragment that is not in flight; never looked at."""
        shapes = self._shapes
        return jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
            out_shardings=jax.tree.map(lambda x: x.sharding, shapes),
        )()

    def _arguments(
        self,
        region: Any,
        sync: SyncState,
        batches: PyTree,
        first: int,
        events: Sequence[Sequence[Event]] | None,
        idle: tuple[InFlight, ...],
    ) -> tuple:
        """Return what the program is given, but for the number of steps.

        Args:
          region: of all regions.
          sync: before the steps.
          batches: `[room, R, ...]`.
          first: steps done before.
          events: of each step; None has the program choose.
          idle: what stands for fragments that are not in flight.
        """
        flying = {p.fragment_id: p.sync_id for p in sync.schedule.in_flight}
        each, room = range(len(sync.compressors)), jax.tree.leaves(batches)[0].shape[0]
        starts = None if events is None else self._starts(events, room)
        rates = None
        if "learning_rate" in self._setting.sync.merge.needs:
            steps = range(first + 1, first + 1 + room)
            rates = np.stack([self._setting.supplies.rate(step) for step in steps])
        flights = tuple(
            sync.in_flight[flying[k]] if k in flying else idle[k] for k in each
        )
        memory = memory_of(self._schedule, sync.schedule)
        # By one call: of what is small each costs as much.
        told = jax.device_put(
            (memory, starts, rates, np.int32(first)), self._everywhere
        )
        memory, starts, rates, step = told
        return (
            region,
            tuple(map(sync.outer.entry, each)),
            sync.compressors,
            flights,
            memory,
            Given(batches, starts, rates),
            step,
            self._weights,
        )

    def _starts(self, events: Sequence[Sequence[Event]], room: int) -> np.ndarray:
        """Return what starts after each step, int32 `[room]`; K for nothing."""
        starts = np.full(room, self._schedule.num_fragments, np.int32)
        for i, of_step in enumerate(events):
            for event in of_step:
                if event.kind == START:
                    starts[i] = event.fragment_id
        return starts

    def _plan(
        self, schedule: ScheduleState, steps: range
    ) -> tuple[ScheduleState, list[list[Event]]]:
        """Go through steps with a schedule that is told nothing of them.

        Returns:
          Its state after them, and the events of each step.
        """
        events = []
        for step in steps:
            events.append([])
            for after, event in events_at(self._schedule, schedule, step):
                schedule = after
                if event is not None:
                    events[-1].append(event)
        return schedule, events

    def _learn(
        self, schedule: ScheduleState, steps: range, seen: Seen
    ) -> tuple[ScheduleState, list[list[Event]]]:
        """Go through steps with a schedule whose choices were made; waits for them."""
        num_params, events = self._setting.fragments.num_params, []
        started, norms = np.asarray(seen.started), np.asarray(seen.finished.norm)
        for step, which, norm in zip(steps, started, norms, strict=False):

            def learn(schedule, event, norm=float(norm)):
                k = event.fragment_id
                seen = {NORM: norm}
                return self._schedule.learn(schedule, Applied(k, num_params[k], seen))

            k = None if which == len(num_params) else int(which)
            schedule, of_step = events_after(self._schedule, schedule, step, k, learn)
            events.append(of_step)
        return schedule, events

    def _applied(
        self, event: Event, step: int, finished: Finished, i: int
    ) -> AppliedSync:
        """Return what was done at an event of a stretch's step number `i`."""
        return AppliedSync(
            event.fragment_id,
            event.start_step,
            step,
            self._sent_bytes(event),
            finished.norm[i],
            {name: rows[i] for name, rows in finished.metrics.items()},
        )
