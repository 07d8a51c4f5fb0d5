"""Placement of a shared outer model's state.

- On the host's CPU, in full in each process. The outer step is a separate program,
  concurrent with the accelerators. Used when messages cross between hosts.
- Sharded over the devices of each region, in their memory (ZeRO, stage 1).
- Sharded likewise, in the memory of the devices' hosts ("pinned"). Used when syncs and
  inner steps share a program on accelerators (`program/segment.py`). Of P parameters of
  4 bytes with Nesterov momentum a host then keeps 8 P / (hosts of a region) bytes, and
  an accelerator none. A program loads one fragment at a time, each device its own
  shard, and offloads it again. No device materializes a full fragment unless the
  regions themselves replicate it.

Leaves that are not shaped like a parameter, such as a step count, stay on the devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cocodc_jax.core.sync import outer_step
from cocodc_jax.exchange.sync_spec import SyncSpec
from cocodc_jax.sharding.transfer import PINNED
from cocodc_jax.sync.fragments import Fragment
from cocodc_jax.sync.outer import SharedOuter

PyTree = Any


@dataclasses.dataclass(frozen=True)
class OuterPlace:
    """Placement of the outer state.

    Attributes:
      spec: of the run.
      outer: the optimizer.
    """

    spec: SyncSpec
    outer: SharedOuter

    @property
    def on_mesh(self) -> bool:
        """Whether the outer step is a program of the inner mesh."""
        return self.outer.placement == "divided" or self.spec.overlap

    @property
    def memory_kind(self) -> str | None:
        """Memory kind of the state; None is the devices' default."""
        if self.outer.placement == "divided" or not self.spec.overlap:
            return None
        device = self.spec.mesh.devices.flat[0]
        there = {memory.kind for memory in device.addressable_memories()}
        return PINNED if PINNED in there else None

    def lay(self, fragment_id: int, tree: PyTree) -> PyTree:
        """Return the shardings of a fragment's parameters or optimizer state."""
        shardings = self.spec.shardings
        if not self.on_mesh:
            return shardings.on_host(fragment_id, tree)
        return shardings.divided(fragment_id, tree, self.memory_kind)

    def load(self, fragment_id: int, tree: PyTree) -> PyTree:
        """Load parameters or state into device memory, in a program of the mesh.

        Each device loads its own shard.
        """
        return jax.device_put(tree, self.spec.shardings.divided(fragment_id, tree))

    def offload(self, fragment_id: int, tree: PyTree) -> PyTree:
        """Invert `load`."""
        return jax.device_put(tree, self.lay(fragment_id, tree))

    def given(self, params: Fragment, opt_state: PyTree) -> tuple[Fragment, PyTree]:
        """Return the arguments of `broadcast`."""
        return params, None if self.outer.start is None else opt_state

    def broadcast(
        self, fragment_id: int, params: Fragment, opt_state: PyTree
    ) -> Fragment:
        """Return a fragment as regions receive it, in a program of the mesh.

        Args:
          fragment_id: which.
          params: the outer fragment.
          opt_state: its state; only if regions do not start from `params` themselves.
        """
        params = self.load(fragment_id, params)
        if self.outer.start is not None:
            params = self.outer.start(params, self.load(fragment_id, opt_state))
        where = self.spec.shardings.fragments[fragment_id]
        return jax.lax.with_sharding_constraint(params, where)


def make_steps(place: OuterPlace) -> list[Callable]:
    """Make the outer step of each fragment, see `outer_step`; it donates the state."""
    spec, optimizer = place.spec, place.outer.optimizer
    each = range(len(spec.fragments))
    own = functools.partial(outer_step, optimizer)
    if not (spec.overlap or spec.shardings.divides_host):
        return [jax.jit(own, donate_argnums=(0, 1))] * len(each)
    steps = []
    for k in each:
        shapes = spec.outer_shapes[k]
        state = jax.eval_shape(optimizer.init, shapes)
        # Results keep the placement of the arguments.
        where = place.lay(k, shapes), place.lay(k, state), None
        step = functools.partial(step_at, place, k) if spec.overlap else own
        steps.append(jax.jit(step, donate_argnums=(0, 1), out_shardings=where))
    return steps


def make_broadcast(place: OuterPlace, fragment_id: int) -> Callable:
    """Make `OuterPlace.broadcast` of a fragment as a program of the mesh."""
    near = functools.partial(place.broadcast, fragment_id)
    return jax.jit(near, out_shardings=place.spec.shardings.fragments[fragment_id])


def make_join(place: OuterPlace) -> Callable:
    """Make `join(outer fragments) -> parameters`, a copy with the same placement."""
    fragments, shardings = place.spec.fragments, place.spec.shardings
    if not place.spec.overlap:
        where = shardings.params_on_host() if shardings.divides_host else None
        # A copy: an output that aliases an input would be donated later.
        return jax.jit(lambda parts: copies(fragments.join(parts)), out_shardings=where)

    def join(parts):
        return fragments.join(tuple(map(place.load, range(len(parts)), parts)))

    return jax.jit(join, out_shardings=shardings.params)


def copies(tree: PyTree) -> PyTree:
    """Copy every leaf."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)


def step_at(
    place: OuterPlace,
    fragment_id: int,
    params: Fragment,
    opt_state: PyTree,
    mean_pseudo_gradient: Fragment,
    stale_params: Fragment | None,
) -> tuple[PyTree, PyTree, jax.Array]:
    """Take an `outer_step` on sharded state and keep its placement."""
    params, opt_state, mean, stale = (
        place.load(fragment_id, tree)
        for tree in (params, opt_state, mean_pseudo_gradient, stale_params)
    )
    params, opt_state, norm = outer_step(
        place.outer.optimizer, params, opt_state, mean, stale
    )
    returned = (place.offload(fragment_id, tree) for tree in (params, opt_state))
    return *returned, norm
