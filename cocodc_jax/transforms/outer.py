"""Outer optimizers that optax lacks; outer Nesterov is `optax.sgd(nesterov=True)`.

All take pseudo-gradients `g = old - new` (averaged over regions by the caller) as
`updates`, so descent is minus, as with gradients; none communicates. `scale_by_*`
return a descent direction, the recipes without that prefix a step to add.

Here are `delayed_nesterov` (Liu et al., arXiv 2401.09135) and `group_heavy_ball`
(NoLoCo, arXiv 2506.10911), both as read from the authors' code; the rest is made in
`co2.py`, `heloco.py` and `snoo.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.transforms.co2 import (
    co2,
    scale_by_clipped_momentum,
    scale_by_staleness_gap,
)
from cocodc_jax.transforms.heloco import (
    heloco,
    look_ahead,
    mla,
    scale_by_heloco,
    scale_by_mla,
)
from cocodc_jax.transforms.numerics import (
    cast_like,
    check_positive,
    check_unit_interval,
    check_whole,
    matched,
    widen,
)
from cocodc_jax.transforms.snoo import snoo

__all__ = [
    "co2",
    "delayed_nesterov",
    "group_heavy_ball",
    "heloco",
    "look_ahead",
    "mla",
    "scale_by_clipped_momentum",
    "scale_by_delayed_nesterov",
    "scale_by_heloco",
    "scale_by_mla",
    "scale_by_staleness_gap",
    "snoo",
]


class DelayedNesterovState(NamedTuple):
    """State of `scale_by_delayed_nesterov`."""

    num_buffered: jax.Array  # int32 scalar, arrivals since the momentum last changed.
    buffer: optax.Updates  # tree like the parameters, sum of those arrivals.
    momentum: optax.Updates  # tree like the parameters, m.


def scale_by_delayed_nesterov(
    momentum: float | jax.Array = 0.9,
    buffer_size: int | jax.Array = 4,
    spread: float | jax.Array = 0.0,
) -> optax.GradientTransformation:
    """Update the momentum once in N arrivals, so that N regions act on it as one.

        arrivals 1 .. N-1    step = c b m + g / N
        arrival N            m <- b m + sum(g) / N;  step = (1 - c N + c) b m + g / N

    Args:
      momentum: b, in [0, 1).
      buffer_size: N, arrivals per change of the momentum, usually the regions.
      spread: c, the share of the momentum applied at each of the other arrivals;
        1 / N spreads it evenly, 0 applies it whole at the N-th.

    Returns:
      A transformation to a descent direction. With N = 1 it is Nesterov's.
    """
    check_unit_interval("momentum", momentum)
    check_positive("buffer_size", buffer_size)
    check_whole("buffer_size", buffer_size)

    def init_fn(params):
        # Arrays of its own for each: a state that is donated holds none twice.
        buffer, momentum = (optax.tree.zeros_like(params) for _ in range(2))
        return DelayedNesterovState(jnp.zeros([], jnp.int32), buffer, momentum)

    def update_fn(updates, state, params=None):
        num_buffered = state.num_buffered + 1
        is_full = num_buffered >= buffer_size
        total = jax.tree.map(jnp.add, state.buffer, updates)
        buffer = cast_like(total, state.buffer)
        new_momentum = jax.tree.map(
            lambda m, b: jnp.where(is_full, momentum * m + b / buffer_size, m),
            state.momentum,
            buffer,
        )
        weight = jnp.where(is_full, 1 - spread * buffer_size + spread, spread)
        direction = jax.tree.map(
            lambda u, m: (weight * momentum * m + u / buffer_size).astype(u.dtype),
            updates,
            new_momentum,
        )
        num_buffered, buffer = jax.tree.map(
            lambda x: jnp.where(is_full, jnp.zeros_like(x), x), (num_buffered, buffer)
        )
        momentum_state = cast_like(new_momentum, state.momentum)
        return direction, DelayedNesterovState(num_buffered, buffer, momentum_state)

    return optax.GradientTransformation(init_fn, update_fn)


def delayed_nesterov(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | jax.Array = 0.9,
    buffer_size: int | jax.Array = 4,
    spread: float | jax.Array = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Apply each arrival at once and the momentum once in N (asynchronous local SGD).

    All arguments but the learning rate are those of `scale_by_delayed_nesterov`.

    >>> import jax.numpy as jnp
    >>> outer = delayed_nesterov(learning_rate=1.0, momentum=0.5, buffer_size=2)
    >>> state = outer.init(jnp.zeros(1))
    >>> first, state = outer.update(jnp.array([2.0]), state)
    >>> second, state = outer.update(jnp.array([4.0]), state)
    >>> print(first, second)  # 2/2;  m = (2+4)/2 = 3, 0.5 * 3 + 4/2
    [-1.] [-3.5]
    """
    return optax.chain(
        scale_by_delayed_nesterov(momentum, buffer_size, spread),
        optax.scale_by_learning_rate(learning_rate),
    )


class GroupHeavyBallState(NamedTuple):
    """State of `group_heavy_ball`: `velocity`, tree like the parameters, in descent."""

    velocity: optax.Updates


def group_heavy_ball(
    learning_rate: float | jax.Array = 0.7,
    momentum: float | jax.Array = 0.5,
    pull: float | jax.Array = 0.7,
) -> optax.GradientTransformationExtraArgs:
    """Step by a heavy ball with a pull to the group's mean parameters (NoLoCo).

        v <- mu v + beta g + gamma (params - group_mean_params);   params <- params - v

    where `g` is the mean pseudo-gradient of the group (a random pair of regions), so
    the regions stay near each other without any all-reduce. Without gradient the
    spread of many independently paired regions contracts if 0 < gamma < 2 (1 - mu**2),
    and grows if not: derived here, from the second moments of `params` and v.

    Args:
      learning_rate: beta.
      momentum: mu, in [0, 1).
      pull: gamma, usually equal to beta.

    Returns:
      A transformation whose `update(updates, state, params, *, group_mean_params)`
      gives the step to add; `group_mean_params` is a tree like `params`, *regional*.
    """
    check_unit_interval("momentum", momentum)

    def init_fn(params):
        return GroupHeavyBallState(optax.tree.zeros_like(params))

    def update_fn(updates, state, params=None, *, group_mean_params=None, **extra):
        if params is None or group_mean_params is None:
            raise ValueError("group_heavy_ball needs params and group_mean_params")

        def accelerate(g, v, own, mean):
            away = widen(own) - widen(mean)
            return momentum * widen(v) + learning_rate * widen(g) + pull * away

        own, mean = matched(updates, params=params, group_mean_params=group_mean_params)
        velocity = jax.tree.map(accelerate, updates, state.velocity, own, mean)
        step = cast_like(optax.tree.scale(-1.0, velocity), updates)
        return step, GroupHeavyBallState(cast_like(velocity, state.velocity))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
