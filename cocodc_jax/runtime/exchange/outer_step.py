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
from cocodc_jax.runtime.exchange.outer_place import OuterPlace
from cocodc_jax.sync.fragments import Fragment

PyTree = Any


def make_steps(place: OuterPlace) -> list[Callable]:
    """Make the outer step of each fragment, see `outer_step`; it donates the state."""
    setting, optimizer = place.setting, place.outer.optimizer
    each = range(len(setting.fragments))
    own = functools.partial(outer_step, optimizer)
    if not (setting.is_fused or setting.shardings.divides_host):
        return [jax.jit(own, donate_argnums=(0, 1))] * len(each)
    steps = []
    for k in each:
        shapes = setting.outer_shapes[k]
        state = jax.eval_shape(optimizer.init, shapes)
        # What it takes it returns as it lay.
        where = place.lay(k, shapes), place.lay(k, state), None
        step = functools.partial(step_at, place, k) if setting.is_fused else own
        steps.append(jax.jit(step, donate_argnums=(0, 1), out_shardings=where))
    return steps


def make_near(place: OuterPlace, fragment_id: int) -> Callable:
    """Make `OuterPlace.near` of a fragment as a program of the mesh."""
    near = functools.partial(place.near, fragment_id)
    return jax.jit(near, out_shardings=place.setting.shardings.fragments[fragment_id])


def make_join(place: OuterPlace) -> Callable:
    """Make `join(outer fragments) -> parameters`, a copy, where the fragments are."""
    fragments, shardings = place.setting.fragments, place.setting.shardings
    if not place.setting.is_fused:
        where = shardings.params_on_host() if shardings.divides_host else None
        # A copy: what a program hands on as it is would be donated later.
        return jax.jit(lambda parts: copies(fragments.join(parts)), out_shardings=where)

    def join(parts):
        return fragments.join(tuple(map(place.taken, range(len(parts)), parts)))

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
        place.taken(fragment_id, tree)
        for tree in (params, opt_state, mean_pseudo_gradient, stale_params)
    )
    params, opt_state, norm = outer_step(
        place.outer.optimizer, params, opt_state, mean, stale
    )
    returned = (place.returned(fragment_id, tree) for tree in (params, opt_state))
    return *returned, norm
