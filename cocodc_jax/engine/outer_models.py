"""Outer models: their placement, how fragments leave them and means arrive.

There is one for all regions (`SharedOuterModel`), or one for each
(`RegionalOuterModels`), sharded over the mesh and never on a host. Both are an
`OuterModel`.
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
        self._spec = spec
        self._outer = outer
        self._exchange = exchange
        self._place = spec.place
        self._devices = spec.devices

        jit = self._devices.jit
        self._step = self._make_steps()
        self._resize = functools.cache(self._make_resize)
        self._broadcast = [
            jit(functools.partial(self.broadcast, k), out_shardings=shardings)
            for k, shardings in enumerate(spec.shardings.fragments)
        ]
        self._copy = jit(_copies)
        self._take = jit(taken, donate_argnums=0)
        self._start = jit(outer.start) if outer.start else None
        self._join = jit(self._joined, out_shardings=spec.place.params())

        shapes = self.shapes(spec.sync.schedule.init())
        self.shardings = spec.place.lay_sync(shapes)  # Without what is in flight.
        outer_shardings = self.shardings.outer
        if self._place.has_channels:  # One program, so one channel.
            outer_shardings = self._on_one_channel(shapes.outer)
        self._new_outer = jit(self._outer_of, out_shardings=outer_shardings)
        # By rank of the messages, if the schedule sets one.
        self._new_regional: dict[int, Callable] = {}

    def init(self, params: PyTree, schedule: Any) -> SyncState:
        """Return the initial state; see `OuterModel.init`."""
        outer = self._new_outer(self._devices.move(params, self._place.params()))
        if self._place.has_channels:
            outer = self._devices.move(outer, self.shardings.outer)

        rank = schedule.rank
        if rank not in self._new_regional:
            self._new_regional[rank] = self._make_regional(schedule)
        compressors, stale_params = self._new_regional[rank](params)
        return SyncState(outer, schedule, compressors, stale_params)

    def _make_regional(self, schedule: Any) -> Callable:
        """Make the function from parameters to the regions' part of the state."""
        shapes = self.shapes(schedule)
        regional = (shapes.compressors, shapes.stale_params)
        if not jax.tree.leaves(regional):  # Most compressors have no state.
            return lambda _: regional

        laid = self._place.lay_sync(shapes)
        return self._devices.jit(
            functools.partial(self._regional_of, rank=schedule.rank),
            out_shardings=(laid.compressors, laid.stale_params),
        )

    def _outer_of(self, params: PyTree) -> OuterState:
        parts = outer_parts(self._spec.fragments, params)
        opt_states = tuple(self._outer.optimizer.init(part) for part in parts)
        return OuterState(parts, opt_states)

    def _regional_of(self, params: PyTree, rank: int) -> tuple[tuple, tuple]:
        parts = outer_parts(self._spec.fragments, params)
        stale_params = ()
        if self._spec.sync.schedule.is_by_region:
            num_regions = self._spec.regions.num
            stale_params = tuple(for_all_regions(part, num_regions) for part in parts)
        return self.compressors(parts, rank), stale_params

    def compressors(self, parts: tuple[Fragment, ...], rank: int) -> tuple:
        """Return the initial states of the regions' compressors."""
        message = self._spec.at(rank).sync.message
        num_regions = self._spec.regions.num
        return tuple(for_all_regions(message.init(part), num_regions) for part in parts)

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
        return tuple(
            self._resize(k, rank)(memory) for k, memory in enumerate(sync.compressors)
        )

    def _make_resize(self, fragment_id: int, rank: int) -> Callable:
        message = self._spec.at(rank).sync.message
        part = self._spec.outer_shapes[fragment_id]
        # Which leaves are factored depends on the rank.
        (memory,) = jax.eval_shape(lambda x: self.compressors((x,), rank), part)
        return self._devices.jit(
            jax.vmap(lambda memory: message.resized(memory, part)),
            out_shardings=self._spec.shardings.of_regions(fragment_id, memory),
        )

    def shapes(self, schedule: Any) -> SyncState:
        """Return shapes of the state of a schedule, without what is in flight."""

        def make(params: PyTree) -> SyncState:
            compressors, stale_params = self._regional_of(params, schedule.rank)
            return SyncState(
                self._outer_of(params), schedule, compressors, stale_params
            )

        return jax.eval_shape(make, self._spec.params)

    def flight_shapes(self, fragment_id: int) -> InFlight:
        """Return shapes of a fragment that was just sent, without its staged copy."""
        part = self._spec.outer_shapes[fragment_id]
        kept = {STALE: part} if STALE in self._spec.copies else {}
        return InFlight(part, kept | self._exchange.arrives_with())

    def _on_one_channel(self, outer: OuterState) -> OuterState:
        lay = functools.partial(self._place.lay, channel=0)
        return OuterState(
            params=tuple(lay(k, x) for k, x in enumerate(outer.params)),
            opt_states=tuple(lay(k, x) for k, x in enumerate(outer.opt_states)),
        )

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
        if sync.stale_params:
            anchor = sync.stale_params[k]
        else:
            anchor = self.on_mesh(sync, k)
        kept = {}
        if STALE in self._spec.copies:  # The outer step donates them.
            kept[STALE] = self._copied(sync.outer.params[k])

        if not self._spec.sync.robust:  # Which looks at all parameters.
            params = self._spec.fragments.only(region.params, k)
            region = region._replace(params=params)
        sending = Sending(
            event=event,
            weights=weights,
            times=times,
            region=region,
            anchor=anchor,
            memory=memories[k],
        )
        mean, extras, memory = self._exchange.send(sending)

        new_sync = dataclasses.replace(sync, compressors=replaced(memories, k, memory))
        return new_sync, InFlight(mean, kept | extras)

    def receive(
        self, fragment_id: int, flight: InFlight, outer: Fragment, opt_state: PyTree
    ) -> tuple[Fragment, PyTree, jax.Array]:
        """Take the outer step; see `OuterModel.receive`."""
        mean = self.arrived(fragment_id, flight, outer)
        anchor = flight.kept.get(STALE)
        return self._step[fragment_id](outer, opt_state, mean, anchor)

    def arrived(self, fragment_id: int, flight: InFlight, outer: Fragment) -> Fragment:
        """Return the mean, in the placement of the outer fragment."""
        if self._place.on_mesh or self._place.is_with_regions:
            return flight.mean
        shardings = jax.tree.map(lambda x: x.sharding, outer)
        return self._devices.borrow(flight.mean, shardings)

    def _copied(self, part: Fragment) -> Fragment:
        """Return a copy of outer parameters, in the same placement."""
        if not self._place.is_pinned:
            return self._copy(part)
        shardings = jax.tree.map(lambda x: x.sharding, part)
        return jax.device_put(part, shardings, may_alias=False)

    def on_mesh(self, sync: SyncState, fragment_id: int) -> Fragment:
        """Return an outer fragment as regions receive it, on the mesh."""
        part, opt_state = sync.outer.entry(fragment_id)
        if self._place.on_mesh:
            arguments = self.broadcast_arguments(part, opt_state)
            return self._broadcast[fragment_id](*arguments)

        if self._start is not None:
            part = self._start(part, opt_state)
        if self._place.is_with_regions:
            return part
        return self._devices.move(part, self._spec.shardings.fragments[fragment_id])

    def broadcast_arguments(
        self, params: Fragment, opt_state: PyTree
    ) -> tuple[Fragment, PyTree]:
        """Return the last two arguments of `broadcast`."""
        return params, None if self._outer.start is None else opt_state

    def broadcast(
        self, fragment_id: int, params: Fragment, opt_state: PyTree
    ) -> Fragment:
        """Return a fragment as regions receive it, in a program of the mesh.

        `opt_state` is read only if regions do not start from `params` themselves.
        """
        received = self._place.load(fragment_id, params)
        if self._outer.start is not None:
            state = self._place.load(fragment_id, opt_state)
            received = self._outer.start(received, state)
        return jax.lax.with_sharding_constraint(
            received, self._spec.shardings.fragments[fragment_id]
        )

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
        return outer_step(
            optimizer=self._outer.optimizer,
            params=load(params),
            opt_state=load(opt_state),
            mean_pseudo_gradient=load(mean),
            stale_params=load(stale_params),
            token_counts=self._spec.trainer.user_inputs.token_counts,
        )

    def _make_steps(self) -> list[Callable]:
        """Make the outer step of each fragment; it donates the state."""
        place = self._place
        jit = self._devices.jit
        shapes = self._spec.outer_shapes
        plain_step = functools.partial(
            outer_step,
            self._outer.optimizer,
            token_counts=self._spec.trainer.user_inputs.token_counts,
        )
        # One device has it all: one program for all fragments of equal shapes.
        if place.kind in ("host", "device"):
            return [jit(plain_step, donate_argnums=(0, 1))] * len(shapes)

        def on_mesh(k: int, *arguments: Any) -> tuple[PyTree, PyTree, jax.Array]:
            params, opt_state, norm = self.step_on_mesh(k, *arguments)
            return place.offload(k, params), place.offload(k, opt_state), norm

        steps = []
        for k, part in enumerate(shapes):
            step = plain_step
            name = ""
            if place.on_mesh:
                step = functools.partial(on_mesh, k)
                name = f"outer step {k}"
            opt_state = jax.eval_shape(self._outer.optimizer.init, part)
            # Results keep the placement of the arguments.
            out_shardings = (place.lay(k, part), place.lay(k, opt_state), None)
            steps.append(
                jit(step, name, donate_argnums=(0, 1), out_shardings=out_shardings)
            )
        return steps

    def _joined(self, parts: tuple[Fragment, ...]) -> PyTree:
        if self._place.on_mesh:
            parts = tuple(self._place.load(k, part) for k, part in enumerate(parts))
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
        k = event.fragment_id
        spec = self._spec
        outer = self.on_mesh(sync, k)
        if not spec.sync.schedule.is_by_region:
            return sync, outer, None

        is_merging = np.isin(np.arange(spec.regions.num), event.participating or ())
        participating = self._devices.put(is_merging, spec.shardings.region.key)
        anchor = self._take(sync.stale_params[k], outer, participating)
        new_sync = dataclasses.replace(
            sync, stale_params=replaced(sync.stale_params, k, anchor)
        )
        return new_sync, outer, participating


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
        self._spec = spec
        self._outer = outer
        self._num_matchings = len(matchings(spec.regions.num))

        jit = spec.devices.jit
        step = make_regional_step(spec)
        shardings = spec.place.lay_sync(self.shapes(None))
        self._send = []
        self._step = []
        for k in range(len(spec.fragments)):
            send = jit(
                make_regional_send(spec, k),
                f"send fragment {k}",
                self.num_bytes(k),
                out_shardings=(
                    spec.place.lay_flight(k, self.flight_shapes(k)).mean,
                    spec.kept_shardings(k),
                    shardings.outer.opt_states[k],
                ),
            )
            self._send.append(send)
            step_of_fragment = jit(
                step,
                f"outer step {k}",
                donate_argnums=(0, 1),
                out_shardings=(*shardings.outer.entry(k), None),
            )
            self._step.append(step_of_fragment)
        self._new_outer = jit(self._make, out_shardings=shardings.outer)

    def init(self, params: PyTree, schedule: Any) -> SyncState:
        """Return the state before the first step; see `SharedOuterModel.init`."""
        return SyncState(self._new_outer(params), schedule)

    def _make(self, params: PyTree) -> OuterState:
        parts = core.outer_parts(self._spec.fragments, params)
        compressor = core.regional_compressor(self._spec.sync)
        spread = functools.partial(for_all_regions, num_regions=self._spec.regions.num)
        return OuterState(
            params=tuple(spread(part) for part in parts),
            opt_states=tuple(
                spread(self._outer.init(part, compressor)) for part in parts
            ),
        )

    def shapes(self, schedule: Any) -> SyncState:
        """Return shapes of the state of a schedule, without what is in flight."""
        return SyncState(jax.eval_shape(self._make, self._spec.params), schedule)

    def flight_shapes(self, fragment_id: int) -> InFlight:
        """Return shapes of a fragment that was just sent, without its staged copy."""
        key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        spread = functools.partial(for_all_regions, num_regions=self._spec.regions.num)
        params, keys = jax.eval_shape(spread, (self._spec.params, key))
        matching = jax.ShapeDtypeStruct((), jnp.int32)
        outer_params, opt_state = self.shapes(None).outer.entry(fragment_id)

        send = make_regional_send(self._spec, fragment_id)
        mean, *_ = jax.eval_shape(send, params, outer_params, opt_state, keys, matching)
        return InFlight(mean, {})

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
        k = event.fragment_id
        outer_params, opt_state = sync.outer.entry(k)
        # The same draw in every region, and after a restart.
        rng = np.random.default_rng((self._outer.seed, event.start_step, k))
        row = np.int32(rng.integers(self._num_matchings))
        everywhere = NamedSharding(self._spec.mesh, P())
        matching = self._spec.devices.put(row, everywhere)

        mean, kept, new_opt_state = self._send[k](
            region.params, outer_params, opt_state, region.key, matching
        )
        outer = sync.outer.updated(k, outer_params, new_opt_state)
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
        params, opt_state = sync.outer.entry(fragment_id)
        landed_state = self._outer.land(opt_state)
        outer = sync.outer.updated(fragment_id, params, landed_state)
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

    The outer states take the place of the compressors' states.
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
            opt_state: PyTree,
            keys: jax.Array,
            row: jax.Array,
        ) -> tuple[core.Extras, PyTree, PyTree]:
            part = spec.fragments.take(params, self.fragment_id, lead=1)
            sent, new_state = core.leave_regional(
                sync=spec.sync,
                axis=spec.local,
                part=part,
                params=outer_params,
                state=opt_state,
                key_data=keys,
                row=row,
            )
            return spec.copies_of(part), sent, new_state

        mapped = region_shard_map(
            of_shard,
            spec.mesh,
            in_specs=(*(P(REGION),) * 4, P()),
            out_specs=P(REGION),
        )
        copies, sent, opt_state = mapped(*self.arguments)
        return (copies, sent), opt_state

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

    def receive(
        params: Fragment, state: PyTree, arrived: PyTree
    ) -> tuple[Fragment, PyTree, jax.Array]:
        return core.receive(
            outer,
            params=params,
            state=state,
            arrived=arrived,
            num_regions=spec.regions.num,
        )

    def step(
        outer_params: Fragment, state: PyTree, arrived: PyTree
    ) -> tuple[Fragment, PyTree, jax.Array]:
        if is_for_all:
            arrived = jax.lax.pcast(arrived, REGION, to="varying")
        mapped = spec.local.map(receive, (0, 0, None if is_for_all else 0))
        params, new_state, norms = mapped(outer_params, state, arrived)
        return params, new_state, jnp.sqrt(pmean_over_regions((norms**2).mean()))

    return region_shard_map(
        step,
        spec.mesh,
        in_specs=(P(REGION), P(REGION), P() if is_for_all else P(REGION)),
        out_specs=(P(REGION), P(REGION), P()),
    )
