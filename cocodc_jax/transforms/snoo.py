"""SNOO: an outer Nesterov step around any optimizer, with one region.

Every `sync_interval` steps of the inner optimizer, with slow parameters x and fast
parameters w,

    g = x - w;   m <- b m + g;   x <- x - learning_rate (g + b m);   w <- x

which is DiLoCo of a single region. `optax.lookahead` is the case b = 0.

Source: SNOO, arXiv 2510.15830; not checked against the authors' code. The outer step is
that of DiLoCo (arXiv 2311.08105).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.transforms.extra_args import with_named_extras
from cocodc_jax.transforms.numerics import (
    check_count,
    check_rate,
    check_transform,
    check_unit_interval,
    difference,
    widen,
)


class SnooState(NamedTuple):
    """State of `snoo`."""

    num_steps: jax.Array  # int32 scalar, inner steps since the last outer step.
    slow_params: optax.Params  # tree like the parameters, x, float32 or wider.
    # State of the inner optimizer, left as it is by an outer step.
    inner_state: optax.OptState
    outer_state: optax.OptState  # State of the outer `optax.sgd`.


def snoo(
    inner: optax.GradientTransformation,
    learning_rate: float | jax.Array = 0.7,
    momentum: float | jax.Array = 0.9,
    sync_interval: int | jax.Array = 20,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an inner optimizer so that every `sync_interval`-th step is an outer one.

    Args:
      inner: any optax optimizer.
      learning_rate: of the outer step; with 1 and momentum 0 nothing changes.
      momentum: b of the outer step, in [0, 1).
      sync_interval: inner steps per outer step.

    Returns:
      A transformation whose `update(gradients, state, params)` gives the step to add.
      Holds two more trees, x and m.

    >>> import jax.numpy as jnp, optax
    >>> optimizer = snoo(optax.sgd(0.1), learning_rate=2.0, momentum=0.0,
    ...                  sync_interval=2)
    >>> params = jnp.zeros(1)
    >>> state = optimizer.init(params)
    >>> for _ in range(2):  # two steps of -0.1, then twice that way at once
    ...     step, state = optimizer.update(jnp.ones(1), state, params)
    ...     params = optax.apply_updates(params, step)
    >>> print(params)
    [-0.4]
    """
    check_transform("inner", inner, "optax.adamw(1e-3)")
    check_rate("learning_rate", learning_rate)
    check_unit_interval("momentum", momentum)
    check_count("sync_interval", sync_interval)
    inner = with_named_extras(inner)
    outer = optax.sgd(learning_rate, momentum, nesterov=True)

    def init_fn(params):
        # A copy: parameters and optimizer state may both be donated.
        slow = jax.tree.map(lambda p: jnp.array(widen(p), copy=True), params)
        num_steps = jnp.zeros([], jnp.int32)
        return SnooState(num_steps, slow, inner.init(params), outer.init(slow))

    def update_fn(updates, state, params=None, **extra):
        if params is None:
            raise ValueError("snoo needs params: pass update(updates, state, params)")

        fast_step, inner_state = inner.update(
            updates, state.inner_state, params, **extra
        )
        num_steps = state.num_steps + 1
        is_sync = num_steps >= sync_interval

        # In bfloat16 most outer steps would be rounded away.
        old = state.slow_params
        wide = jax.tree.map(widen, params)

        gradient = difference(old, optax.apply_updates(wide, fast_step))
        step, outer_state = outer.update(gradient, state.outer_state, old)
        slow = optax.apply_updates(old, step)
        jump = jax.tree.map(jnp.subtract, slow, wide)
        slow, outer_state = _where(
            is_sync, (slow, outer_state), (old, state.outer_state)
        )

        num_steps = jnp.where(is_sync, 0, num_steps)
        new_state = SnooState(num_steps, slow, inner_state, outer_state)
        return _where(is_sync, jump, fast_step), new_state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _where(condition, on_true, on_false):
    """Select tree by tree, in the dtypes of `on_false`."""
    return jax.tree.map(
        lambda x, y: jnp.where(condition, x, y).astype(y.dtype), on_true, on_false
    )
