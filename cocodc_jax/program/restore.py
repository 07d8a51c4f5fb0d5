"""Restart a region that sent a bad update from the outer parameters.

All state that the bad update may have reached is replaced: parameters, the inner
optimizer's and the model's state, the compressor's residual, the outer parameters that
the region last received, and its copies of fragments in flight, which become those of a
region without progress. Its key stays, and so do the counts of learning rate schedules,
so that it continues at the learning rate of the other regions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cocodc_jax.core.state import InFlight, RegionState, SyncState
from cocodc_jax.exchange.base import SyncSpec
from cocodc_jax.exchange.shared_outer import SharedOuterModel
from cocodc_jax.program.fit import with_counts
from cocodc_jax.sharding import transfer
from cocodc_jax.sharding.region_map import where_participating
from cocodc_jax.sync.fragments import Fragment
from cocodc_jax.sync.needs import REGIONAL_COPIES
from cocodc_jax.sync.robust import RESTORED, VERDICT

PyTree = Any


class Restore:
    """Compiled programs that restore regions, one per set of fragments in flight."""

    def __init__(
        self,
        spec: SyncSpec,
        outer: SharedOuterModel,
        optimizer: optax.GradientTransformation,
    ):
        """Compile nothing."""
        self._spec, self._outer, self._optimizer = spec, outer, optimizer
        self._programs: dict[Any, Callable] = {}
        self._mark = jax.jit(lambda verdict, bad: verdict | jnp.where(bad, RESTORED, 0))

    def __call__(
        self, region: RegionState, sync: SyncState, bad: np.ndarray
    ) -> tuple[RegionState, SyncState]:
        """Restart the regions `bad`."""
        copies = {
            (*sync_id, name): flight.kept[name]
            for sync_id, flight in sync.in_flight.items()
            for name in REGIONAL_COPIES
            if name in flight.kept
        }
        # By fragment; its start step makes no difference.
        order = sorted(copies)
        of_fragments = [(sync_id[0], copies[sync_id]) for sync_id in order]
        parts = [part for _, part in of_fragments]
        found = region, sync.compressors, sync.stale_params, parts
        which, rank = tuple(k for k, _ in of_fragments), sync.schedule.rank
        if (which, rank) not in self._programs:
            where = jax.tree.map(lambda x: x.sharding, found)
            self._programs[which, rank] = jax.jit(
                make_restore(self._spec, self._outer, self._optimizer, which, rank),
                out_shardings=where,
            )
        outer = tuple(
            self._outer.on_mesh(sync, k) for k in range(len(self._spec.fragments))
        )
        mask = transfer.put(bad, self._spec.shardings.region.key)
        region, compressors, stale_params, parts = self._programs[which, rank](
            *found, outer, mask
        )
        copies = dict(zip(order, parts, strict=True))
        flights = {
            sync_id: self._marked(flight, sync_id, copies, bad)
            for sync_id, flight in sync.in_flight.items()
        }
        return region, dataclasses.replace(
            sync,
            compressors=compressors,
            stale_params=stale_params,
            in_flight=flights,
        )

    def _marked(
        self, flight: InFlight, sync_id: tuple, copies: dict, bad: np.ndarray
    ) -> InFlight:
        """Return a flight with the new copies, marked so that it restores only once."""
        for name in REGIONAL_COPIES:
            if (*sync_id, name) in copies:
                flight = flight.with_kept(name, copies[*sync_id, name])
        if VERDICT not in flight.kept:  # Arrives with the mean of other regions.
            return flight
        return flight.with_kept(VERDICT, self._mark(flight.kept[VERDICT], bad))


def make_restore(
    spec: SyncSpec,
    model: SharedOuterModel,
    optimizer: optax.GradientTransformation,
    which: tuple[int, ...],
    rank: int,
) -> Callable:
    """Make the program that restores some of the regions.

    Returns:
      `restore(region, compressors, stale_params, copies, outer, bad) -> (region,
      compressors, stale_params, copies)`: `outer` are the fragments that regions
      receive, `bad` is bool `[R]`.
    """
    fragments, message = spec.fragments, spec.sync.message

    def restore(region, compressors, stale_params, copies, outer, bad):
        def from_outer(k: int, part: Fragment) -> Fragment:
            spread = jax.tree.map(
                lambda o, x: jnp.broadcast_to(o[None], x.shape).astype(x.dtype),
                outer[k],
                part,
            )
            return where_participating(bad, spread, part)

        params = region.params
        for k in range(len(fragments)):
            part = from_outer(k, fragments.take(params, k, lead=1))
            params = fragments.put(params, k, part, lead=1)
        fresh = jax.vmap(optimizer.init)(params)
        opt_state = where_participating(bad, fresh, region.opt_state)
        opt_state = with_counts(opt_state, region.opt_state)
        anew = tuple(
            where_participating(bad, message.restored(old, new), old)
            for old, new in zip(
                compressors, model.compressors(outer, rank), strict=True
            )
        )
        stale = tuple(from_outer(k, part) for k, part in enumerate(stale_params))
        copies = [from_outer(k, part) for k, part in zip(which, copies, strict=True)]
        region = region._replace(
            params=params,
            opt_state=opt_state,
            model_state=_from_init(spec, bad, region.model_state),
        )
        return region, anew, stale, copies

    return restore


def _from_init(spec: SyncSpec, bad: jax.Array, model_state: PyTree) -> PyTree:
    """Return the models' states, reinitialized in the regions `bad`."""
    if spec.model_state is None:
        return model_state
    first = jax.tree.map(
        lambda x, like: jnp.broadcast_to(x[None], like.shape).astype(like.dtype),
        spec.model_state.init,
        model_state,
    )
    return where_participating(bad, first, model_state)
