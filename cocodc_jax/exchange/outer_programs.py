"""The programs of an outer model that regions share: its step, and what is given out.

Where the outer state lies (`outer_place.py`) decides whether they are programs of the
inner mesh, or of the hosts that keep it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cocodc_jax.core.sync import outer_step
from cocodc_jax.exchange.outer_placement import OuterPlace
from cocodc_jax.sync.fragments import Fragment

PyTree = Any


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
        # What it takes it returns as it lay.
        where = place.lay(k, shapes), place.lay(k, state), None
        step = functools.partial(step_at, place, k) if spec.overlap else own
        steps.append(jax.jit(step, donate_argnums=(0, 1), out_shardings=where))
    return steps


def make_broadcast(place: OuterPlace, fragment_id: int) -> Callable:
    """Make `OuterPlace.broadcast` of a fragment as a program of the mesh."""
    near = functools.partial(place.broadcast, fragment_id)
    return jax.jit(near, out_shardings=place.spec.shardings.fragments[fragment_id])


def make_join(place: OuterPlace) -> Callable:
    """Make `join(outer fragments) -> parameters`, a copy, where the fragments are."""
    fragments, shardings = place.spec.fragments, place.spec.shardings
    if not place.spec.overlap:
        where = shardings.params_on_host() if shardings.divides_host else None
        # A copy: what a program hands on as it is would be donated later.
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
    """Step as `outer_step` where the state lies over the mesh; it stays as it lies."""
    params, opt_state, mean, stale = (
        place.load(fragment_id, tree)
        for tree in (params, opt_state, mean_pseudo_gradient, stale_params)
    )
    params, opt_state, norm = outer_step(
        place.outer.optimizer, params, opt_state, mean, stale
    )
    returned = (place.offload(fragment_id, tree) for tree in (params, opt_state))
    return *returned, norm
