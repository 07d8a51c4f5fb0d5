"""Outer optimizer of CO2: an elementwise momentum clip, and a staleness penalty.

The mean pseudo-gradient of round t-1 is communicated during round t and used at its
end, from the parameters x of that round:

    m <- clip(b m + g / Lambda, +-phi);   x <- x - learning_rate * m

`g = old - new`, so descent is minus. Lambda, the staleness gap, is 1 ("constant") or
how far x has moved since g was measured, in usual moves ("measured").

Source: CO2, arXiv 2401.16265, as read from the authors' public code, where Lambda is 1.
Differs from that code: its clip has no effect, ours clips. The measured Lambda is ours.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.transforms.numerics import (
    cast_like,
    check_choice,
    check_positive,
    check_unit_interval,
    matched,
    safe_norm,
    widen,
)

GAPS = ("constant", "measured")


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
        clipped = jax.tree.map(
            lambda u, m: jnp.clip(momentum * m + u, -max_abs, max_abs),
            updates,
            state.momentum,
        )
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

    A round without any move (the first of a run whose message in flight is zero) is
    not counted into the mean, which would be too small ever after, nor is one whose
    move is not finite.

    Ours: that CO2 divides what is late by a gap is from memory, its formula was not
    found. Steady moves are left alone.

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
        difference = jax.tree.map(
            lambda now, stale: widen(now) - widen(stale),
            *matched(updates, params=params, stale_params=stale_params),
        )
        move = safe_norm(difference).astype(jnp.float32)
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

    The mean pseudo-gradient of the round before is the update, the parameters that
    round began with are `stale_params`, where the gap is measured.

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
        penalty,
        scale_by_clipped_momentum(momentum, max_abs),
        optax.scale_by_learning_rate(learning_rate),
    )
