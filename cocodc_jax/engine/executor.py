"""Execute a schedule: segments of inner steps, starts and finishes.

Each start and each finish is a compiled program of its own, or part of the segment of
inner steps between them (`segment.py`):

    start     `Outer.send` encodes the fragment and passes it to the exchange
    midway    a copy of the regions' fragments, for merges that compare two halves
    finish    `Outer.receive` takes the outer step with the mean; then the merge

A mean of elastic regions is waited for when it is due, or at the next slot if the
exchange goes on without it. No fragment starts before all due means are applied, so
that all regions make the same choice and measure from the same outer fragments.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.core.state import (
    UNCOUNTED,
    VERDICT_OF_ALL,
    AppliedSync,
    InFlight,
    PendingMean,
    RegionState,
    SyncId,
    SyncState,
    TrainState,
    landed,
)
from cocodc_jax.core.sync import finish
from cocodc_jax.engine import transfer
from cocodc_jax.engine.crossing import Exchange, SyncSpec, Times
from cocodc_jax.engine.merging import (
    Restore,
    make_gap,
    make_merge,
    make_remember,
    merge_arguments,
    merge_scalars,
    merging,
    takes_delay,
)
from cocodc_jax.engine.mesh import is_cpu
from cocodc_jax.engine.outer_models import (
    OuterModel,
    RegionalOuterModels,
    SharedOuterModel,
)
from cocodc_jax.engine.placement import shardings_of, with_shardings
from cocodc_jax.engine.segment import InnerSteps, Merged, Segments
from cocodc_jax.engine.state_means import MomentPrograms, make_model_average
from cocodc_jax.sync import needs
from cocodc_jax.sync.robust import LENGTH_BYTES, VERDICT, left_out
from cocodc_jax.sync.schedules.base import (
    FINISH,
    MIDWAY,
    START,
    Applied,
    Event,
    Pending,
    events_at,
    replaced,
)
from cocodc_jax.sync.schedules.slotted import Slotted

PyTree = Any


@dataclasses.dataclass
class _Run:
    """Mutable context while one step's events are applied."""

    region: RegionState
    sync: SyncState
    step: int
    frozen: PyTree
    batch: PyTree = None  # The last one, `[R, ...]`, if merges need it.
    times: Times = (0.0, 0.0)
    merged: dict[SyncId, Merged] = dataclasses.field(default_factory=dict)
    bytes_sent: int = 0
    applied: list[AppliedSync] = dataclasses.field(default_factory=list)
    late: list[Pending] = dataclasses.field(default_factory=list)

    @classmethod
    def of(
        cls,
        state: TrainState,
        batch: PyTree = None,
        times: Times = (0.0, 0.0),
        merged: dict[SyncId, Merged] | None = None,
    ) -> _Run:
        assert state.sync is not None
        return cls(
            region=state.region,
            sync=state.sync,
            step=state.step,
            frozen=state.frozen,
            batch=batch,
            times=times,
            merged=merged or {},
        )

    def replace(self, **changes: Any) -> None:
        self.sync = dataclasses.replace(self.sync, **changes)

    def launch(self, sync_id: SyncId, flight: InFlight) -> None:
        """Put a fragment in flight, or replace it."""
        self.replace(in_flight={**self.sync.in_flight, sync_id: flight})

    def take(self, sync_id: SyncId) -> InFlight:
        """Remove a fragment from flight and return it."""
        flights = dict(self.sync.in_flight)
        flight = flights.pop(sync_id)
        self.replace(in_flight=flights)
        return flight

    def after(self, state: TrainState) -> TrainState:
        """Return `state` with the changes of this run."""
        return dataclasses.replace(
            state,
            region=self.region,
            sync=self.sync,
            bytes_sent=state.bytes_sent + self.bytes_sent,
        )


class _Finishing:
    """The stages of a finish, each a program of its own; see `core.sync.finish`.

    Attributes:
      flight: what is kept of the fragment, which a restore of regions changes.
    """

    def __init__(self, executor: Executor, run: _Run, event: Event, flight: InFlight):
        self.flight = flight
        self._executor = executor
        self._run = run
        self._event = event
        self._participating: jax.Array | None = None

    def remember(self, memory: PyTree) -> PyTree:
        k = self._event.fragment_id
        return self._executor.remember_dropped(self._run, k, self.flight, memory)

    def step(
        self, outer: PyTree, opt_state: PyTree
    ) -> tuple[PyTree, PyTree, jax.Array]:
        k = self._event.fragment_id
        new_outer, new_opt_state, norm = self._executor.step_outer(
            k, self.flight, outer, opt_state
        )

        state = self._run.sync.outer.updated(k, new_outer, new_opt_state)
        self._run.replace(outer=state)
        return new_outer, new_opt_state, norm

    def hand_out(self, outer: PyTree, opt_state: PyTree) -> PyTree:
        del outer, opt_state  # They are in the run, where a restore reads them.
        executor = self._executor
        self.flight = executor.restore_left_out(self._run, self._event, self.flight)
        received, self._participating = executor.hand_out(
            self._run, self._event, self.flight
        )
        return received

    def merge(self, received: PyTree) -> tuple[PyTree, dict[str, jax.Array]]:
        metrics = self._executor.merge(
            self._run, self._event, self.flight, received, self._participating
        )
        return self._run.region.params, metrics


class Executor:
    """The compiled programs of every fragment, run as the schedule's events require."""

    def __init__(self, spec: SyncSpec, exchange: Exchange, overlap: bool):
        self._spec = spec
        self._exchange = exchange
        self._devices = spec.devices
        self._schedule = spec.sync.schedule
        self._handlers = {
            START: self._start,
            MIDWAY: self._look_midway,
            FINISH: self._finish_or_postpone,
        }

        # On the outer mesh a message has its own device, and so its own threads.
        is_inside = is_cpu(spec.mesh) and exchange.shares_mesh
        self._runs_in_turn = is_inside and spec.mesh.devices.size > 1
        self._last: Any = None  # Of the programs that run in turn.

        # Of one outer model only: restores, segments with syncs, and the feedback.
        self._outer: OuterModel
        self._restore: Restore | None = None
        self._segments: Segments | None = None
        self._remember: list[Callable] | None = None
        if spec.place.is_regional:
            self._outer = RegionalOuterModels(spec)
        else:
            shared = SharedOuterModel(spec, exchange)
            self._outer = shared
            if spec.sync.robust:
                self._restore = Restore(spec, shared)
            if overlap and Segments.can_wait(spec.sync):
                self._segments = Segments(spec, shared, exchange, self._weights)
            if spec.sync.merge.has_feedback:
                self._remember = self._make_remember(shared)
        # What was in flight at the last restore of regions.
        self._sent_before: frozenset[SyncId] = frozenset()

        # Bytes of one region's message of a fragment and rank; 0 for a single region.
        self.message_bytes = functools.cache(self._outer.num_bytes)
        self._moments = MomentPrograms(spec, exchange) if spec.sync.moments else None
        self._average_state = make_model_average(spec)

        # Equal weights of all regions; None if weights depend on the event.
        self._equal_weights: tuple[float, ...] | None = None
        if spec.sync.weigh is None:
            self._equal_weights = tuple(spec.regions.weights(0, 1, None).tolist())

        self._make_merges()
        self._make_observations()

    def _make_remember(self, outer: SharedOuterModel) -> list[Callable]:
        """Make the feedback of each fragment; it donates the compressors' state."""
        spec = self._spec
        return [
            spec.devices.jit(
                make_remember(spec, k),
                donate_argnums=2,
                out_shardings=shardings,
            )
            for k, shardings in enumerate(outer.shardings.compressors)
        ]

    def _make_merges(self) -> None:
        """Make the copies and the merges of each fragment."""
        spec = self._spec
        fragment_ids = range(len(spec.fragments))
        self.copy = [
            self._devices.jit(
                functools.partial(spec.fragments.take, fragment_id=k, lead=1),
                out_shardings=spec.shardings.staged[k],
            )
            for k in fragment_ids
        ]

        # After its usual delay.
        self.merges = [self._make_merge(k) for k in fragment_ids]
        # These take the delay as an argument.
        self._late_merge = functools.cache(
            functools.partial(self._make_merge, is_late=True)
        )

        # Its slots are those to which a late mean is postponed; None waits for it.
        self._postponing: Slotted | None = None
        if self._exchange.goes_on and isinstance(self._schedule, Slotted):
            self._postponing = self._schedule

        def keep(outer: PyTree, message: PyTree) -> PyTree:
            """Apply a region's own message, old minus new, to the outer fragment."""
            return jax.tree.map(lambda o, d: o - d.astype(o.dtype), outer, message)

        self._keep = jax.jit(keep)

    def _make_observations(self) -> None:
        """Make the programs that measure what the schedule asks for."""
        jit = self._devices.jit
        self._gaps = {
            name: jit(make_gap(self._spec, name)) for name in needs.MEASURED_NOW
        }
        self._measure_mean = jit(functools.partial(needs.of_mean, self._schedule.needs))
        self._wants_mean = needs.wants_mean(self._schedule.needs)

    def use_steps(self, steps: InnerSteps) -> None:
        """Take other inner steps for segments with syncs."""
        if self._segments is not None:
            self._segments.use_steps(steps)

    def _run(self, program: Callable, *args: Any, waits_for: int = 1) -> Any:
        """Run a program with collectives, on CPUs after the last one.

        There devices share threads: two concurrent collectives would take each other's
        threads and deadlock. The output of index `waits_for`, which is never donated,
        is waited for.
        """
        if self._runs_in_turn:
            jax.block_until_ready(self._last)

        outputs = program(*args)
        last = outputs[waits_for]
        self._last = last.mean if isinstance(last, InFlight) else last
        return outputs

    def init(
        self, params: PyTree, region: RegionState, schedule: Any = None
    ) -> SyncState:
        """Return the sync state before the first step."""
        if schedule is None:
            schedule = self._schedule.init()
        sync = self._outer.init(params, schedule)

        flights = {
            pending.sync_id: self._message_of_zero(pending, params, region)
            for pending in schedule.in_flight
        }
        return dataclasses.replace(sync, in_flight=flights)

    def _regional_copies(self, pending: Pending) -> frozenset[str]:
        """Return the names of the regions' copies that a sync on its way has."""
        copies = self._spec.sync.copies & set(needs.REGIONAL_COPIES)
        if pending.midway_step is None:
            return copies
        return copies - {needs.HALFWAY}

    def _message_of_zero(
        self, pending: Pending, params: PyTree, region: RegionState
    ) -> InFlight:
        """Make the zero message that arrives at a stale schedule's first slot."""
        k = pending.fragment_id
        shapes = self._outer.flight_shapes(k)
        flight: InFlight = jax.tree.map(
            lambda x, sharding: jnp.zeros(x.shape, x.dtype, device=sharding),
            shapes,
            self._spec.place.lay_flight(k, shapes),
        )
        for name in self._regional_copies(pending):
            flight = flight.with_kept(name, self.copy[k](region.params))

        zero_anchor = flight.kept.get(needs.STALE)
        if zero_anchor is not None:
            part = self._spec.fragments.take(params, k)
            moved = transfer.move(part, shardings_of(zero_anchor))
            anchor = jax.tree.map(
                lambda x, like: jnp.array(x, like.dtype, copy=True), moved, zero_anchor
            )
            flight = flight.with_kept(needs.STALE, anchor)
        return flight

    def abstract(self, schedule: Any, region: RegionState) -> SyncState:
        """Return shapes and shardings of the state at which `schedule` was taken."""
        flights = {}
        for pending in schedule.in_flight:
            k = pending.fragment_id
            flight = self._outer.flight_shapes(k)
            names = self._regional_copies(pending)
            if names:  # Tracing a copy takes time at a restore.
                shapes = jax.eval_shape(self.copy[k], region.params)
                copy = with_shardings(shapes, self._spec.shardings.staged[k])
                for name in names:
                    flight = flight.with_kept(name, copy)
            flights[pending.sync_id] = flight

        sync = dataclasses.replace(self._outer.shapes(schedule), in_flight=flights)
        return with_shardings(sync, self._spec.place.lay_sync(sync))

    def run_segment(
        self, state: TrainState, batches: PyTree, participating: PyTree, step: int
    ) -> tuple[TrainState, tuple, dict[SyncId, Merged]] | None:
        """Run inner steps with the starts before them; None if there are none."""
        if self._segments is None or state.sync is None or not state.sync.leaving:
            return None
        return self._run(self._segments.run, state, batches, participating, step)

    def run_events(
        self,
        state: TrainState,
        batches: PyTree,
        num_steps: int,
        times: Times,
        merged: dict[SyncId, Merged],
    ) -> tuple[TrainState, tuple[AppliedSync, ...]]:
        """Apply the events of `state.step`."""
        last_batch = None
        if self._spec.wants_batch:
            last_batch = self._devices.at(batches, num_steps - 1)
        run = _Run.of(state, last_batch, times, merged)

        observe = functools.partial(self._observe, run)
        for schedule, event in events_at(
            self._schedule, run.sync.schedule, state.step, observe
        ):
            if event is not None:
                self._handlers[event.kind](run, event)
            run.replace(schedule=schedule)

        if run.late:
            schedule = run.sync.schedule
            in_flight = (*run.late, *schedule.in_flight)
            run.replace(schedule=dataclasses.replace(schedule, in_flight=in_flight))
        if run.applied and self._average_state is not None:
            self._average_model_state(run, self._average_state)
        return run.after(state), tuple(run.applied)

    def _start(self, run: _Run, event: Event) -> None:
        """Start a fragment, now or with the inner steps that follow."""
        if self._segments is None:
            self._send(run, event)
        else:
            run.replace(leaving=(*run.sync.leaving, event))

        # Asynchronous regions send one at a time: each event counts for one of R.
        share = 1 / self._spec.regions.num if self._schedule.is_by_region else 1
        run.bytes_sent += round(self.sent_bytes(event) * share)

    def _send(self, run: _Run, event: Event) -> None:
        """Send a fragment with its own program."""
        weights = self._weights(event)
        run.sync, flight = self._run(
            self._outer.send, event, weights, run.times, run.region, run.sync
        )

        if self._moments:
            due = self._moments.due(event)
            if due:
                opt_state, _ = self._run(
                    self._moments.average, run.region.opt_state, weights, due
                )
                run.region = run.region._replace(opt_state=opt_state)
        run.launch(event.sync_id, flight)

    def _weights(self, event: Event) -> tuple[float, ...]:
        """Return the regions' weights in a mean, of sum 1; 0 for silent ones."""
        if self._equal_weights is not None and event.participating is None:
            return self._equal_weights

        weights = self._spec.regions.weights(
            event.since_step,
            event.start_step,
            self._spec.sync.weigh,
            event.participating,
        )
        return tuple(weights.tolist())

    def _settle(self, run: _Run) -> None:
        """Send the starts that wait for inner steps, with their own programs."""
        for event in run.sync.leaving:
            self._send(run, event)
        run.replace(leaving=())

    def sent_bytes(self, event: Event) -> int:
        """Return the bytes one region sends for a sync, including moments."""
        num_bytes = self.message_bytes(event.fragment_id, event.rank)
        if self._moments:
            num_bytes += self._moments.num_bytes(self._moments.due(event))
        return num_bytes

    def _look_midway(self, run: _Run, event: Event) -> None:
        """Keep a copy of a fragment halfway to its merge."""
        self._settle(run)
        copy = self.copy[event.fragment_id](run.region.params)
        flight = run.sync.in_flight[event.sync_id].with_kept(needs.HALFWAY, copy)
        run.launch(event.sync_id, flight)

    def _finish_or_postpone(self, run: _Run, event: Event) -> None:
        """Finish a sync, or postpone it to the next slot if its mean is late."""
        # Without a delay the sync has not left yet: `_finish` sends it first.
        flight = run.sync.in_flight.get(event.sync_id)
        mean = None if flight is None else flight.mean
        is_missing = isinstance(mean, PendingMean) and not mean.is_ready()

        if self._postponing is not None and is_missing:
            slot = self._postponing.next_slot(run.step - 1)  # This step, if it is one.
            if slot > run.step:
                pending = Pending(
                    *event.sync_id,
                    apply_step=slot,
                    midway_step=None,
                    participating=event.participating,
                    rank=event.rank,
                )
                run.late.append(pending)
                return

        self._finish(run, event)

    def _finish(self, run: _Run, event: Event) -> None:
        """Take an outer step with a mean and merge it; waits for elastic regions."""
        k = event.fragment_id
        merged = run.merged.get(event.sync_id)
        if merged is None:
            self._settle(run)  # Before a merge changes what is sent.
        flight = landed(run.take(event.sync_id))

        if merged is not None:  # By the segment before.
            norm, metrics = merged
        else:
            finishing = _Finishing(self, run, event, flight)
            outer, opt_state = run.sync.outer.entry(k)
            memories = run.sync.compressors
            done = finish(finishing, outer, opt_state, memories[k] if memories else ())
            flight = finishing.flight
            norm = done.norm
            metrics = done.metrics

        num_bytes = 0
        if event.start_step > 0:  # Not the zero message of a stale schedule.
            num_bytes = self.sent_bytes(event)
            self._note(run, k, flight, norm)

        verdict = flight.kept.get(VERDICT, flight.kept.get(VERDICT_OF_ALL))
        run.applied.append(
            AppliedSync(
                fragment_id=k,
                start_step=event.start_step,
                apply_step=run.step,
                num_bytes=num_bytes,
                norm=norm,
                metrics=metrics,
                verdict=verdict,
            )
        )

    def remember_dropped(
        self, run: _Run, k: int, flight: InFlight, memory: PyTree
    ) -> PyTree:
        """Feed what the merge drops into the next message; see `core.remember`."""
        if self._remember is None:
            return memory

        params = merging(self._spec, k, run.region).params
        new_memory = self._remember[k](params, flight.kept[needs.STAGED], memory)
        run.replace(compressors=replaced(run.sync.compressors, k, new_memory))
        return new_memory

    def step_outer(
        self, k: int, flight: InFlight, outer: PyTree, opt_state: PyTree
    ) -> tuple[PyTree, PyTree, jax.Array]:
        """Take the outer step; return the norm of the mean too."""
        if not self._spec.place.on_mesh:
            return self._outer.receive(k, flight, outer, opt_state)
        return self._run(self._outer.receive, k, flight, outer, opt_state, waits_for=2)

    def restore_left_out(self, run: _Run, event: Event, flight: InFlight) -> InFlight:
        """Restore the regions that a mean left out; waits for the verdict."""
        verdict_of_all = flight.kept.get(VERDICT_OF_ALL)
        if verdict_of_all is not None:
            # A message sent before the last restore must not trigger another.
            is_new = event.sync_id not in self._sent_before
            own_verdict = self._exchange.own_verdict(np.asarray(verdict_of_all))
            verdict = own_verdict * is_new
        elif VERDICT in flight.kept:
            verdict = self._devices.read(flight.kept[VERDICT])
        else:
            return flight

        bad = left_out(verdict)
        if not bad.any():
            return flight

        assert self._restore is not None
        run.launch(event.sync_id, flight)
        self._sent_before = frozenset(run.sync.in_flight)
        run.region, run.sync = self._restore(run.region, run.sync, bad)
        return run.take(event.sync_id)

    def hand_out(
        self, run: _Run, event: Event, flight: InFlight
    ) -> tuple[PyTree, jax.Array | None]:
        """Return the outer fragment on the mesh, and which regions merge it."""
        run.sync, received, participating = self._outer.hand_out(event, run.sync)

        uncounted = flight.kept.get(UNCOUNTED)
        if uncounted is not None:
            # Apply the region's own update if it missed the mean: the region keeps its
            # work and sends it with the next message.
            message = transfer.move(uncounted, shardings_of(received))
            received = self._keep(received, message)
        return received, participating

    def merge(
        self,
        run: _Run,
        event: Event,
        flight: InFlight,
        received: PyTree,
        participating: jax.Array | None,
    ) -> dict[str, jax.Array]:
        """Merge an outer fragment into the regions; return the merge's metrics."""
        k = event.fragment_id
        spec = self._spec
        age = run.step - event.start_step
        is_late = self._postponing is not None and age > self._postponing.delay_steps
        delay = np.int32(max(age, 1)) if takes_delay(spec.sync, is_late) else None

        arguments = merge_arguments(
            spec,
            merging(spec, k, run.region),
            flight.kept,
            received,
            run.batch,
            merge_scalars(spec, run.step, event.start_step, run.frozen, delay),
            participating,
        )
        program = self._late_merge(k) if is_late else self.merges[k]
        merged, opt_state, metrics = program(*arguments)

        params = spec.fragments.over(run.region.params, merged)
        run.region = run.region._replace(params=params)
        if spec.trainer.on_merge is not None:
            run.region = run.region._replace(opt_state=opt_state)
        return metrics

    def _make_merge(self, fragment_id: int, is_late: bool = False) -> Callable:
        shardings = self._spec.shardings.region
        part_shardings = merging(self._spec, fragment_id, shardings)
        has_state = self._spec.trainer.on_merge is not None
        opt_state = shardings.opt_state if has_state else ()
        return self._devices.jit(
            make_merge(self._spec, fragment_id, is_late=is_late),
            f"merge fragment {fragment_id}",
            donate_argnums=(0, 1) if has_state else 0,
            out_shardings=(part_shardings.params, opt_state, shardings.key),
        )

    def _average_model_state(self, run: _Run, average: Callable) -> None:
        assert self._spec.trainer.model_state is not None
        is_robust = self._spec.sync.robust is not None
        # Those of finite parameters are averaged.
        checked = run.region.params if is_robust else None
        model_state, _ = self._run(average, run.region.model_state, checked)

        run.region = run.region._replace(model_state=model_state)
        run.bytes_sent += self._spec.trainer.model_state.averaged_bytes
        if is_robust:
            run.bytes_sent += LENGTH_BYTES

    def _note(self, run: _Run, k: int, flight: InFlight, norm: jax.Array) -> None:
        """Keep on device what the schedule needs to know of an applied mean."""
        known = {needs.NORM: norm, "times": flight.kept.get("times")}
        observed = {
            name: value for name, value in known.items() if name in self._schedule.needs
        }
        if self._wants_mean:  # Off the regions' critical path.
            mean = self._outer.arrived(k, flight, run.sync.outer.params[k])
            observed |= self._measure_mean(mean)
        if observed:
            run.replace(observed=(*run.sync.observed, {k: observed}))

    def _observe(self, run: _Run, name: str) -> Any:
        """Answer a schedule's query, see `Schedule.next_event`; waits for devices."""
        if name == "applied":
            applied = self._read(run.sync)
            run.replace(observed=())
            return applied

        outer = tuple(
            self._outer.on_mesh(run.sync, k) for k in range(len(self._spec.fragments))
        )
        gaps = self._gaps[name](run.region.params, outer)
        return self._devices.read(gaps).tolist()

    def _read(self, sync: SyncState) -> list[Applied]:
        """Read the observations that the schedule lacks; waits for devices."""
        read = self._devices.read
        num_params = self._spec.fragments.num_params
        applied = []
        for observed in sync.observed:
            for k, arrays in observed.items():
                values = {name: read(x).tolist() for name, x in arrays.items()}
                applied.append(Applied(k, num_params[k], values))
        return applied

    @property
    def num_rounds(self) -> int:
        """Number of intervals after which a run has compiled all its programs."""
        return self._moments.num_rounds if self._moments else 1

    def synchronize(self, state: TrainState) -> TrainState:
        """Send the starts that wait, and pass all observations to the schedule."""
        run = _Run.of(state)
        self._settle(run)

        schedule = run.sync.schedule
        for applied in self._read(run.sync):
            schedule = self._schedule.learn(schedule, applied)

        run.replace(schedule=schedule, observed=())
        return run.after(state)

    def land(self, state: TrainState) -> tuple[TrainState, tuple[Pending, ...]]:
        """Apply all fragments in flight now, oldest first, as if they had arrived.

        If messages are a full round late, the progress since the last start is sent and
        applied too, as at the end of a round, since the merge replaces it.
        """
        run = _Run.of(state)
        self._settle(run)

        schedule = run.sync.schedule
        in_flight = list(schedule.in_flight)
        copies = self._spec.sync.copies
        lacks_copy = needs.HALFWAY in copies and any(
            needs.HALFWAY not in run.sync.in_flight[pending.sync_id].kept
            for pending in in_flight
        )
        dropped: tuple[Pending, ...] = ()
        if lacks_copy or self._spec.wants_batch:
            dropped = tuple(in_flight)
            in_flight = []
        elif state.step and self._schedule.init().in_flight:
            for k, last in enumerate(schedule.last_start):
                if last < state.step and needs.HALFWAY not in copies:
                    pending = Pending(k, state.step, state.step, rank=schedule.rank)
                    start = pending.event(START)._replace(since_step=max(last, 0))
                    self._start(run, start)
                    in_flight.append(pending)

        for i, pending in enumerate(in_flight):
            k = pending.fragment_id
            if all(later.fragment_id != k for later in in_flight[i + 1 :]):
                run.sync = self._outer.landing(k, run.sync)
            self._finish(run, pending.event(FINISH))
        run.replace(schedule=self._schedule.landed(schedule), in_flight={})
        return run.after(state), dropped

    def restore(self, state: TrainState, bad: np.ndarray) -> TrainState:
        """Send the starts that wait, and restart the regions `bad`, bool `[R]`."""
        assert self._restore is not None
        run = _Run.of(state)
        self._settle(run)

        self._sent_before = frozenset(run.sync.in_flight)
        run.region, run.sync = self._restore(run.region, run.sync, bad)
        return run.after(state)

    def outer_params(self, state: TrainState, mean: Any) -> PyTree:
        """Return the outer parameters on the mesh; `mean` averages regional ones."""
        assert state.sync is not None
        return self._outer.whole(state.sync, state.region, mean)

    def compressors_of(self, sync: SyncState, rank: int) -> PyTree:
        """Return the regions' compressor states, resized to messages of `rank`."""
        return self._outer.compressors_of(sync, rank)
