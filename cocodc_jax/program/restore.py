"""Restart a region that sent a bad update from the outer parameters.

All state that the bad update may have reached is replaced: parameters, the inner
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
import optax

from cocodc_jax.core.state import RegionState, SyncState
from cocodc_jax.exchange.base import SyncSpec
from cocodc_jax.exchange.shared_outer import SharedOuterModel, taken
from cocodc_jax.program.fit import shardings_of
from cocodc_jax.sharding import transfer
from cocodc_jax.sharding.region_map import where_participating
from cocodc_jax.sync.inner_counts import with_counts
from cocodc_jax.sync.inner_keys import with_keys_of
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
        self._spec, self._outer, self._optimizer = spec, outer, optimizer
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
        spec, model, optimizer = self._spec, self._outer, self._optimizer
        fragments, message = spec.fragments, spec.sync.message

        def restore(region, compressors, stale_params, copies, outer, bad):
            params = region.params
            for k in range(len(fragments)):
                part = taken(fragments.take(params, k, lead=1), outer[k], bad)
                params = fragments.put(params, k, part, lead=1)
            fresh = jax.vmap(optimizer.init)(params)
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
            if spec.model_state is not None:
                model_state = taken(model_state, spec.model_state.init, bad)
            region = region._replace(
                params=params, opt_state=opt_state, model_state=model_state
            )
            return region, anew, stale, copies

        return restore
