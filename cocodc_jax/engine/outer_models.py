"""Outer models: where they are, how fragments leave them and means arrive.

One for all regions (`SharedOuterModel`), or one for each (`RegionalOuterModels`),
sharded over the mesh and never on a host. Both are an `OuterModel`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.core import sync as core
from cocodc_jax.core.state import InFlight, OuterState, RegionState, SyncState
from cocodc_jax.core.sync import outer_parts, outer_step
from cocodc_jax.engine.crossing import Exchange, Sending, SyncSpec, Times, Weights
from cocodc_jax.engine.mesh import REGION
from cocodc_jax.engine.region_map import (
    everywhere,
    for_all_regions,
    pmean_over_regions,
    region_shard_map,
    where_participating,
)
from cocodc_jax.sync.axis import GATHERED
from cocodc_jax.sync.fragments import Fragment, PyTree
from cocodc_jax.sync.needs import STALE
from cocodc_jax.sync.outer import RegionalOuter, SharedOuter
from cocodc_jax.sync.regions import matchings
from cocodc_jax.sync.schedules.base import Event, replaced
from cocodc_jax.transforms.numerics import cast_like


class OuterModel(Protocol):
    """The programs of outer models; a fragment leaves them, and a mean arrives."""

    def init(self, params: PyTree, schedule: Any) -> SyncState:
        """Return the initial state, also of regions that join later.

        `params` are one region's, on the mesh; compressor states have the rank of
        `schedule`, the schedule's state.
        """
        ...

    def shapes(self, schedule: Any) -> SyncState:
        """Return shapes of the state of a schedule, without what is in flight."""
        ...

    def flight_shapes(self, fragment_id: int) -> InFlight:
        """Return shapes of a fragment that was just sent, without its staged copy."""
        ...

    def num_bytes(self, fragment_id: int, rank: int = 0) -> int:
        """Return the bytes of one region's message; 0 for a single region."""
        ...

    def compressors_of(self, sync: SyncState, rank: int) -> tuple:
        """Return the compressors' states, of messages of `rank`."""
        ...

    def send(
        self,
        event: Event,
        weights: Weights,
        times: Times,
        region: RegionState,
        sync: SyncState,
    ) -> tuple[SyncState, InFlight]:
        """Start a sync, see `Exchange.send`; return the state and what is in flight."""
        ...

    def receive(
        self, fragment_id: int, flight: InFlight, outer: Fragment, opt_state: PyTree
    ) -> tuple[Fragment, PyTree, jax.Array]:
        """Take the outer step; return the norm of the mean too. Donates the state."""
        ...

    def landing(self, fragment_id: int, sync: SyncState) -> SyncState:
        """Return the state before its last mean is applied; see `RegionalOuter`."""
        ...

    def arrived(self, fragment_id: int, flight: InFlight, outer: Fragment) -> PyTree:
        """Return the mean, in the placement of the outer fragment."""
        ...

    def on_mesh(self, sync: SyncState, fragment_id: int) -> Fragment:
        """Return an outer fragment as regions receive it, on the mesh."""
        ...

    def hand_out(
        self, event: Event, sync: SyncState
    ) -> tuple[SyncState, Fragment, jax.Array | None]:
        """Give an outer fragment to the regions that merge it.

        Returns the state, the fragment on the mesh, and which regions merge it, bool
        `[R]`; None is all.
        """
        ...

    def whole(self, sync: SyncState, region: RegionState, mean: Callable) -> PyTree:
        """Return all outer parameters, on the mesh; `mean` is over regions."""
        ...


class SharedOuterModel:
    """Compiled programs of one outer model."""

    def __init__(self, spec: SyncSpec, exchange: Exchange):
        outer = spec.sync.outer
        assert isinstance(outer, SharedOuter)
        self._spec, self._outer, self._exchange = spec, outer, exchange
        self._place, self._devices = spec.place, spec.devices
        self._step = self._make_steps()
        self._resize = functools.cache(self._make_resize)
        self._broadcast = [
            self._devices.jit(functools.partial(self.broadcast, k), out_shardings=where)
            for k, where in enumerate(spec.shardings.fragments)
        ]
        self._copy = self._devices.jit(_copies)
        self._take = self._devices.jit(taken, donate_argnums=0)
        self._start = self._devices.jit(outer.start) if outer.start else None
        self._join = self._devices.jit(self._joined, out_shardings=spec.place.params())
        shapes = self.shapes(spec.sync.schedule.init())
        self.where = spec.place.lay_sync(shapes)  # Without what is in flight.
        outer = self.where.outer
        if self._place.has_channels:  # One program, so one channel.
            outer = self._on_one_channel(shapes.outer)
        self._new_outer = self._devices.jit(self._outer_of, out_shardings=outer)
        # By rank of the messages, if the schedule sets one.
        self._new_regional: dict[int, Callable] = {}

    def init(self, params: PyTree, schedule: Any) -> SyncState:
        """Return the initial state; see `OuterModel.init`."""
        outer = self._new_outer(self._devices.move(params, self._place.params()))
        if self._place.has_channels:
            outer = self._devices.move(outer, self.where.outer)
        rank = schedule.rank
        if rank not in self._new_regional:
            self._new_regional[rank] = self._make_regional(schedule)
        return SyncState(outer, schedule, *self._new_regional[rank](params))

    def _make_regional(self, schedule: Any) -> Callable:
        """Make the function from parameters to the regions' part of the state."""
        shapes = self.shapes(schedule)
        found = shapes.compressors, shapes.stale_params
        if not jax.tree.leaves(found):  # Most compressors have no state.
            return lambda _: found
        laid = self._place.lay_sync(shapes)
        make = functools.partial(self._regional_of, rank=schedule.rank)
        where = laid.compressors, laid.stale_params
        return self._devices.jit(make, out_shardings=where)

    def _outer_of(self, params: PyTree) -> OuterState:
        parts = outer_parts(self._spec.fragments, params)
        return OuterState(parts, tuple(map(self._outer.optimizer.init, parts)))

    def _regional_of(self, params: PyTree, rank: int) -> tuple[tuple, tuple]:
        parts, num = outer_parts(self._spec.fragments, params), self._spec.regions.num
        stale = parts if self._spec.sync.schedule.is_by_region else ()
        each = tuple(for_all_regions(part, num) for part in stale)
        return self.compressors(parts, rank), each

    def compressors(self, parts: tuple[Fragment, ...], rank: int) -> tuple:
        """Return the initial states of the regions' compressors."""
        message, num = self._spec.at(rank).sync.message, self._spec.regions.num
        return tuple(for_all_regions(message.init(part), num) for part in parts)

    def num_bytes(self, fragment_id: int, rank: int = 0) -> int:
        """Return the bytes of one region's message; 0 for a single region."""
        return self._exchange.num_bytes(fragment_id, rank)

    def landing(self, fragment_id: int, sync: SyncState) -> SyncState:
        """Return the state as it is."""
        return sync

    def compressors_of(self, sync: SyncState, rank: int) -> tuple:
        """Return the compressors' states, of messages of `rank`."""
        if rank == sync.schedule.rank:
            return sync.compressors
        states = enumerate(sync.compressors)
        return tuple(self._resize(k, rank)(state) for k, state in states)

    def _make_resize(self, fragment_id: int, rank: int) -> Callable:
        message = self._spec.at(rank).sync.message
        part = self._spec.outer_shapes[fragment_id]
        # Which leaves are factored depends on the rank.
        (state,) = jax.eval_shape(lambda x: self.compressors((x,), rank), part)
        return self._devices.jit(
            jax.vmap(lambda state: message.resized(state, part)),
            out_shardings=self._spec.shardings.of_regions(fragment_id, state),
        )

    def shapes(self, schedule: Any) -> SyncState:
        """Return shapes of the state of a schedule, without what is in flight."""

        def make(params):
            regional = self._regional_of(params, schedule.rank)
            return SyncState(self._outer_of(params), schedule, *regional)

        return jax.eval_shape(make, self._spec.params)

    def flight_shapes(self, fragment_id: int) -> InFlight:
        """Return shapes of a fragment that was just sent, without its staged copy."""
        part = self._spec.outer_shapes[fragment_id]
        kept = {STALE: part} if STALE in self._spec.copies else {}
        return InFlight(part, kept | self._exchange.arrives_with())

    def _on_one_channel(self, outer: OuterState) -> OuterState:
        lay = functools.partial(self._place.lay, channel=0)
        return OuterState(*(tuple(map(lay, range(len(x)), x)) for x in outer))

    def send(
        self,
        event: Event,
        weights: Weights,
        times: Times,
        region: RegionState,
        sync: SyncState,
    ) -> tuple[SyncState, InFlight]:
        """Start a sync; see `OuterModel.send`."""
        k = event.fragment_id
        memories = self.compressors_of(sync, event.rank)
        kept = {}
        if STALE in self._spec.copies:  # The outer step donates them.
            kept[STALE] = self._copied(sync.outer.params[k])
        anchor = sync.stale_params[k] if sync.stale_params else self.on_mesh(sync, k)
        if not self._spec.sync.robust:  # Which looks at all parameters.
            only = self._spec.fragments.only(region.params, k)
            region = region._replace(params=only)

        sending = Sending(event, weights, times, region, anchor, memories[k])
        mean, extras, memory = self._exchange.send(sending)
        sync = dataclasses.replace(sync, compressors=replaced(memories, k, memory))
        return sync, InFlight(mean, kept | extras)

    def receive(
        self, fragment_id: int, flight: InFlight, outer: Fragment, opt_state: PyTree
    ) -> tuple[Fragment, PyTree, jax.Array]:
        """Take the outer step; see `OuterModel.receive`."""
        mean = self.arrived(fragment_id, flight, outer)
        stale = flight.kept.get(STALE)
        return self._step[fragment_id](outer, opt_state, mean, stale)

    def arrived(self, fragment_id: int, flight: InFlight, outer: Fragment) -> Fragment:
        """Return the mean, in the placement of the outer fragment."""
        if self._place.on_mesh or self._place.is_with_regions:
            return flight.mean
        where = jax.tree.map(lambda x: x.sharding, outer)
        return self._devices.move(flight.mean, where)

    def _copied(self, part: Fragment) -> Fragment:
        """Return a copy of outer parameters, in the same placement."""
        if not self._place.is_pinned:
            return self._copy(part)
        where = jax.tree.map(lambda x: x.sharding, part)
        return jax.device_put(part, where, may_alias=False)

    def on_mesh(self, sync: SyncState, fragment_id: int) -> Fragment:
        """Return an outer fragment as regions receive it, on the mesh."""
        part, state = sync.outer.entry(fragment_id)
        if self._place.on_mesh:
            return self._broadcast[fragment_id](*self.given(part, state))
        if self._start is not None:
            part = self._start(part, state)
        if self._place.is_with_regions:
            return part
        return self._devices.move(part, self._spec.shardings.fragments[fragment_id])

    def given(self, params: Fragment, opt_state: PyTree) -> tuple[Fragment, PyTree]:
        """Return the last two arguments of `broadcast`."""
        return params, None if self._outer.start is None else opt_state

    def broadcast(
        self, fragment_id: int, params: Fragment, opt_state: PyTree
    ) -> Fragment:
        """Return a fragment as regions receive it, in a program of the mesh.

        `opt_state` is read only if regions do not start from `params` themselves.
        """
        params = self._place.load(fragment_id, params)
        if self._outer.start is not None:
            params = self._outer.start(params, self._place.load(fragment_id, opt_state))
        where = self._spec.shardings.fragments[fragment_id]
        return jax.lax.with_sharding_constraint(params, where)

    def step_on_mesh(
        self,
        fragment_id: int,
        params: Fragment,
        opt_state: PyTree,
        mean: Fragment,
        stale_params: Fragment | None,
    ) -> tuple[PyTree, PyTree, jax.Array]:
        """Take an `outer_step` in a program of the mesh, on loaded state."""
        load = functools.partial(self._place.load, fragment_id)
        trees = params, opt_state, mean, stale_params
        return outer_step(
            self._outer.optimizer,
            *map(load, trees),
            token_counts=self._spec.trainer.user_inputs.token_counts,
        )

    def _make_steps(self) -> list[Callable]:
        """Make the outer step of each fragment; it donates the state."""
        place, optimizer = self._place, self._outer.optimizer
        counts = self._spec.trainer.user_inputs.token_counts
        own = functools.partial(outer_step, optimizer, token_counts=counts)
        shapes = self._spec.outer_shapes
        # One device has it all: one program for all fragments of equal shapes.
        if place.kind in ("host", "device"):
            return [self._devices.jit(own, donate_argnums=(0, 1))] * len(shapes)

        def on_mesh(k, *arguments):
            *state, norm = self.step_on_mesh(k, *arguments)
            return *(place.offload(k, tree) for tree in state), norm

        return [
            self._devices.jit(
                functools.partial(on_mesh, k) if place.on_mesh else own,
                f"outer step {k}" if place.on_mesh else "",
                donate_argnums=(0, 1),
                # Results keep the placement of the arguments.
                out_shardings=(
                    place.lay(k, part),
                    place.lay(k, jax.eval_shape(optimizer.init, part)),
                    None,
                ),
            )
            for k, part in enumerate(shapes)
        ]

    def _joined(self, parts: tuple[Fragment, ...]) -> PyTree:
        if self._place.on_mesh:
            parts = tuple(map(self._place.load, range(len(parts)), parts))
        # A copy: an output that aliases an input would be donated later.
        return _copies(self._spec.fragments.join(parts))

    def whole(self, sync: SyncState, region: RegionState, mean: Callable) -> PyTree:
        """Return all outer parameters, on the mesh; see `RegionalOuterModels.whole`."""
        parts = sync.outer.params
        if self._place.has_channels:  # Joined in one program, so on one channel.
            parts = self._devices.move(parts, self._on_one_channel(sync.outer).params)
        return self._devices.move(self._join(parts), self._spec.shardings.params)

    def hand_out(
        self, event: Event, sync: SyncState
    ) -> tuple[SyncState, Fragment, jax.Array | None]:
        """Give an outer fragment to the regions that merge it.

        Returns the state, the fragment on the mesh, and which regions merge it, bool
        `[R]`; None is all.
        """
        k, spec = event.fragment_id, self._spec
        outer = self.on_mesh(sync, k)
        if not spec.sync.schedule.is_by_region:
            return sync, outer, None
        each = np.isin(np.arange(spec.regions.num), event.participating or ())
        participating = self._devices.put(each, spec.shardings.region.key)
        stale = self._take(sync.stale_params[k], outer, participating)
        stale_params = replaced(sync.stale_params, k, stale)
        sync = dataclasses.replace(sync, stale_params=stale_params)
        return sync, outer, participating


def _copies(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)


def taken(old: PyTree, new: PyTree, participating: jax.Array) -> PyTree:
    """Return `old`, leaves `[R, ...]`, with `new` in the regions that participate."""
    spread = for_all_regions(new, len(participating))
    return where_participating(participating, cast_like(spread, old), old)


class RegionalOuterModels:
    """Compiled programs of one outer model per region."""

    def __init__(self, spec: SyncSpec):
        outer = spec.sync.outer
        assert isinstance(outer, RegionalOuter)
        self._spec, self._outer = spec, outer
        self._num_matchings = len(matchings(spec.regions.num))
        each, where = range(len(spec.fragments)), spec.place.lay_sync(self.shapes(None))
        self._send = [
            spec.devices.jit(
                make_regional_send(spec, k),
                f"send fragment {k}",
                self.num_bytes(k),
                out_shardings=(
                    spec.place.lay_flight(k, self.flight_shapes(k)).mean,
                    spec.kept_shardings(k),
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
        compressor = core.regional_compressor(self._spec.sync)
        spread = functools.partial(for_all_regions, num_regions=self._spec.regions.num)
        return OuterState(
            tuple(map(spread, parts)),
            tuple(spread(self._outer.init(part, compressor)) for part in parts),
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
        return InFlight(jax.eval_shape(send, params, *own, keys, matching)[0], {})

    def num_bytes(self, fragment_id: int, rank: int = 0) -> int:
        """Return the bytes of one region's message; 0 for a single region."""
        if self._spec.regions.num == 1:
            return 0
        part = self._spec.outer_shapes[fragment_id]
        return self._outer.num_bytes(part, core.regional_compressor(self._spec.sync))

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
        mean, kept, opt_state = self._send[k](
            region.params, outer.params[k], outer.opt_states[k], region.key, matching
        )
        outer = outer.updated(k, outer.params[k], opt_state)
        return dataclasses.replace(sync, outer=outer), InFlight(mean, kept)

    def compressors_of(self, sync: SyncState, rank: int) -> tuple:
        """Return nothing: residuals are in the outer states."""
        return sync.compressors

    def receive(
        self, fragment_id: int, flight: InFlight, outer: Fragment, opt_state: PyTree
    ) -> tuple[Fragment, PyTree, jax.Array]:
        """Take the outer steps; see `OuterModel.receive`."""
        return self._step[fragment_id](outer, opt_state, flight.mean)

    def landing(self, fragment_id: int, sync: SyncState) -> SyncState:
        """Return the state before its last mean is applied; see `RegionalOuter`."""
        if self._outer.land is None:
            return sync
        params, state = sync.outer.entry(fragment_id)
        outer = sync.outer.updated(fragment_id, params, self._outer.land(state))
        return dataclasses.replace(sync, outer=outer)

    def arrived(self, fragment_id: int, flight: InFlight, outer: Fragment) -> PyTree:
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


@dataclasses.dataclass(frozen=True)
class _RegionalCrossing:
    """How messages of regional outer models cross, a `core.sync.Crossing`.

    What it has in the place of the compressors' state is the outer states.
    """

    spec: SyncSpec
    fragment_id: int
    # Parameters, outer parameters and states, PRNG key data, and the row of `matchings`
    # that pairs the regions; all regional but the last.
    arguments: tuple

    def leave(self) -> tuple[tuple[Any, PyTree], PyTree]:
        spec = self.spec

        def of_shard(
            params: PyTree,
            outer_params: Fragment,
            state: PyTree,
            keys: jax.Array,
            row: jax.Array,
        ):
            part = spec.fragments.take(params, self.fragment_id, lead=1)
            sent, state = core.leave_regional(
                spec.sync, spec.local, part, outer_params, state, keys, row
            )
            return spec.copies_of(part), sent, state

        mapped = region_shard_map(
            of_shard,
            spec.mesh,
            in_specs=(*(P(REGION),) * 4, P()),
            out_specs=P(REGION),
        )
        copies, sent, state = mapped(*self.arguments)
        return (copies, sent), state

    def cross(self, left: tuple[Any, PyTree]) -> tuple[Any, PyTree]:
        copies, sent = left
        if self._outer.way == GATHERED:
            sent = everywhere(self.spec.mesh, sent)
        return copies, sent

    def arrive(self, crossed: tuple[Any, PyTree]) -> tuple[PyTree, core.Extras]:
        copies, sent = crossed
        mean = self._outer.arrive(sent, core.regional_compressor(self.spec.sync))
        return mean, copies

    @property
    def _outer(self) -> RegionalOuter:
        assert isinstance(self.spec.sync.outer, RegionalOuter)
        return self.spec.sync.outer


def make_regional_send(spec: SyncSpec, fragment_id: int) -> Callable:
    """Make the program that sends one fragment.

    `send(params, outer_params, state, keys, row) -> (mean, kept, state)`, all regional,
    except `mean` if every region receives the same. `row` is an int32 scalar, the row
    to use of `matchings`.
    """

    def send(*arguments: Any) -> tuple[PyTree, core.Extras, PyTree]:
        return core.start(_RegionalCrossing(spec, fragment_id, arguments))

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
