"""Outer models of the regions' own: they lie over the mesh, and never on a host."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.runtime import exchange, transfer
from cocodc_jax.runtime.inner import Block, for_all_regions
from cocodc_jax.runtime.layout import Layout, place
from cocodc_jax.runtime.state import InFlight, OuterState, Sender, TrainState
from cocodc_jax.sync.fragments import Fragment, Fragments
from cocodc_jax.sync.methods import Method
from cocodc_jax.sync.pairs import matchings
from cocodc_jax.sync.regional import RegionalOuter
from cocodc_jax.transforms.compressor import identity, message_bytes

PyTree = Any


class RegionalOuters:
    """The compiled exchange of a method with one outer model a region."""

    steps_on_mesh = True

    def __init__(
        self,
        method: Method,
        fragments: Fragments,
        layout: Layout,
        block: Block,
        params: PyTree,
    ):
        """Wraps every program in one jit; `params` are shapes of one region's."""
        assert isinstance(method.outer_optimizer, RegionalOuter)
        self._method, self._fragments, self._layout = method, fragments, layout
        self._outer = method.outer_optimizer
        self._compressor = method.compressor or identity()
        self._num_regions = block.size * layout.mesh.shape["region"]
        self._partners = matchings(self._num_regions)
        self._send = [
            jax.jit(
                exchange.make_regional_send(
                    layout.mesh,
                    fragments,
                    k,
                    block,
                    self._compressor,
                    method.merge.needs_staged,
                    self._outer,
                    jnp.asarray(self._partners),
                )
            )
            for k in range(len(fragments))
        ]
        self._step = jax.jit(
            exchange.make_regional_step(layout.mesh, block, self._outer),
            donate_argnums=(0, 1),
        )
        where = self._where(jax.eval_shape(self._make, params))
        self._new_outer = jax.jit(self._make, out_shardings=where)

    def init(self, params: PyTree) -> tuple[OuterState, tuple[Sender, ...]]:
        """The outer state before the first step, and no senders: it is in there."""
        return self._new_outer(params), ()

    def _make(self, params: PyTree) -> OuterState:
        parts = exchange.outer_parts(self._fragments, params)
        spread = functools.partial(for_all_regions, num_regions=self._num_regions)
        return OuterState(
            tuple(map(spread, parts)),
            tuple(spread(self._outer.init(part, self._compressor)) for part in parts),
        )

    def _where(self, outer: OuterState) -> OuterState:
        each = [
            tuple(self._layout.of_regions(k, tree) for tree in pair)
            for k, pair in enumerate(zip(*outer, strict=True))
        ]
        return OuterState(*map(tuple, zip(*each, strict=True)))

    def abstract(
        self, params: PyTree, rank: int = 0
    ) -> tuple[OuterState, tuple[Sender, ...]]:
        """Shapes and shardings of what `init` gives; no schedule sets a rank here."""
        del rank
        shapes = jax.eval_shape(self._make, params)
        return place(shapes, self._where(shapes)), ()

    def num_bytes(self, fragment: int, params: PyTree, rank: int = 0) -> int:
        """Bytes of one region's message of `fragment`; `params` are one region's."""
        del rank
        outer = jax.eval_shape(self._make, params)
        part, state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
            (outer.params[fragment], outer.opt_states[fragment]),
        )
        message, _ = jax.eval_shape(
            lambda p, s, key: self._outer.send(p, s, p, self._compressor, key),
            part,
            state,
            jax.eval_shape(lambda: jax.random.key(0)),
        )
        return message_bytes(message)

    def abstract_flight(
        self, fragment: int, params: PyTree, key: Any, outer: OuterState
    ) -> InFlight:
        """Shapes and shardings of a fragment in flight; see `SharedOuter`."""
        staged, arrived, _ = jax.eval_shape(
            self._send[fragment],
            params,
            outer.params[fragment],
            outer.opt_states[fragment],
            key,
            np.int32(0),
        )
        layout = self._layout
        is_paired = self._outer.group == "pairs"
        lay = layout.of_regions if is_paired else layout.of_all
        if staged is not None:
            staged = place(staged, layout.staged[fragment])
        return InFlight(staged, place(arrived, lay(fragment, arrived)))

    def send(
        self,
        state: TrainState,
        fragment: int,
        weights: tuple[float, ...],
        times: tuple[float, float],
    ) -> tuple[TrainState, InFlight]:
        """Starts a sync: the state with the senders' after it, and what is sent.

        Args:
          state: its outer optimizer states are replaced.
          fragment: whose sync.
          weights: of no use here: all regions of a group count alike.
          times: of no use here either: what is measured crosses on the outer mesh.
        """
        del weights, times
        # The same draw on every region, and after a restart.
        rng = np.random.default_rng((self._outer.seed, state.step, fragment))
        matching = transfer.put(
            np.int32(rng.integers(len(self._partners))),
            jax.sharding.NamedSharding(self._layout.mesh, jax.sharding.PartitionSpec()),
        )
        outer = state.outer
        staged, arrived, kept = self._send[fragment](
            state.region.params,
            outer.params[fragment],
            outer.opt_states[fragment],
            state.region.key,
            matching,
        )
        outer = outer.updated(fragment, outer.params[fragment], kept)
        return dataclasses.replace(state, outer=outer), InFlight(staged, arrived)

    def receive(
        self, state: TrainState, fragment: int, flight: InFlight
    ) -> tuple[TrainState, jax.Array]:
        """The state with the outer steps done, and the norm of what arrived."""
        outer = state.outer
        params, opt_state, norm = self._step(
            outer.params[fragment],
            outer.opt_states[fragment],
            flight.mean_pseudo_gradient,
        )
        outer = outer.updated(fragment, params, opt_state)
        return dataclasses.replace(state, outer=outer), norm

    def on_mesh(self, state: TrainState, fragment: int) -> Fragment:
        """The regions' outer fragments, where regions can take them in."""
        return state.outer.params[fragment]
