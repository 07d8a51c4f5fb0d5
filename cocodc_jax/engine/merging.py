"""Programs that merge an arriving fragment, and that restart a region.

A merge is a rule of `sync/merge.py` mapped over the regions.

A region that sent a bad update restarts from the outer parameters (`Restore`). All
state that the bad update may have reached is replaced: parameters, the inner
optimizer's and the model's state, the compressor's residual, the outer parameters that
the region last received, and its copies of fragments in flight, which become those of a
region without progress. Its keys stay, and so do the counts of learning rate schedules
and of accumulated steps, so that it continues at the learning rate of the other
regions.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from cocodc_jax.core import sync as core
from cocodc_jax.core.state import RegionState, SyncState
from cocodc_jax.engine import transfer
from cocodc_jax.engine.crossing import SyncSpec
from cocodc_jax.engine.frozen import joined
from cocodc_jax.engine.mesh import REGION
from cocodc_jax.engine.outer_models import SharedOuterModel, taken
from cocodc_jax.engine.placement import load, offload, shardings_of
from cocodc_jax.engine.region_map import (
    psum_over_regions,
    region_shard_map,
    where_participating,
)
from cocodc_jax.sync import needs
from cocodc_jax.sync.averages import sync_key
from cocodc_jax.sync.fragments import Fragment
from cocodc_jax.sync.inner_counts import with_counts
from cocodc_jax.sync.inner_keys import with_keys_of
from cocodc_jax.sync.model_state import at_state
from cocodc_jax.sync.needs import REGIONAL_COPIES
from cocodc_jax.sync.robust import RESTORED, VERDICT

PyTree = Any


def takes_delay(sync: Any, is_late: bool) -> bool:
    """Return whether a merge takes its delay as an argument."""
    is_measured = sync.schedule.is_measured and sync.schedule.delay_steps > 0
    return is_late or is_measured or sync.message.is_ranked


class MergeScalars(NamedTuple):
    """Arguments of a merge that are equal in all regions."""

    frozen: PyTree = ()  # Parameters that are not trained.
    learning_rate: Any = None  # float32; None if the rule does not need it.
    start_step: Any = None  # int32; likewise.
    delay_steps: Any = None  # int32, at least 1; None for the schedule's own.


def make_merge(spec: SyncSpec, fragment_id: int, is_late: bool = False) -> Callable:
    """Make the program that merges one fragment into the regions.

    `merge(params, opt_state, keys, kept, outer, batch, participating, scalars) ->
    (params, opt_state, metrics)`, of the result of `merge_arguments`; `params` may be
    donated. `participating` is bool `[R]`, the regions that merge, or None for all. The
    new optimizer state is `()` if a merge does not change it (`SyncSpec.on_merge`).
    Metrics are float32 `[R]`.
    """
    sync = spec.sync
    fragments = spec.fragments
    trainer = spec.trainer
    is_regional = spec.place.is_regional
    fixed_delay = None if takes_delay(sync, is_late) else sync.schedule.delay_steps

    def one_region(
        local: Fragment,
        kept: dict[str, PyTree],
        outer: Fragment,
        moments: dict[str, Fragment],
        params: PyTree,
        batch: PyTree,
        key_data: jax.Array | None,
        scalars: MergeScalars,
    ) -> tuple[Fragment, dict[str, jax.Array]]:
        loss_fn = trainer.loss_fn
        user_inputs = trainer.user_inputs
        if batch is not None:
            batch, model_state = batch
            if trainer.model_state is not None:
                loss_fn, user_inputs = at_state(loss_fn, user_inputs, model_state)

        start_step = scalars.start_step
        seen = needs.MergeContext(
            local=local,
            outer=outer,
            kept=kept,
            delay_steps=scalars.delay_steps if fixed_delay is None else fixed_delay,
            regional=moments,
            learning_rate=scalars.learning_rate,
            batch=batch,
            key=None if key_data is None else core.merge_key(key_data),
            whole=lambda part: joined(
                fragments.put(params, fragment_id, part), scalars.frozen
            ),
            loss_fn=loss_fn,
            user_inputs=user_inputs,
            sync_key=None if start_step is None else sync_key(fragment_id, start_step),
        )
        return core.merge(sync, seen)

    def merge(
        params: PyTree,
        opt_state: PyTree,
        keys: jax.Array | None,
        kept: dict[str, PyTree],
        outer: Fragment,
        batch: PyTree,
        participating: jax.Array | None,
        scalars: MergeScalars,
    ) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
        if opt_state is not None:
            opt_state = load(opt_state, spec.shardings.region.opt_state)
        regional = needs.regional(sync.merge.needs, opt_state, trainer.user_inputs)
        moments = {
            name: fragments.take(x, fragment_id, lead=1) for name, x in regional.items()
        }

        if is_regional:
            scalars = _varying(scalars)
        else:
            outer, scalars = _varying((outer, scalars))
        local = fragments.take(params, fragment_id, lead=1)
        in_axes = (0, 0, 0 if is_regional else None, 0, 0, 0, 0, None)
        merged, metrics = spec.local.map(one_region, in_axes)(
            local,
            kept,
            outer,
            moments,
            params if batch is not None else None,
            batch,
            keys,
            scalars,
        )

        if participating is not None:
            merged = where_participating(participating, merged, local)
        new_params = fragments.put(params, fragment_id, merged, lead=1)
        if trainer.on_merge is None:
            return new_params, (), metrics

        moved = spec.local.map(trainer.on_merge)(opt_state, params, new_params)
        if participating is not None:
            moved = where_participating(participating, moved, opt_state)
        new_opt_state = offload(moved, spec.shardings.region.opt_state)
        return new_params, new_opt_state, metrics

    regions = P(REGION)
    of_outer = regions if is_regional else P()
    return region_shard_map(
        merge,
        spec.mesh,
        in_specs=(regions, regions, regions, regions, of_outer, regions, regions, P()),
        out_specs=(regions, regions, regions),
    )


def _varying(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.lax.pcast(x, REGION, to="varying"), tree)


def merging(spec: SyncSpec, fragment_id: int, region: RegionState) -> RegionState:
    """Return the part of the regions' state that a merge reads; None for the rest.

    Of the parameters: the leaves that contain some of the fragment, or all if the rule
    needs the loss of the full model, or a merge changes the optimizer's state.
    """
    params = region.params
    wants_batch = spec.wants_batch

    if not wants_batch and spec.trainer.on_merge is None:
        params = spec.fragments.only(params, fragment_id)
    return region._replace(
        params=params,
        opt_state=region.opt_state if spec.reads_opt_state else None,
        key=region.key if spec.wants_key else None,
        per_step=(),
        model_state=region.model_state if wants_batch else (),
    )


def merge_scalars(
    spec: SyncSpec, step: int, start_step: int, frozen: PyTree, delay: Any = None
) -> MergeScalars:
    """Return the scalars of a merge at `step`; `delay` is None for the schedule's."""
    wanted = spec.sync.merge.needs
    learning_rate = None
    if "learning_rate" in wanted:
        learning_rate = spec.trainer.user_inputs.rate(step)
    return MergeScalars(
        frozen=frozen,
        learning_rate=learning_rate,
        start_step=np.int32(start_step) if "sync_key" in wanted else None,
        delay_steps=delay,
    )


def merge_arguments(
    spec: SyncSpec,
    region: RegionState,
    kept: PyTree,
    outer: PyTree,
    batch: PyTree,
    scalars: MergeScalars,
    participating: Any = None,
) -> tuple:
    """Return the arguments of a merge, None for those that it does not need."""
    wants_batch = spec.wants_batch
    if not wants_batch:
        scalars = scalars._replace(frozen=())

    return (
        region.params,
        region.opt_state if spec.reads_opt_state else None,
        region.key if spec.wants_key else None,
        {name: x for name, x in kept.items() if name in needs.REGIONAL_COPIES},
        outer,
        (batch, region.model_state) if wants_batch else None,
        participating,
        scalars,
    )


def make_gap(spec: SyncSpec, name: str) -> Callable:
    """Make `gap(params [R, ...], outer fragments) -> [K]`, see `core.sync.gap`.

    It costs a reduction of K scalars over regions.
    """
    fragments = spec.fragments
    num_regions = spec.regions.num
    token_counts = spec.trainer.user_inputs.token_counts

    def of_fragment(part: Fragment, local: Fragment) -> jax.Array:
        return core.gap(
            name,
            outer=part,
            local=local,
            num_regions=num_regions,
            token_counts=token_counts,
        )

    def of_region(part: Fragment, local: Fragment) -> jax.Array:
        return of_fragment(part, jax.tree.map(lambda x: x[None], local))

    def gap(params: PyTree, outer: tuple[Fragment, ...]) -> jax.Array:
        local_parts = [fragments.take(params, k, lead=1) for k in range(len(outer))]
        gaps = []
        for part, local in zip(outer, local_parts, strict=True):
            if spec.place.is_regional:  # Each region has an outer fragment of its own.
                gaps.append(jax.vmap(of_region)(part, local).sum())
            else:
                gaps.append(of_fragment(part, local))
        return psum_over_regions(jnp.stack(gaps))

    of_outer = P(REGION) if spec.place.is_regional else P()
    return region_shard_map(
        gap, spec.mesh, in_specs=(P(REGION), of_outer), out_specs=P()
    )


def make_remember(spec: SyncSpec, fragment_id: int) -> Callable:
    """Make `remember(params, staged, memory) -> memory`, not yet jitted.

    See `core.sync.remember`: it feeds back what a fragment's merge drops. `params` are
    the regions' before the merge, `memory` their compressors', leaves `[R, ...]`.
    """
    share = spec.sync.merge.feedback_weight

    def remember(params: PyTree, staged: Fragment, memory: PyTree) -> PyTree:
        local = spec.fragments.take(params, fragment_id, lead=1)
        return core.remember(share, local, staged, memory)

    regions = P(REGION)
    return region_shard_map(
        remember, spec.mesh, in_specs=(regions,) * 3, out_specs=regions
    )


class Restore:
    """Compiled programs that restore regions, one per set of fragments in flight."""

    def __init__(self, spec: SyncSpec, outer: SharedOuterModel):
        self._spec = spec
        self._outer = outer
        self._programs: dict[Any, Callable] = {}
        self._mark = jax.jit(lambda verdict, bad: verdict | jnp.where(bad, RESTORED, 0))

    def __call__(
        self, region: RegionState, sync: SyncState, bad: np.ndarray
    ) -> tuple[RegionState, SyncState]:
        """Restart the regions `bad`."""
        order = sorted(sync.in_flight)
        copies = [_regional_copies(sync.in_flight[sync_id].kept) for sync_id in order]
        before = (region, sync.compressors, sync.stale_params, copies)

        # By fragment; its start step makes no difference.
        fragment_ids = tuple(k for k, _ in order)
        rank = sync.schedule.rank
        names = tuple(tuple(kept) for kept in copies)  # Those of midway come and go.
        key = (fragment_ids, rank, names)
        if key not in self._programs:
            self._programs[key] = jax.jit(
                self._make(fragment_ids, rank), out_shardings=shardings_of(before)
            )

        outer = tuple(
            self._outer.on_mesh(sync, k) for k in range(len(self._spec.fragments))
        )
        mask = transfer.put(bad, self._spec.shardings.region.key)
        new_region, compressors, stale_params, new_copies = self._programs[key](
            *before, outer, mask
        )

        flights = dict(sync.in_flight)
        for sync_id, kept in zip(order, new_copies, strict=True):
            flight = flights[sync_id]
            if VERDICT in flight.kept:  # Else it arrives with the mean of others.
                # Marked so that it restores only once.
                kept[VERDICT] = self._mark(flight.kept[VERDICT], bad)
            flights[sync_id] = flight._replace(kept=flight.kept | kept)
        new_sync = dataclasses.replace(
            sync,
            compressors=compressors,
            stale_params=stale_params,
            in_flight=flights,
        )
        return new_region, new_sync

    def _make(self, fragment_ids: tuple[int, ...], rank: int) -> Callable:
        """Make `restore(region, compressors, stale_params, copies, outer, bad)`.

        It returns the first four, restored. `outer` are the fragments that regions
        receive, and the copies are of the fragments `fragment_ids`.
        """
        spec = self._spec
        model = self._outer
        fragments = spec.fragments
        message = spec.sync.message

        def restore(
            region: RegionState,
            compressors: tuple[PyTree, ...],
            stale_params: tuple[Fragment, ...],
            copies: list[dict[str, Fragment]],
            outer: tuple[Fragment, ...],
            bad: jax.Array,
        ) -> tuple:
            params = region.params
            for k in range(len(fragments)):
                part = taken(fragments.take(params, k, lead=1), outer[k], bad)
                params = fragments.put(params, k, part, lead=1)

            fresh = jax.vmap(spec.trainer.optimizer.init)(params)
            opt_state = where_participating(bad, fresh, region.opt_state)
            opt_state = with_counts(opt_state, region.opt_state)
            opt_state = with_keys_of(opt_state, region.opt_state)

            first_memories = model.compressors(outer, rank)
            memories = tuple(
                where_participating(bad, message.restored(old, new), old)
                for old, new in zip(compressors, first_memories, strict=True)
            )
            anchors = tuple(
                taken(part, outer[k], bad) for k, part in enumerate(stale_params)
            )
            new_copies = [
                {name: taken(part, outer[k], bad) for name, part in kept.items()}
                for k, kept in zip(fragment_ids, copies, strict=True)
            ]

            model_state = region.model_state
            if spec.trainer.model_state is not None:
                model_state = taken(model_state, spec.trainer.model_state.init, bad)
            new_region = region._replace(
                params=params, opt_state=opt_state, model_state=model_state
            )
            return new_region, memories, anchors, new_copies

        return restore


def _regional_copies(kept: dict[str, PyTree]) -> dict[str, PyTree]:
    return {name: x for name, x in kept.items() if name in REGIONAL_COPIES}
