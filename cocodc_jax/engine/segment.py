"""Inner steps with the syncs around them, as one compiled program.

    before    encode, send                  each fragment that starts at step s
    steps     inner steps s .. s + T
    after     decode, outer step, merge     one that started at s and is due at s + T

Most segments contain only steps, and starts and finishes are separate programs. If
regions share a fabric (slices of a TPU, GPUs), a device runs programs one after
another, so a message in a separate program blocks the steps. In one program with the
scan of inner steps, the compiler begins the collective before the scan and ends it
after the scan (`overlap`; tests check it in compiled programs).

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
from cocodc_jax.core.sync import Extras, finish
from cocodc_jax.engine.crossing import Exchange, Leaving, MeshCrossing, SyncSpec
from cocodc_jax.engine.merging import (
    MergeScalars,
    make_merge,
    make_remember,
    merge_arguments,
    merge_scalars,
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
# libtpu 0.0.50 has SparseCores look up the rows of a large embedding, asynchronously.
# Nothing overlaps a loop with such an operation in its body.
_TPU_OPTIONS = {"xla_tpu_offload_gather_to_sparsecore": False}
_COMPILER_OPTIONS = {"gpu": _GPU_OPTIONS, "cuda": _GPU_OPTIONS, "tpu": _TPU_OPTIONS}


class Segment(NamedTuple):
    """The syncs that one program contains besides its inner steps; static."""

    # Fragment and rank of each message that is sent before them.
    before: tuple[tuple[int, int], ...] = ()
    # The fragment of `before` that is merged after them, or None.
    after: int | None = None


def plan(spec: SyncSpec, sync: SyncState, step: int) -> tuple[Segment, Event | None]:
    """Return the segment that leads to `step`, and the `FINISH` that ends it, if any.

    A segment ends with a `FINISH` if that is the first event at `step` and its sync
    starts in this segment.
    """
    leaving = tuple((event.fragment_id, event.rank) for event in sync.leaving)
    leaving_ids = {event.sync_id for event in sync.leaving}
    due_ids = {
        pending.sync_id
        for pending in sync.schedule.in_flight
        if pending.apply_step == step
    }
    due_here = due_ids & leaving_ids

    if due_here and not spec.sync.robust:
        _, event = spec.sync.schedule.next_event(sync.schedule, step)
        if event is not None and event.kind == FINISH and event.sync_id in due_here:
            return Segment(leaving, event.fragment_id), event
    return Segment(leaving), None


class Start(NamedTuple):
    """Arguments of a segment for one message that is sent before its steps."""

    # What `SharedOuterModel.broadcast` takes; None for the fragment that is merged.
    outer: tuple | None
    memory: PyTree  # The compressors' state.
    weights: jax.Array  # `[R]`.
    start_step: Any


class _UnderWay(NamedTuple):
    """A message that was sent before the steps of a segment."""

    crossing: MeshCrossing
    copies: Extras  # Of the fragment, by name.
    message: Any
    memory: PyTree  # The compressors' state after it.


def make_segment(
    spec: SyncSpec, model: SharedOuterModel, steps: Callable, segment: Segment
) -> Callable:
    """Make the program of a segment with starts, not yet jitted.

    `run(region, batches, participating, starts, outer, scalars) -> (region, (losses,
    aux), sent, outer, merged)`. `starts` has a `Start` for each of `before`. `sent` has
    the fragments in flight (without `after`) and the compressor states. `outer` is the
    outer fragment and optimizer state of `after`; `scalars` is of `merge_scalars`;
    `merged` a `Merged`. The last two results are None without `after`.
    """
    wants_mean = needs.wants_mean(spec.sync.schedule.needs)

    def crossing_of(
        k: int, rank: int, start: Start, region: RegionState, outer: Any
    ) -> MeshCrossing:
        params, opt_state = outer if start.outer is None else start.outer
        leaving = Leaving(
            params=region.params,
            anchor=model.broadcast(k, params, opt_state),
            memory=start.memory,
            weights=start.weights,
            keys=region.key,
            start_step=start.start_step,
        )
        return MeshCrossing(spec.at(rank), k, leaving, in_one_buffer=True)

    def run(
        region: RegionState,
        batches: PyTree,
        participating: PyTree,
        starts: tuple[Start, ...],
        outer: tuple | None,
        scalars: MergeScalars,
    ) -> tuple:
        under_way = []
        for (k, rank), start in zip(segment.before, starts, strict=True):
            crossing = crossing_of(k, rank, start, region, outer)
            left, memory = crossing.leave()
            copies, message = crossing.cross(left)
            under_way.append(_UnderWay(crossing, copies, message, memory))

        region, (losses, aux) = steps(
            region, batches, participating, None, scalars.frozen
        )
        # A received message is used after the steps, so its collective spans them.
        messages, losses = jax.lax.optimization_barrier(
            ([entry.message for entry in under_way], losses)
        )

        sent = []
        merged = None
        for entry, message in zip(under_way, messages, strict=True):
            k = entry.crossing.fragment_id
            memory = entry.memory
            mean, kept = entry.crossing.arrive((entry.copies, message))
            flight = InFlight(mean, kept)
            if k == segment.after:
                assert outer is not None
                finishing = _Finishing(
                    spec=spec,
                    model=model,
                    fragment_id=k,
                    region=region,
                    flight=flight,
                    batch=jax.tree.map(lambda x: x[-1], batches),
                    scalars=scalars,
                )
                done = finish(finishing, *outer, memory)

                region = done.merged
                memory = done.memory
                merged = (done.norm, done.metrics)
                outer = (
                    spec.place.offload(k, done.outer),
                    spec.place.offload(k, done.opt_state),
                )
                flight = InFlight(
                    mean=mean if wants_mean else None,
                    kept={name: x for name, x in kept.items() if name != STAGED},
                )
            sent.append((flight, memory))
        return region, (losses, aux), tuple(sent), outer, merged

    return run

    return run


@dataclasses.dataclass(frozen=True)
class _Finishing:
    """The stages of a finish in a program of the mesh; see `core.sync.finish`."""

    spec: SyncSpec
    model: SharedOuterModel
    fragment_id: int
    region: RegionState
    flight: InFlight
    batch: PyTree  # The last one, `[R, ...]`.
    scalars: MergeScalars

    def remember(self, memory: PyTree) -> PyTree:
        if not self.spec.sync.merge.has_feedback:
            return memory
        feed_back = make_remember(self.spec, self.fragment_id)
        return feed_back(self.region.params, self.flight.kept[STAGED], memory)

    def step(
        self, outer: PyTree, opt_state: PyTree
    ) -> tuple[PyTree, PyTree, jax.Array]:
        return self.model.step_on_mesh(
            self.fragment_id, outer, opt_state, self.flight.mean, stale_params=None
        )

    def hand_out(self, outer: PyTree, opt_state: PyTree) -> PyTree:
        return self.model.broadcast(self.fragment_id, outer, opt_state)

    def merge(self, received: PyTree) -> tuple[RegionState, dict[str, jax.Array]]:
        arguments = merge_arguments(
            spec=self.spec,
            region=self.region,
            kept=self.flight.kept,
            outer=received,
            batch=self.batch,
            scalars=self.scalars,
        )
        merge = make_merge(self.spec, self.fragment_id)
        params, opt_state, metrics = merge(*arguments)

        region = self.region._replace(params=params)
        if self.spec.trainer.on_merge is not None:
            region = region._replace(opt_state=opt_state)
        return region, metrics


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
    ):
        self._spec = spec
        self._outer = outer
        self._exchange = exchange
        self._weights_of = weights_of
        self._steps: InnerSteps | None = None
        self._programs: dict[Segment, Callable] = {}

    def use_steps(self, steps: InnerSteps) -> None:
        """Take the inner steps that segments have; they compile anew."""
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
        spec = self._spec
        sync = state.sync
        assert sync is not None
        segment, due = plan(spec, sync, step)
        if segment not in self._programs:
            self._programs[segment] = self._make(segment, sync)

        starts = tuple(self._start(event, sync, segment) for event in sync.leaving)
        outer = None
        scalars = MergeScalars(state.frozen)
        if due is not None:
            outer = sync.outer.entry(due.fragment_id)
            scalars = merge_scalars(spec, step, due.start_step, state.frozen)
        region, outputs, sent, new_outer, merged = self._programs[segment](
            state.region, batches, participating, starts, outer, scalars
        )

        memories = sync.compressors
        flights = dict(sync.in_flight)
        for event, (flight, memory) in zip(sync.leaving, sent, strict=True):
            memories = replaced(memories, event.fragment_id, memory)
            flights[event.sync_id] = flight
        new_sync = dataclasses.replace(
            sync, compressors=memories, in_flight=flights, leaving=()
        )
        merged_syncs = {}
        if due is not None:
            outer_state = sync.outer.updated(due.fragment_id, *new_outer)
            new_sync = dataclasses.replace(new_sync, outer=outer_state)
            merged_syncs[due.sync_id] = merged

        new_state = dataclasses.replace(state, region=region, sync=new_sync)
        return new_state, outputs, merged_syncs

    def _start(self, event: Event, sync: SyncState, segment: Segment) -> Start:
        k = event.fragment_id
        devices = self._spec.devices
        outer = None
        if k != segment.after:
            outer = self._outer.broadcast_arguments(*sync.outer.entry(k))

        return Start(
            outer=outer,
            memory=sync.compressors[k],
            weights=devices.weights(self._weights_of(event), regional(self._spec.mesh)),
            start_step=self._spec.start_step(event.start_step),
        )

    def _make(self, segment: Segment, sync: SyncState) -> Callable:
        """Wrap a segment in one jit; see `make_segment`."""
        assert self._steps is not None
        spec = self._spec
        shardings = spec.shardings
        wants_mean = needs.wants_mean(spec.sync.schedule.needs)

        sent = []
        for k, _ in segment.before:
            flight = spec.place.lay_flight(k, self._outer.flight_shapes(k))
            if k != segment.after:
                flight = flight._replace(kept=flight.kept | spec.kept_shardings(k))
            elif not wants_mean:
                flight = flight._replace(mean=None)
            sent.append((flight, shardings.of_regions(k, sync.compressors[k])))

        outer = None
        merged = None
        if segment.after is not None:
            k = segment.after
            outer = tuple(spec.place.lay(k, x) for x in sync.outer.entry(k))
            merged = (NamedSharding(spec.mesh, P()), shardings.region.key)

        names = ", ".join(str(k) for k, _ in segment.before)
        merges = "" if segment.after is None else ", merge"
        num_bytes = sum(self._exchange.num_bytes(k, rank) for k, rank in segment.before)
        platform = spec.mesh.devices.flat[0].platform
        return spec.devices.jit(
            make_segment(spec, self._outer, self._steps.run, segment),
            f"start fragment {names}, inner steps{merges}",
            num_bytes,
            donate_argnums=(0, 4),
            out_shardings=(
                self._steps.region,
                self._steps.losses,
                tuple(sent),
                outer,
                merged,
            ),
            compiler_options=dict(_COMPILER_OPTIONS.get(platform, {})),
        )
