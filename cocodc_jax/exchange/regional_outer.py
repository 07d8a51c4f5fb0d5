"""Regional outer models: sharded over the mesh, never on a host."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.core import reduce
from cocodc_jax.core import sync as core
from cocodc_jax.core.state import InFlight, OuterState, RegionState, SyncState
from cocodc_jax.exchange.base import SyncSpec, Times, Weights
from cocodc_jax.sharding.mesh import REGION
from cocodc_jax.sharding.region_map import (
    LocalRegions,
    all_gather_regions,
    everywhere,
    for_all_regions,
    pmean_over_regions,
    region_shard_map,
)
from cocodc_jax.sync.fragments import Fragment, PyTree
from cocodc_jax.sync.messages import mean_of_finite
from cocodc_jax.sync.needs import STAGED
from cocodc_jax.sync.outer import RegionalOuter
from cocodc_jax.sync.regions import matchings
from cocodc_jax.sync.schedules.base import Event
from cocodc_jax.transforms.compressor import identity


class RegionalOuterModels:
    """Compiled programs of one outer model per region."""

    def __init__(self, spec: SyncSpec):
        outer = spec.sync.outer
        assert isinstance(outer, RegionalOuter)
        self._spec, self._outer = spec, outer
        self._compressor = spec.sync.message.compressor() or identity()
        self._num_matchings = len(matchings(spec.regions.num))
        each, where = range(len(spec.fragments)), spec.place.lay_sync(self.shapes(None))
        self._send = [
            spec.devices.jit(
                make_regional_send(spec, k),
                f"send fragment {k}",
                self.num_bytes(k),
                out_shardings=(
                    spec.staged(k),
                    spec.place.lay_flight(k, self.flight_shapes(k)).mean,
                    where.outer.opt_states[k],
                ),
            )
            for k in each
        ]
        step = make_regional_step(spec)
        self._step = [
            spec.devices.jit(
                step,
                f"outer step {k}",
                donate_argnums=(0, 1),
                out_shardings=(*where.outer.entry(k), None),
            )
            for k in each
        ]
        self._new_outer = spec.devices.jit(self._make, out_shardings=where.outer)

    def init(self, params: PyTree, schedule: Any) -> SyncState:
        """Return the state before the first step; see `SharedOuterModel.init`."""
        return SyncState(self._new_outer(params), schedule)

    def _make(self, params: PyTree) -> OuterState:
        parts = core.outer_parts(self._spec.fragments, params)
        spread = functools.partial(for_all_regions, num_regions=self._spec.regions.num)
        return OuterState(
            tuple(map(spread, parts)),
            tuple(spread(self._outer.init(part, self._compressor)) for part in parts),
        )

    def shapes(self, schedule: Any) -> SyncState:
        """Return shapes of the state of a schedule, without what is in flight."""
        return SyncState(jax.eval_shape(self._make, self._spec.params), schedule)

    def flight_shapes(self, fragment_id: int) -> InFlight:
        """Return shapes of a fragment that was just sent, without its staged copy."""
        spec, num_regions = self._spec, self._spec.regions.num
        send = make_regional_send(spec, fragment_id)
        spread = functools.partial(for_all_regions, num_regions=num_regions)
        key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        params, keys = jax.eval_shape(spread, (spec.params, key))
        matching = jax.ShapeDtypeStruct((), jnp.int32)
        own = self.shapes(None).outer.entry(fragment_id)
        return InFlight(jax.eval_shape(send, params, *own, keys, matching)[1], {})

    def num_bytes(self, fragment_id: int) -> int:
        """Return the bytes of one region's message; 0 for a single region."""
        if self._spec.regions.num == 1:
            return 0
        part = self._spec.outer_shapes[fragment_id]
        return self._outer.num_bytes(part, self._compressor)

    def send(
        self,
        event: Event,
        weights: Weights,
        times: Times,
        region: RegionState,
        sync: SyncState,
    ) -> tuple[SyncState, InFlight]:
        """Start a sync; see `SharedOuterModel.send`."""
        del weights, times  # Not supported by regional outer models.
        k, outer = event.fragment_id, sync.outer
        # The same draw in every region, and after a restart.
        rng = np.random.default_rng((self._outer.seed, event.start_step, k))
        row = np.int32(rng.integers(self._num_matchings))
        everywhere = NamedSharding(self._spec.mesh, P())
        matching = self._spec.devices.put(row, everywhere)
        staged, arrived, kept = self._send[k](
            region.params, outer.params[k], outer.opt_states[k], region.key, matching
        )
        outer = outer.updated(k, outer.params[k], kept)
        copies = {} if staged is None else {STAGED: staged}
        return dataclasses.replace(sync, outer=outer), InFlight(arrived, copies)

    def receive(
        self, fragment_id: int, flight: InFlight, sync: SyncState
    ) -> tuple[SyncState, jax.Array]:
        """Take the outer steps; return the state and the norm of the mean."""
        k, outer = fragment_id, sync.outer
        *new, norm = self._step[k](*outer.entry(k), flight.mean)
        return dataclasses.replace(sync, outer=outer.updated(k, *new)), norm

    def landing(self, fragment_id: int, sync: SyncState) -> SyncState:
        """Return the state before its last mean is applied; see `RegionalOuter`."""
        if self._outer.land is None:
            return sync
        params, state = sync.outer.entry(fragment_id)
        outer = sync.outer.updated(fragment_id, params, self._outer.land(state))
        return dataclasses.replace(sync, outer=outer)

    def arrived(self, fragment_id: int, flight: InFlight, sync: SyncState) -> PyTree:
        """Return the mean, in its current placement."""
        return flight.mean

    def on_mesh(self, sync: SyncState, fragment_id: int) -> Fragment:
        """Return the regions' outer fragments, `[R, ...]`."""
        return sync.outer.params[fragment_id]

    def hand_out(
        self, event: Event, sync: SyncState
    ) -> tuple[SyncState, Fragment, None]:
        """Give each region its own outer fragment; see `SharedOuterModel.hand_out`."""
        return sync, self.on_mesh(sync, event.fragment_id), None

    def whole(self, sync: SyncState, region: RegionState, mean: Callable) -> PyTree:
        """Return the mean of the regions' outer parameters, on the mesh."""
        params = region.params
        for k, part in enumerate(sync.outer.params):
            params = self._spec.fragments.put(params, k, part, lead=1)
        return mean(params)


def make_regional_send(spec: SyncSpec, fragment_id: int) -> Callable:
    """Make the program that sends one fragment.

    `send(params, outer_params, state, keys, matching) -> (staged, arrived, state)`, all
    regional, except `arrived` if every region receives the same mean. `matching` is an
    int32 scalar, the row to use of `matchings`.
    """
    local, mesh, keeps = spec.local, spec.mesh, STAGED in spec.sync.copies
    outer, compressor = spec.sync.outer, spec.sync.message.compressor() or identity()
    assert isinstance(outer, RegionalOuter)
    num_regions = spec.regions.num
    partners = matchings(num_regions)

    def one_region(outer_params, state, own, key_data):
        return core.send(outer, compressor, own, outer_params, state, key_data)

    def of_regions(params, outer_params, state, keys, matching):
        staged = spec.fragments.take(params, fragment_id, lead=1)
        message, state = local.map(one_region)(outer_params, state, staged, keys)
        if outer.group == "pairs":
            theirs = from_partner(message, matching, partners, local)
            message = local.map(mean_of_two)(message, theirs)
        elif outer.group == "ring":
            two = (from_neighbour(message, by, num_regions, local) for by in (-1, 1))
            message = local.map(mean_of_two)(*two)
        return staged if keeps else None, message, state

    mean_of_two = functools.partial(reduce.mean_of_two, compressor)
    mapped = region_shard_map(
        of_regions, mesh, in_specs=(*(P(REGION),) * 4, P()), out_specs=P(REGION)
    )

    def send(params, outer_params, state, keys, matching):
        staged, out, state = mapped(params, outer_params, state, keys, matching)
        if outer.group == "all":
            out = mean_of_finite(everywhere(mesh, out), compressor)
        return staged, out, state

    return send


def make_regional_step(spec: SyncSpec) -> Callable:
    """Make `step(outer_params, state, arrived) -> (outer_params, state, norm)`.

    All regional; the norm is of the means, the root mean square over regions.
    """
    outer = spec.sync.outer
    assert isinstance(outer, RegionalOuter)
    is_for_all = outer.group == "all"

    def receive(params, state, arrived):
        return core.receive(outer, params, state, arrived, spec.regions.num)

    def step(outer_params, state, arrived):
        if is_for_all:
            arrived = jax.lax.pcast(arrived, REGION, to="varying")
        mapped = spec.local.map(receive, (0, 0, None if is_for_all else 0))
        params, state, norms = mapped(outer_params, state, arrived)
        return params, state, jnp.sqrt(pmean_over_regions((norms**2).mean()))

    return region_shard_map(
        step,
        spec.mesh,
        in_specs=(P(REGION), P(REGION), P() if is_for_all else P(REGION)),
        out_specs=(P(REGION), P(REGION), P()),
    )


def from_neighbour(
    message: PyTree, by: int, num_regions: int, local: LocalRegions
) -> PyTree:
    """Fetch the messages, `[block, ...]`, of the regions `by` positions ahead, 1 or -1.

    One permutation; a device with several regions gathers all, as no network is spared.
    """
    if local.size == 1:
        return reduce.from_neighbour(message, by, num_regions, REGION)
    first = jax.lax.axis_index(REGION) * local.size
    return _of_regions(message, (first + jnp.arange(local.size) + by) % num_regions)


def from_partner(
    message: PyTree, matching: jax.Array, partners: np.ndarray, local: LocalRegions
) -> PyTree:
    """Fetch the messages, `[block, ...]`, of the partners; see `make_regional_send`."""
    if local.size == 1:
        return reduce.from_partner(message, matching, partners, REGION)
    first = jax.lax.axis_index(REGION) * local.size
    row = jnp.asarray(partners)[matching]
    return _of_regions(message, jax.lax.dynamic_slice_in_dim(row, first, local.size))


def _of_regions(message: PyTree, whose: jax.Array) -> PyTree:
    """Gather the messages of all regions, and select those of `whose`."""
    gathered = all_gather_regions(message)
    return jax.tree.map(lambda x: jnp.take(x, whose, axis=0), gathered)
