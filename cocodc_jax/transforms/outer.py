"""Outer optimizers that optax lacks; outer Nesterov is `optax.sgd(nesterov=True)`.

All take pseudo-gradients `g = old - new` (averaged over regions by the caller) as
`updates`, so descent is minus, as with gradients; none communicates. `scale_by_*`
return a descent direction, the recipes without that prefix a step to add.

Here are `delayed_nesterov` (Liu et al., arXiv 2401.09135), `group_heavy_ball` (NoLoCo,
arXiv 2506.10911) and `co2` (arXiv 2401.16265), all as read from the authors' public
code; the rest is made in `heloco.py`. Differs from the code of CO2: its
clip has no effect, ours clips.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.transforms.heloco import (
    heloco,
    look_ahead,
    mla,
    scale_by_heloco,
    scale_by_mla,
)
from cocodc_jax.transforms.numerics import (
    cast_like,
    check_choice,
    check_count,
    check_not_negative,
    check_number,
    check_positive,
    check_unit_interval,
    descend,
    difference,
    matched,
    safe_norm,
    widen,
)

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
]

StalenessGap = Literal["constant", "measured"]
GAPS = get_args(StalenessGap)


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
    check_count("buffer_size", buffer_size)
    check_number("spread", spread)

    def init_fn(params):
        # Separate arrays: a state that is donated holds none twice.
        return DelayedNesterovState(
            num_buffered=jnp.zeros([], jnp.int32),
            buffer=optax.tree.zeros_like(params),
            momentum=optax.tree.zeros_like(params),
        )

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
        scale_by_delayed_nesterov(momentum, buffer_size, spread), descend(learning_rate)
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
    check_not_negative("learning_rate", learning_rate)
    check_unit_interval("momentum", momentum)
    check_not_negative("pull", pull)

    def init_fn(params):
        return GroupHeavyBallState(optax.tree.zeros_like(params))

    def update_fn(updates, state, params=None, *, group_mean_params=None, **extra):
        if params is None or group_mean_params is None:
            raise ValueError("group_heavy_ball needs params and group_mean_params")

        def accelerate(g, v, local, mean):
            away = widen(local) - widen(mean)
            return momentum * widen(v) + learning_rate * widen(g) + pull * away

        local, mean = matched(
            updates, params=params, group_mean_params=group_mean_params
        )
        velocity = jax.tree.map(accelerate, updates, state.velocity, local, mean)
        step = cast_like(optax.tree.scale(-1.0, velocity), updates)
        return step, GroupHeavyBallState(cast_like(velocity, state.velocity))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class ClippedMomentumState(NamedTuple):
    """State of `scale_by_clipped_momentum`: `momentum`, a tree like the parameters."""

    momentum: optax.Updates


def scale_by_clipped_momentum(
    momentum: float | jax.Array = 0.9, max_abs: float | jax.Array = 1.0
) -> optax.GradientTransformation:
    """Keep every element of the momentum within bounds: m <- clip(b m + g, +-max_abs).

    Args:
      momentum: b, in [0, 1).
      max_abs: phi, largest absolute value of an element, in units of the updates.

    Returns:
      A transformation to a descent direction. With `max_abs` infinite, `optax.trace`.
    """
    check_unit_interval("momentum", momentum)
    check_positive("max_abs", max_abs)

    def init_fn(params):
        return ClippedMomentumState(optax.tree.zeros_like(params))

    def update_fn(updates, state, params=None):
        clip = lambda u, m: jnp.clip(momentum * m + u, -max_abs, max_abs)  # noqa: E731
        clipped = jax.tree.map(clip, updates, state.momentum)
        return cast_like(clipped, updates), ClippedMomentumState(
            cast_like(clipped, state.momentum)
        )

    return optax.GradientTransformation(init_fn, update_fn)


class StalenessGapState(NamedTuple):
    """State of `scale_by_staleness_gap`."""

    num_rounds: jax.Array  # int32 scalar, rounds that moved the parameters.
    # float32 scalar, mean length of their moves, in parameter units.
    mean_move: jax.Array
    gap: jax.Array  # float32 scalar, the last Lambda, at least 1.


def scale_by_staleness_gap() -> optax.GradientTransformationExtraArgs:
    """Divide stale updates by how far the parameters have moved since.

        move   = ||params - stale_params||
        Lambda = max(1, move / mean of the moves of earlier rounds);   g <- g / Lambda

    A round without a move (the first of a run whose message in flight is zero) does not
    count in the mean, which would be too small from then on. Nor does a round whose
    move is not finite.

    Ours: that CO2 divides late means by a gap is from memory, and its formula was not
    found. Steady moves have a gap of 1.

    Returns:
      A transformation whose `update(updates, state, params, *, stale_params)` takes
      the parameters the updates were measured from as `stale_params`. The norm runs
      over the tree that it is given.
    """

    def init_fn(params):
        zero = jnp.zeros([], jnp.float32)
        return StalenessGapState(jnp.zeros([], jnp.int32), zero, jnp.ones_like(zero))

    def update_fn(updates, state, params=None, *, stale_params=None, **extra):
        if params is None or stale_params is None:
            raise ValueError("scale_by_staleness_gap needs params and stale_params")

        now, anchor = matched(updates, params=params, stale_params=stale_params)
        move = safe_norm(difference(now, anchor)).astype(jnp.float32)
        is_first = state.mean_move == 0
        gap = jnp.where(is_first, 1.0, move / jnp.where(is_first, 1.0, state.mean_move))
        gap = jnp.maximum(1.0, gap)

        # An infinite move would be the mean ever after.
        counts = (move > 0) & jnp.isfinite(move)
        num_rounds = state.num_rounds + counts.astype(jnp.int32)
        # Without a move nothing changes: the mean is 0 or num_rounds is positive.
        surplus = jnp.where(counts, move - state.mean_move, 0.0)
        divisor = jnp.maximum(num_rounds, 1).astype(jnp.float32)
        mean_move = state.mean_move + surplus / divisor
        shrunk = jax.tree.map(lambda u: (widen(u) / gap).astype(u.dtype), updates)

        return shrunk, StalenessGapState(num_rounds, mean_move, gap)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def co2(
    learning_rate: optax.ScalarOrSchedule = 1.0,
    momentum: float | jax.Array = 0.2,
    max_abs: float | jax.Array = 1.0,
    gap: str = "constant",
) -> optax.GradientTransformationExtraArgs:
    """Build CO2's outer optimizer: staleness penalty, clipped momentum, step.

        m <- clip(b m + g / Lambda, +-phi);   x <- x - learning_rate * m

    g is the mean pseudo-gradient of the round before. `stale_params` are the parameters
    with which that round began, from which the gap Lambda is measured.

    Args:
      learning_rate: eta_o.
      momentum: as of `scale_by_clipped_momentum`.
      max_abs: likewise.
      gap: one of `GAPS`: Lambda is 1, or that of `scale_by_staleness_gap`.

    Returns:
      A transformation to the step to add; with a measured gap it needs `params` and
      `stale_params=...`.
    """
    check_choice("staleness_gap", gap, GAPS)
    penalty = scale_by_staleness_gap() if gap == "measured" else optax.identity()
    return optax.chain(
        penalty, scale_by_clipped_momentum(momentum, max_abs), descend(learning_rate)
    )
