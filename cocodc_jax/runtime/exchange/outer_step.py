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
import optax

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


def outer_step(
    optimizer: optax.GradientTransformation,
    params: Fragment,
    opt_state: PyTree,
    mean_pseudo_gradient: Fragment,
    stale_params: Fragment | None,
) -> tuple[PyTree, PyTree, jax.Array]:
    """Step the outer optimizer on one fragment.

    Args:
      optimizer: given `stale_params` where there are any.
      params: the outer fragment.
      opt_state: its state.
      mean_pseudo_gradient: old minus new; the optimizer's gradient.
      stale_params: the outer fragment that it was measured from, or None.

    Returns:
      New outer fragment, new optimizer state, and the mean pseudo-gradient's norm
      (float32 scalar).
    """
    extra = {} if stale_params is None else {"stale_params": stale_params}
    updates, opt_state = optax.with_extra_args_support(optimizer).update(
        mean_pseudo_gradient, opt_state, params, **extra
    )
    norm = optax.tree_utils.tree_norm(mean_pseudo_gradient).astype(jnp.float32)
    return optax.apply_updates(params, updates), opt_state, norm
