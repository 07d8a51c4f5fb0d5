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
from typing import Any

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


def make_merge(spec: SyncSpec, fragment_id: int, is_late: bool = False) -> Callable:
    """Make the program that merges one fragment into the regions.

    `merge(params, opt_state, keys, kept, outer, batch, participating, told) -> (params,
    opt_state, metrics)`, of the result of `merge_arguments`; `params` may be donated.
    `participating` is bool `[R]`, the regions that merge, or None for all. The new
    optimizer state is `()` if a merge does not change it (`SyncSpec.on_merge`). Metrics
    are float32 `[R]`.
    """
    sync, fragments, rule = spec.sync, spec.fragments, spec.sync.merge
    fixed_delay = None if takes_delay(sync, is_late) else sync.schedule.delay_steps
    is_regional = spec.place.is_regional

    def one_region(local, kept, outer, moments, params, batch, key_data, told):
        frozen, learning_rate, start_step, delay_steps = told
        steps = delay_steps if fixed_delay is None else fixed_delay
        loss_fn, user_inputs = spec.trainer.loss_fn, spec.trainer.user_inputs
        if batch is not None:
            batch, model_state = batch
            if spec.trainer.model_state is not None:
                loss_fn, user_inputs = at_state(loss_fn, user_inputs, model_state)
        seen = needs.MergeContext(
            local=local,
            outer=outer,
            kept=kept,
            delay_steps=steps,
            regional=moments,
            learning_rate=learning_rate,
            batch=batch,
            key=None if key_data is None else core.merge_key(key_data),
            whole=lambda part: joined(fragments.put(params, fragment_id, part), frozen),
            loss_fn=loss_fn,
            user_inputs=user_inputs,
            sync_key=None if start_step is None else sync_key(fragment_id, start_step),
        )
        return core.merge(sync, seen)

    def merge(params, opt_state, keys, kept, outer, batch, participating, told):
        if opt_state is not None:
            opt_state = load(opt_state, spec.shardings.region.opt_state)
        found = needs.regional(rule.needs, opt_state, spec.trainer.user_inputs)
        moments = {n: fragments.take(x, fragment_id, lead=1) for n, x in found.items()}
        shared = told if is_regional else (outer, told)
        shared = jax.tree.map(lambda x: jax.lax.pcast(x, REGION, to="varying"), shared)
        outer, told = (outer, shared) if is_regional else shared
        local = fragments.take(params, fragment_id, lead=1)
        axes = (0, 0, 0 if is_regional else None, 0, 0, 0, 0, None)
        whole = params if batch is not None else None
        merged, metrics = spec.local.map(one_region, axes)(
            local, kept, outer, moments, whole, batch, keys, told
        )
        if participating is not None:
            merged = where_participating(participating, merged, local)
        new = fragments.put(params, fragment_id, merged, lead=1)
        if spec.trainer.on_merge is None:
            return new, (), metrics

        moved = spec.local.map(spec.trainer.on_merge)(opt_state, params, new)
        if participating is not None:
            moved = where_participating(participating, moved, opt_state)
        return new, offload(moved, spec.shardings.region.opt_state), metrics

    of_outer = P(REGION) if is_regional else P()
    return region_shard_map(
        merge,
        spec.mesh,
        in_specs=(*(P(REGION),) * 4, of_outer, P(REGION), P(REGION), P()),
        out_specs=(P(REGION), P(REGION), P(REGION)),
    )


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
) -> tuple:
    """Return frozen parameters, learning rate, start step and delay of a merge.

    The last three are scalars, float32 and int32. Rate and start step are None if the
    rule does not need them; the delay, at least 1, is None for the schedule's own.
    """
    rule = spec.sync.merge.needs
    rate = spec.trainer.user_inputs.rate(step) if "learning_rate" in rule else None
    return frozen, rate, np.int32(start_step) if "sync_key" in rule else None, delay


def merge_arguments(
    spec: SyncSpec,
    region: RegionState,
    kept: PyTree,
    outer: PyTree,
    batch: PyTree,
    told: tuple,
    participating: Any = None,
) -> tuple:
    """Return the arguments of a merge, None for those that it does not need."""
    frozen, *rest = told
    wants_batch = spec.wants_batch
    return (
        region.params,
        region.opt_state if spec.reads_opt_state else None,
        region.key if spec.wants_key else None,
        {n: x for n, x in kept.items() if n in needs.REGIONAL_COPIES},
        outer,
        (batch, region.model_state) if wants_batch else None,
        participating,
        (frozen if wants_batch else (), *rest),
    )


def make_gap(spec: SyncSpec, name: str) -> Callable:
    """Make `gap(params [R, ...], outer fragments) -> [K]`, see `core.sync.gap`.

    It costs a reduction of K scalars over regions.
    """
    fragments, num_regions = spec.fragments, spec.regions.num
    token_counts = spec.trainer.user_inputs.token_counts

    def of_fragment(part: Fragment, local: Fragment) -> jax.Array:
        return core.gap(name, part, local, num_regions, token_counts)

    def of_region(part: Fragment, local: Fragment) -> jax.Array:
        return of_fragment(part, jax.tree.map(lambda x: x[None], local))

    def gap(params: PyTree, outer: tuple[Fragment, ...]):
        local = [fragments.take(params, k, lead=1) for k in range(len(outer))]
        if spec.place.is_regional:  # Each region has outer fragments of its own.
            each = [
                jax.vmap(of_region)(part, own).sum()
                for part, own in zip(outer, local, strict=True)
            ]
        else:
            each = list(map(of_fragment, outer, local))
        return psum_over_regions(jnp.stack(each))

    of_outer = P(REGION) if spec.place.is_regional else P()
    return region_shard_map(
        gap, spec.mesh, in_specs=(P(REGION), of_outer), out_specs=P()
    )


def make_remember(spec: SyncSpec, fragment_id: int) -> Callable:
    """Make `remember(params, staged, state) -> state`, not yet jitted; see `core.sync`.

    It feeds back what a fragment's merge drops. `params` are the regions' before the
    merge, `state` their compressors', leaves `[R, ...]`.
    """
    share = spec.sync.merge.feedback_weight

    def remember(params, staged, state):
        local = spec.fragments.take(params, fragment_id, lead=1)
        return core.remember(share, local, staged, state)

    regions = P(REGION)
    return region_shard_map(
        remember, spec.mesh, in_specs=(regions,) * 3, out_specs=regions
    )


class Restore:
    """Compiled programs that restore regions, one per set of fragments in flight."""

    def __init__(self, spec: SyncSpec, outer: SharedOuterModel):
        self._spec, self._outer = spec, outer
        self._programs: dict[Any, Callable] = {}
        self._mark = jax.jit(lambda verdict, bad: verdict | jnp.where(bad, RESTORED, 0))

    def __call__(
        self, region: RegionState, sync: SyncState, bad: np.ndarray
    ) -> tuple[RegionState, SyncState]:
        """Restart the regions `bad`."""
        order = sorted(sync.in_flight)
        each = (sync.in_flight[sync_id].kept.items() for sync_id in order)
        copies = [{n: x for n, x in kept if n in REGIONAL_COPIES} for kept in each]
        found = region, sync.compressors, sync.stale_params, copies
        # By fragment; its start step makes no difference.
        which, rank = tuple(k for k, _ in order), sync.schedule.rank
        key = which, rank, tuple(map(tuple, copies))  # Those of midway come and go.
        if key not in self._programs:
            self._programs[key] = jax.jit(
                self._make(which, rank), out_shardings=shardings_of(found)
            )
        each = range(len(self._spec.fragments))
        outer = tuple(self._outer.on_mesh(sync, k) for k in each)
        mask = transfer.put(bad, self._spec.shardings.region.key)
        region, compressors, stale, copies = self._programs[key](*found, outer, mask)
        flights = dict(sync.in_flight)
        for sync_id, new in zip(order, copies, strict=True):
            flight = flights[sync_id]
            if VERDICT in flight.kept:  # Else it arrives with the mean of others.
                # Marked so that it restores only once.
                new[VERDICT] = self._mark(flight.kept[VERDICT], bad)
            flights[sync_id] = flight._replace(kept=flight.kept | new)
        changes = {"compressors": compressors, "stale_params": stale}
        return region, dataclasses.replace(sync, **changes, in_flight=flights)

    def _make(self, which: tuple[int, ...], rank: int) -> Callable:
        """Make `restore(region, compressors, stale_params, copies, outer, bad)`.

        It returns the first four, restored. `outer` are the fragments that regions
        receive, and the copies are of the fragments `which`.
        """
        spec, model = self._spec, self._outer
        init_opt_state = spec.trainer.optimizer.init
        fragments, message = spec.fragments, spec.sync.message

        def restore(region, compressors, stale_params, copies, outer, bad):
            params = region.params
            for k in range(len(fragments)):
                part = taken(fragments.take(params, k, lead=1), outer[k], bad)
                params = fragments.put(params, k, part, lead=1)
            fresh = jax.vmap(init_opt_state)(params)
            opt_state = where_participating(bad, fresh, region.opt_state)
            opt_state = with_counts(opt_state, region.opt_state)
            opt_state = with_keys_of(opt_state, region.opt_state)
            pairs = zip(compressors, model.compressors(outer, rank), strict=True)
            anew = tuple(
                where_participating(bad, message.restored(old, new), old)
                for old, new in pairs
            )
            stale = tuple(
                taken(part, outer[k], bad) for k, part in enumerate(stale_params)
            )
            copies = [
                {name: taken(part, outer[k], bad) for name, part in each.items()}
                for k, each in zip(which, copies, strict=True)
            ]
            model_state = region.model_state
            if spec.trainer.model_state is not None:
                model_state = taken(model_state, spec.trainer.model_state.init, bad)
            region = region._replace(
                params=params, opt_state=opt_state, model_state=model_state
            )
            return region, anew, stale, copies

        return restore
