"""One outer model for all regions: where it lives, how fragments leave and arrive."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Sharding

from cocodc_jax.runtime import crossing, exchange, transfer
from cocodc_jax.runtime.inner import Block, for_all_regions, where_active
from cocodc_jax.runtime.layout import Layout, place
from cocodc_jax.runtime.mesh import regional
from cocodc_jax.runtime.rings import ring_bytes
from cocodc_jax.runtime.state import (
    InFlight,
    OuterState,
    Sender,
    TrainState,
    replaced,
)
from cocodc_jax.sync.fragments import Fragment, Fragments
from cocodc_jax.sync.methods import Method
from cocodc_jax.sync.rounds import effective_rank
from cocodc_jax.transforms.compressor import message_bytes

PyTree = Any


class SharedOuter:
    """The compiled exchange of a method whose outer model all regions share."""

    def __init__(
        self,
        method: Method,
        fragments: Fragments,
        layout: Layout,
        block: Block,
        params: PyTree,
        crosses_outside: bool = False,
        all_reduce: str = "direct",
    ):
        """Wraps every program in one jit.

        Args:
          method: with one outer model.
          fragments: the cut.
          layout: where everything lives.
          block: the regions a device holds.
          params: shapes of one region's parameters.
          crosses_outside: whether messages cross on the outer mesh, while the inner
            mesh goes on, and not in a program of the inner mesh.
          all_reduce: how they are summed then, see `crossing.py`.
        """
        assert isinstance(method.outer_optimizer, optax.GradientTransformation)
        self._method, self._fragments, self._layout = method, fragments, layout
        self._block = block
        self._optimizer = method.outer_optimizer
        self._is_divided = method.outer_placement == "divided"
        self._crosses_outside = crosses_outside
        self._all_reduce = all_reduce
        self.steps_on_mesh = self._is_divided
        self._num_regions = block.size * layout.mesh.shape["region"]
        assert method.schedule is not None
        self._num_times = self._num_regions if method.schedule.measures else 0
        self._send: dict[tuple[int, int], Callable] = {}
        self._resize: dict[tuple[int, int], Callable] = {}
        self._effective_rank = jax.jit(effective_rank)
        self._step = jax.jit(
            functools.partial(exchange.outer_step, self._optimizer),
            donate_argnums=(0, 1),
        )
        self._copy = jax.jit(
            lambda tree: jax.tree.map(lambda x: jnp.array(x, copy=True), tree)
        )
        self._move_anchor = jax.jit(_move_anchor, donate_argnums=0)
        shapes, _ = made = jax.eval_shape(self._make, params)
        self._where_outer, senders = self._where(*made)
        # One program makes all of it, so on one device.
        first = self._where_outer if self._is_divided else layout.on_host(0, shapes)
        self._new_outer = jax.jit(lambda x: self._make(x)[0], out_shardings=first)
        self._new_senders = jax.jit(lambda x: self._make(x)[1], out_shardings=senders)

    def _make_send(self, fragment: int, part: Fragment, rank: int) -> Callable:
        keep_staged = self._method.merge.needs_staged
        send = exchange.make_send(
            self._layout.mesh,
            self._fragments,
            fragment,
            self._block,
            self._method.compressor_at(rank),
            keep_staged,
            self._method.is_asynchronous,
            self._method.rings,
            not self._crosses_outside,
        )
        layout = self._layout
        staged = layout.staged[fragment] if keep_staged else None
        kept = layout.of_regions(fragment, self._abstract_sender(part, rank).state)
        if not self._crosses_outside:
            arrives = layout.fragments[fragment]
            whole = jax.jit(send, out_shardings=(staged, arrives, kept))

            def send_inside(params, origin, state, weights, keys, times):
                del times  # Schedules that measure have their messages cross outside.
                inside = self._weights(weights, regional(layout.mesh))
                copy, mean, state = whole(params, origin, state, inside, keys)
                return copy, (mean, None), state

            return send_inside
        lane = layout.lane(fragment)
        encode = jax.jit(send, out_shardings=(staged, layout.region.key, kept))
        combine = jax.jit(
            crossing.make_combine(
                self._method.compressor_at(rank),
                lane.host,
                self._message_shapes(part, rank),
                self._num_times,
                self._all_reduce,
            ),
            out_shardings=lane.host,
        )

        def send_outside(params, origin, state, weights, keys, times):
            inside = self._weights(weights, regional(layout.mesh))
            told = self._of_own_regions(times) if self._num_times else None
            copy, pieces, state = encode(params, origin, state, inside, keys, told)
            rows = transfer.gather_rows(pieces, lane.rows)
            return copy, combine(rows, self._weights(weights, lane.host)), state

        return send_outside

    @functools.lru_cache(maxsize=64)  # noqa: B019  (lives as long as the programs)
    def _weights(self, weights: tuple[float, ...], sharding: Sharding) -> jax.Array:
        return transfer.put(np.array(weights, float), sharding)

    def _of_own_regions(self, times: tuple[float, float]) -> jax.Array:
        """Regional `[R, 2]`; the rows of other processes are as they say."""
        where = cast(Sharding, self._layout.region.key)
        shape = (self._num_regions, 2)
        rows = np.broadcast_to(np.asarray(times, np.float32), shape)
        return jax.make_array_from_callback(shape, where, rows.__getitem__)

    def _make_resize(self, fragment: int, part: Fragment, rank: int) -> Callable:
        ranked = self._method.ranked_compressors
        assert ranked is not None
        shapes = jax.eval_shape(lambda x: x, part)
        kept = self._abstract_sender(part, rank).state
        return jax.jit(
            jax.vmap(lambda state: ranked.resize(state, shapes, rank)),
            out_shardings=self._layout.of_regions(fragment, kept),
        )

    def init(self, params: PyTree) -> tuple[OuterState, tuple[Sender, ...]]:
        """The outer state and senders before the first step.

        Args:
          params: one region's parameters, on the mesh.
        """
        lanes = self._layout.lanes
        near = params if self._is_divided else transfer.move(params, lanes[0].host)
        outer = self._new_outer(near)
        if len(lanes) > 1:
            outer = transfer.move(outer, self._where_outer)
        return outer, self._new_senders(params)

    def _make(
        self, params: PyTree, rank: int = 0
    ) -> tuple[OuterState, tuple[Sender, ...]]:
        parts = exchange.outer_parts(self._fragments, params)
        senders = tuple(self._make_sender(part, rank) for part in parts)
        return OuterState(parts, tuple(map(self._optimizer.init, parts))), senders

    def _make_sender(self, part: Fragment, rank: int) -> Sender:
        spread = functools.partial(for_all_regions, num_regions=self._num_regions)
        compressor = self._method.compressor_at(rank)
        return Sender(
            spread(compressor.init(part) if compressor else ()),
            spread(part) if self._method.is_asynchronous else None,
        )

    def _abstract_sender(self, part: Fragment, rank: int) -> Sender:
        return jax.eval_shape(lambda x: self._make_sender(x, rank), part)

    def _where(self, outer: OuterState, senders: tuple[Sender, ...]):
        layout = self._layout
        lay = layout.divided if self._is_divided else layout.on_host
        each = [
            (lay(k, part), lay(k, state))
            for k, (part, state) in enumerate(zip(*outer, strict=True))
        ]
        where_outer = OuterState(*map(tuple, zip(*each, strict=True)))
        where_senders = tuple(layout.of_regions(k, s) for k, s in enumerate(senders))
        return where_outer, where_senders

    def abstract(
        self, params: PyTree, rank: int = 0
    ) -> tuple[OuterState, tuple[Sender, ...]]:
        """Shapes and shardings of what `init` gives, with messages of `rank`."""
        outer, senders = jax.eval_shape(lambda x: self._make(x, rank), params)
        where_outer, where_senders = self._where(outer, senders)
        return place(outer, where_outer), place(senders, where_senders)

    def num_bytes(self, fragment: int, params: PyTree, rank: int = 0) -> int:
        """Bytes that one region sends for a sync of `fragment`.

        One message, or where regions stand in rings all that a region passes on: its
        own part of the sum and the sums, 2 (M - 1) / M of the fragment.

        Args:
          fragment: which.
          params: shapes of one region's parameters.
          rank: of the message, where the schedule sets one.
        """
        part = self._make_shapes(params, fragment)
        if self._method.rings:
            return ring_bytes(self._method.rings, part, self._num_regions)
        compressor = self._method.compressor_at(rank)
        size = message_bytes(self._message_shapes(part, rank))
        return size + crossing.times_bytes(compressor, self._num_times)

    def _message_shapes(self, part: Fragment, rank: int) -> PyTree:
        """Of one region's message of a fragment like `part`."""
        compressor = self._method.compressor_at(rank)
        if compressor is None:
            return jax.eval_shape(lambda x: x, part)
        state = jax.eval_shape(compressor.init, part)
        key = jax.eval_shape(lambda: jax.random.key(0))
        return jax.eval_shape(compressor.encode, part, state, key)[0]

    def _make_shapes(self, params: PyTree, fragment: int) -> Fragment:
        return jax.eval_shape(lambda x: self._make(x)[0].params[fragment], params)

    def abstract_flight(
        self, fragment: int, params: PyTree, key: Any, outer: OuterState
    ) -> InFlight:
        """Shapes and shardings of a fragment in flight.

        Args:
          fragment: which.
          params: abstract parameters of the regions, `[R, ...]`.
          key: abstract key data of the regions.
          outer: abstract.
        """
        del key
        part = outer.params[fragment]
        layout = self._layout
        staged = None
        if self._method.merge.needs_staged:
            staged = jax.eval_shape(
                lambda x: self._fragments.take(x, fragment, lead=1), params
            )
            staged = place(staged, layout.staged[fragment])
        arrives: Any = layout.fragments[fragment]
        if self._crosses_outside:
            arrives = layout.on_host(fragment, part)
        mean = place(part, arrives)
        told: Any = None
        if self._num_times:
            told = jax.ShapeDtypeStruct(
                (self._num_regions, 2),
                jnp.float32,
                sharding=layout.lane(fragment).host,
            )
        reference = part if self._method.needs_reference else None
        return InFlight(staged, mean, reference, times=told)

    def send(
        self,
        state: TrainState,
        fragment: int,
        weights: tuple[float, ...],
        times: tuple[float, float],
    ) -> tuple[TrainState, InFlight]:
        """Starts a sync: the state with the senders after it, and what is on its way.

        Args:
          state: its senders are replaced; they fit the rank its schedule says.
          fragment: whose sync.
          weights: of the regions in the mean, of sum 1.
          times: seconds of an inner step and of a sync as this process has measured
            them, which go with the message where the schedule measures.
        """
        assert state.schedule is not None
        rank = state.schedule.rank
        outer, sender = state.outer.params[fragment], state.senders[fragment]
        reference = None
        if self._method.needs_reference:  # The outer step donates its parameters.
            reference = self._copy(outer)
        origin = sender.anchor
        if origin is None:
            origin = transfer.move(outer, self._layout.fragments[fragment])
        if (fragment, rank) not in self._send:
            self._send[fragment, rank] = self._make_send(fragment, outer, rank)
        staged, (mean, told), kept = self._send[fragment, rank](
            state.region.params, origin, sender.state, weights, state.region.key, times
        )
        flight = InFlight(staged, mean, reference, times=told)
        senders = replaced(state.senders, fragment, sender._replace(state=kept))
        return dataclasses.replace(state, senders=senders), flight

    def receive(
        self, state: TrainState, fragment: int, flight: InFlight
    ) -> tuple[TrainState, jax.Array]:
        """The state with the outer step done, and the norm of what arrived."""
        outer = state.outer
        where = jax.tree.map(lambda x: x.sharding, outer.params[fragment])
        params, opt_state, norm = self._step(
            outer.params[fragment],
            outer.opt_states[fragment],
            transfer.move(flight.mean_pseudo_gradient, where),
            flight.reference,
        )
        outer = outer.updated(fragment, params, opt_state)
        return dataclasses.replace(state, outer=outer), norm

    def resize(self, state: TrainState, rank: int) -> TrainState:
        """The state with senders that fit messages of `rank`."""
        senders = []
        for k, sender in enumerate(state.senders):
            if (k, rank) not in self._resize:
                part = state.outer.params[k]
                self._resize[k, rank] = self._make_resize(k, part, rank)
            kept = self._resize[k, rank](sender.state)
            senders.append(sender._replace(state=kept))
        return dataclasses.replace(state, senders=tuple(senders))

    def effective_rank(
        self, state: TrainState, fragment: int, flight: InFlight
    ) -> jax.Array:
        """Of the mean that arrived, a float32 scalar; where the outer state is.

        Not part of the outer step, whose result the regions are waiting for.
        """
        where = jax.tree.map(lambda x: x.sharding, state.outer.params[fragment])
        mean = transfer.move(flight.mean_pseudo_gradient, where)
        return self._effective_rank(mean)

    def on_mesh(self, state: TrainState, fragment: int) -> Fragment:
        """An outer fragment where regions can take it in."""
        part = state.outer.params[fragment]
        return transfer.move(part, self._layout.fragments[fragment])

    def move_anchors(
        self, state: TrainState, fragment: int, outer: Fragment, takes: jax.Array
    ) -> TrainState:
        """The state after the regions that `takes` tells have taken `outer`."""
        sender = state.senders[fragment]
        anchor = self._move_anchor(sender.anchor, outer, takes)
        senders = replaced(state.senders, fragment, sender._replace(anchor=anchor))
        return dataclasses.replace(state, senders=senders)


def _move_anchor(anchor: Fragment, outer: Fragment, takes: jax.Array) -> Fragment:
    spread = jax.tree.map(
        lambda o, a: jnp.broadcast_to(o[None], a.shape).astype(a.dtype), outer, anchor
    )
    return where_active(takes, spread, anchor)
