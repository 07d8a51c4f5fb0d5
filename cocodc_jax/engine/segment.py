"""Inner steps with the syncs around them, as one compiled program.

    before    encode, send                  each fragment that starts at step s
    steps     inner steps s .. s + T
    after     decode, outer step, merge     one that started at s and is due at s + T

Most segments contain steps only, and starts and finishes are separate programs. Where
regions share a fabric (slices of a TPU, GPUs), a device runs programs one after
another, so a message with its own program blocks the steps. In one program with the
scan of inner steps, the compiler begins the collective before the scan and ends it
after (`overlap`; tests check it in compiled programs).

A barrier ties the received message to the losses, and ties nothing else. Without it the
compiler decodes a compressed message at once and waits for it. A barrier over more
values would serialize the steps.

A start waits for the segment that follows it. If tau is at most the H / K steps between
two starts, T is tau. With a longer tau a segment ends at the next event of another
fragment, and its mean stays in flight until it is due. So it does where an evaluation
or a checkpoint cuts the steps, and with robust means, which are checked before the
merge. At a checkpoint exactly at a start, the fragment is sent by its own program, so
that the saved state is the same. Never hidden are messages without a delay, and those
that `Segments.can_wait` refuses. There is one program per fragment and length T that
occurs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.core.state import InFlight, RegionState, SyncId, SyncState, TrainState
from cocodc_jax.engine.crossing import Exchange, SyncSpec, make_crossing
from cocodc_jax.engine.merging import (
    make_merge,
    make_remember,
    merge_arguments,
    tell_merge,
)
from cocodc_jax.engine.mesh import regional
from cocodc_jax.engine.outer_models import SharedOuterModel
from cocodc_jax.sync import needs
from cocodc_jax.sync.method import Sync
from cocodc_jax.sync.needs import STAGED, STALE
from cocodc_jax.sync.schedules.base import FINISH, Event, replaced

PyTree = Any
# Norm of a mean (float32 scalar), and metrics of its merge (each `[R]`).
Merged = tuple[jax.Array, dict[str, jax.Array]]

# Limit of concurrent collectives on a GPU; XLA's default is 1. All collectives in a
# loop body count: one between regions overlaps the loop only if the limit exceeds them.
_GPU_OPTIONS = {"xla_gpu_experimental_parallel_collective_overlap_limit": 256}


class Segment(NamedTuple):
    """What one program contains besides its inner steps; static."""

    # Fragment and rank of each message that is sent before them.
    before: tuple[tuple[int, int], ...] = ()
    # The fragment of `before` that is merged after them, or None.
    after: int | None = None


def plan(spec: SyncSpec, sync: SyncState, step: int) -> tuple[Segment, Event | None]:
    """Return the segment that leads to `step`, and the `FINISH` that ends it, if any.

    That is the first event at `step`, if its sync starts in this segment.
    """
    leaving = tuple((event.fragment_id, event.rank) for event in sync.leaving)
    due = {
        pending.sync_id
        for pending in sync.schedule.in_flight
        if pending.apply_step == step
    } & {event.sync_id for event in sync.leaving}
    if due and not spec.sync.robust:
        _, event = spec.sync.schedule.next_event(sync.schedule, step)
        if event is not None and event.kind == FINISH and event.sync_id in due:
            return Segment(leaving, event.fragment_id), event
    return Segment(leaving), None


def make_segment(
    spec: SyncSpec, model: SharedOuterModel, steps: Callable, segment: Segment
) -> Callable:
    """Make the program of a segment with starts, not yet jitted.

    `run(region, batches, participating, starts, outer, told) -> (region, (losses, aux),
    sent, outer, merged)`. `starts` has for each of `before`: what
    `SharedOuterModel.broadcast` takes (None for `after`, whose `outer` it is), the
    compressor states, the weights `[R]` and the start step. `sent` has the fragments in
    flight (without `after`) and the compressor states. `outer` is the outer fragment
    and optimizer state of `after`; `told` is of `tell_merge`; `merged` a `Merged`. The
    last two results are None without `after`.
    """
    crossings = [
        make_crossing(spec, k, rank, in_one_buffer=True) for k, rank in segment.before
    ]
    finish = None if segment.after is None else make_finish(spec, model, segment.after)
    is_seen = needs.wants_mean(spec.sync.schedule.needs)

    def run(region, batches, participating, starts, outer, told):
        left = []
        for (k, _), crossing, (given, memory, weights, start_step) in zip(
            segment.before, crossings, starts, strict=True
        ):
            near = model.broadcast(k, *(outer if given is None else given))
            left.append(
                crossing.leave(
                    region.params, near, memory, weights, region.key, start_step
                )
            )
        region, (losses, aux) = steps(region, batches, participating, None, told[0])
        # A received message is used after the steps, so its collective spans them.
        crossed = [each for _, each, _ in left]
        crossed, losses = jax.lax.optimization_barrier((crossed, losses))
        sent, merged = [], None
        for (k, _), crossing, (*_, start_step), each, (staged, _, memory) in zip(
            segment.before, crossings, starts, crossed, left, strict=True
        ):
            mean, told_along = crossing.arrive(each, start_step)
            copies = {} if staged is None else {STAGED: staged}
            flight = InFlight(mean, copies | told_along)
            if k == segment.after:
                assert finish is not None
                batch = jax.tree.map(lambda x: x[-1], batches)
                region, outer, memory, merged = finish(
                    region, outer, memory, flight, batch, told
                )
                flight = InFlight(mean if is_seen else None, told_along)
            sent.append((flight, memory))
        return region, (losses, aux), tuple(sent), outer, merged

    return run


def make_finish(spec: SyncSpec, model: SharedOuterModel, fragment_id: int) -> Callable:
    """Make outer step and merge of a fragment, in a program of the mesh.

    `finish(region, outer, memory, flight, batch, told) -> (region, outer, memory,
    merged)`; see `make_segment`. `batch` is the last one, `[R, ...]`.
    """
    merge = make_merge(spec, fragment_id)
    has_feedback = spec.sync.merge.has_feedback
    remember = make_remember(spec, fragment_id) if has_feedback else None

    def finish(region: RegionState, outer, memory, flight: InFlight, batch, told):
        if remember is not None:
            memory = remember(region.params, flight.kept[STAGED], memory)
        params, opt_state, norm = model.step_on_mesh(
            fragment_id, outer[0], outer[1], flight.mean, None
        )
        near = model.broadcast(fragment_id, params, opt_state)
        arguments = merge_arguments(spec, region, flight.kept, near, batch, told)
        merged, inner_state, metrics = merge(*arguments)
        region = region._replace(params=merged)
        if spec.on_merge is not None:
            region = region._replace(opt_state=inner_state)
        outer = (spec.place.offload(fragment_id, x) for x in (params, opt_state))
        return region, tuple(outer), memory, (norm, metrics)

    return finish


class InnerSteps(NamedTuple):
    """The inner steps of segments."""

    run: Callable  # Of `inner_step.make_steps`, not jitted.
    region: RegionState  # Shardings of the `RegionState`.
    # Sharding of the losses `[T, R]`; None leaves it to the compiler.
    losses: NamedSharding | None


class Segments:
    """Compiled programs of segments whose messages overlap with the inner steps."""

    def __init__(
        self,
        spec: SyncSpec,
        outer: SharedOuterModel,
        exchange: Exchange,
        weights_of: Callable[[Event], tuple[float, ...]],
        steps: InnerSteps,
    ):
        self._spec, self._outer, self._exchange = spec, outer, exchange
        self._weights_of, self._steps = weights_of, steps
        self._programs: dict[Segment, Callable] = {}

    def use_steps(self, steps: InnerSteps) -> None:
        """Take other inner steps; segments compile again."""
        self._steps = steps
        self._programs.clear()

    @staticmethod
    def can_wait(sync: Sync) -> bool:
        """Return whether starts may wait for the segment that follows them."""
        return not (
            sync.schedule.is_by_region
            or sync.schedule.init().in_flight
            or sync.moments
            or sync.message.is_ranked
            or STALE in sync.copies
        )

    def run(
        self, state: TrainState, batches: PyTree, participating: PyTree, step: int
    ) -> tuple[TrainState, tuple, dict[SyncId, Merged]]:
        """Run the segment that leads to `step`."""
        spec, sync = self._spec, state.sync
        assert sync is not None
        segment, finish = plan(spec, sync, step)
        if segment not in self._programs:
            self._programs[segment] = self._make(segment, sync)
        starts = tuple(self._start(event, sync, segment) for event in sync.leaving)
        outer, to_tell = None, (state.frozen, None, None, None)
        if finish is not None:
            outer = sync.outer.entry(finish.fragment_id)
            to_tell = tell_merge(spec, step, finish.start_step, state.frozen)
        region, outputs, sent, outer, merged = self._programs[segment](
            state.region, batches, participating, starts, outer, to_tell
        )
        memories, flights = sync.compressors, dict(sync.in_flight)
        for event, (flight, memory) in zip(sync.leaving, sent, strict=True):
            memories = replaced(memories, event.fragment_id, memory)
            flights[event.sync_id] = flight
        sync = dataclasses.replace(
            sync, compressors=memories, in_flight=flights, leaving=()
        )
        done = {}
        if finish is not None:
            new = sync.outer.updated(finish.fragment_id, *outer)
            sync, done = dataclasses.replace(sync, outer=new), {finish.sync_id: merged}
        return dataclasses.replace(state, region=region, sync=sync), outputs, done

    def _start(self, event: Event, sync: SyncState, segment: Segment) -> tuple:
        spec, k = self._spec, event.fragment_id
        return (
            None if k == segment.after else self._outer.given(*sync.outer.entry(k)),
            sync.compressors[k],
            spec.devices.weights(self._weights_of(event), regional(spec.mesh)),
            spec.start_step(event.start_step),
        )

    def _make(self, segment: Segment, sync: SyncState) -> Callable:
        """Wrap a segment in one jit; see `make_segment`."""
        spec, shardings = self._spec, self._spec.shardings
        is_seen = needs.wants_mean(spec.sync.schedule.needs)
        sent = []
        for k, _ in segment.before:
            flight = spec.place.lay_flight(k, self._outer.flight_shapes(k))
            if k == segment.after:
                flight = flight if is_seen else flight._replace(mean=None)
            elif STAGED in spec.sync.copies:
                flight = flight.with_kept(STAGED, shardings.staged[k])
            sent.append((flight, shardings.of_regions(k, sync.compressors[k])))
        outer = merged = None
        if segment.after is not None:
            k = segment.after
            outer = tuple(spec.place.lay(k, x) for x in sync.outer.entry(k))
            merged = NamedSharding(spec.mesh, P()), shardings.region.key
        names = ", ".join(str(k) for k, _ in segment.before)
        merges = "" if segment.after is None else ", merge"
        of_steps = self._steps.region, self._steps.losses
        is_gpu = spec.mesh.devices.flat[0].platform in ("gpu", "cuda")
        return spec.devices.jit(
            make_segment(spec, self._outer, self._steps.run, segment),
            f"start fragment {names}, inner steps{merges}",
            sum(self._exchange.num_bytes(*each) for each in segment.before),
            donate_argnums=(0, 4),
            out_shardings=(*of_steps, tuple(sent), outer, merged),
            compiler_options=dict(_GPU_OPTIONS) if is_gpu else {},
        )
