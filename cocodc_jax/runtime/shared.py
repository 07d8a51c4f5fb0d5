"""One outer model for all regions: where it lives, how fragments leave and arrive."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.runtime import exchange, transfer
from cocodc_jax.runtime.inner import Block, for_all_regions, where_active
from cocodc_jax.runtime.layout import Layout, place
from cocodc_jax.runtime.sends import Sends
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
          all_reduce: how they cross then, see `crossing.py`.
        """
        assert isinstance(method.outer_optimizer, optax.GradientTransformation)
        self._method, self._fragments, self._layout = method, fragments, layout
        self._optimizer = method.outer_optimizer
        self._is_divided = method.outer_placement == "divided"
        self._sends = Sends(
            method, fragments, layout, block, crosses_outside, all_reduce
        )
        self.steps_on_mesh = self._is_divided
        self._num_regions = block.size * layout.mesh.shape["region"]
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
        shapes, of_senders = jax.eval_shape(self._make, params)
        self._where_outer, senders = self._where(shapes, of_senders)
        # One program makes all of it, so on one device.
        first = self._where_outer if self._is_divided else layout.on_host(0, shapes)
        self._new_outer = jax.jit(lambda x: self._make(x)[0], out_shardings=first)
        self._new_senders = jax.jit(lambda x: self._make(x)[1], out_shardings=senders)

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
        """Bytes that one region sends for a sync of `fragment`, see `Sends`.

        Args:
          fragment: which.
          params: shapes of one region's parameters.
          rank: of the message, where the schedule sets one.
        """
        part = jax.eval_shape(lambda x: self._make(x)[0].params[fragment], params)
        return self._sends.num_bytes(part, rank)

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
        return self._sends.abstract_flight(fragment, params, outer.params[fragment])

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
        send = self._sends.program(fragment, outer, sender.state, rank)
        staged, (mean, told), kept = send(
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
