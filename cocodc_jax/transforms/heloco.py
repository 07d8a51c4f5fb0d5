"""HeLoCo: a late pseudo-gradient is kept, turned or shrunk by what the momentum says.

Per tensor, with g the stale pseudo-gradient (old - new), m the outer momentum, c their
cosine and r = ||g|| (upper * m / ||m|| + sqrt(1 - upper**2) * w), where w is the
direction of the part of g that is orthogonal to m:

    c >= upper             g                    keep
    lower <= c < upper     r                    turn toward m, same length
    c < lower              s r + (1 - s) shrink g,  s = (1 + c) / (1 + lower)

which is continuous in c: r is g at c = upper, and at c = -1, where w means nothing,
what is left is shrink * g. While m is zero (the first step) g is kept. Then Nesterov:

    m <- b m + g~;   theta <- theta - learning_rate (g~ + b m)

Source: HeLoCo, arXiv 2606.00271, for the idea that the cosine decides: keep, turn or
shrink. Differs from the paper (its published rule, read from a table): g is kept from
c = 0.2 on; below 0 a part of what opposes m is taken off, min(0.5 (-c) f, 0.5) of it,
with f = ||g|| / (||g|| + 3 ||m||); in between g turns by a share min((1 - c) f, 1) of
the way; the momentum is m <- b m + (1 - b) g~; and regions start from the look-ahead
point theta - learning_rate b m.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.transforms.numerics import (
    cast_like,
    check_unit_interval,
    inner_product,
    safe_norm,
    safe_sqrt,
    widen,
)


class HelocoState(NamedTuple):
    """State of `scale_by_heloco`: `momentum`, a tree like the parameters."""

    momentum: optax.Updates


def scale_by_heloco(
    momentum: float | jax.Array = 0.9,
    upper: float | jax.Array = 0.0,
    lower: float | jax.Array = -0.5,
    shrink: float | jax.Array = 0.5,
) -> optax.GradientTransformation:
    """Correct each tensor by the momentum, then take Nesterov's step.

    Args:
      momentum: b, in [0, 1).
      upper: cosine from which on g is kept, and to which it is turned below.
      lower: cosine below which g is shrunk; -1 <= lower <= upper <= 1.
      shrink: what is left of a g opposite to m, in [0, 1].

    Returns:
      A transformation to a descent direction. A tensor is a leaf, so the layers of a
      scanned stack are judged together. With lower = upper = -1 it is Nesterov's.

    Raises:
      ValueError: if an argument is a number out of range.
    """
    check_unit_interval("momentum", momentum)
    _check_cosines(lower, upper)
    if isinstance(shrink, (int, float)) and not 0 <= shrink <= 1:
        raise ValueError(f"shrink={shrink} must be between 0 and 1")

    def init_fn(params):
        return HelocoState(optax.tree.zeros_like(params))

    def update_fn(updates, state, params=None):
        del params
        corrected = jax.tree.map(
            lambda g, m: _correct(widen(g), widen(m), upper, lower, shrink),
            updates,
            state.momentum,
        )
        new_momentum = jax.tree.map(
            lambda g, m: momentum * widen(m) + g, corrected, state.momentum
        )
        direction = jax.tree.map(lambda g, m: g + momentum * m, corrected, new_momentum)
        return cast_like(direction, updates), HelocoState(
            cast_like(new_momentum, state.momentum)
        )

    return optax.GradientTransformation(init_fn, update_fn)


def heloco(
    learning_rate: optax.ScalarOrSchedule = 0.7,
    momentum: float | jax.Array = 0.9,
    upper: float | jax.Array = 0.0,
    lower: float | jax.Array = -0.5,
    shrink: float | jax.Array = 0.5,
) -> optax.GradientTransformationExtraArgs:
    """Take outer Nesterov steps on pseudo-gradients corrected by the momentum.

    Args:
      learning_rate: eta_o.
      momentum: b, in [0, 1).
      upper: cosine from which on a pseudo-gradient is kept.
      lower: cosine below which it is shrunk.
      shrink: what is left of one opposite to the momentum.

    Returns:
      A transformation to the step to add.

    >>> import jax.numpy as jnp
    >>> outer = heloco(learning_rate=1.0, momentum=0.5)
    >>> state = outer.init(jnp.zeros(2))
    >>> _, state = outer.update(jnp.array([2.0, 0.0]), state)
    >>> step, state = outer.update(jnp.array([-5.0, 12.0]), state)  # turned: [0, 13]
    >>> print(step.round(4))  # m = [1, 13]
    [ -0.5 -19.5]
    """
    return optax.chain(
        scale_by_heloco(momentum, upper, lower, shrink),
        optax.scale_by_learning_rate(learning_rate),
    )


def _correct(g, m, upper, lower, shrink):
    """Keep, turn or shrink one tensor."""
    g_length, m_length = safe_norm(g), safe_norm(m)
    is_known = (g_length > 0) & (m_length > 0)
    along = m / _or_one(m_length)
    c = jnp.clip(inner_product(g, along) / _or_one(g_length), -1.0, 1.0)
    across = g - inner_product(g, along) * along
    across = across / _or_one(safe_norm(across))
    turned = g_length * (upper * along + safe_sqrt(1.0 - upper**2) * across)
    share = jnp.where(c >= lower, 1.0, (1 + c) / _or_one(jnp.asarray(1.0 + lower)))
    changed = share * turned + (1 - share) * shrink * g
    return jnp.where(is_known & (c < upper), changed, g)


def _or_one(x):
    """Return x, or 1 where that is zero, to divide by."""
    return jnp.where(x > 0, x, 1.0)


def _check_cosines(lower, upper):
    if not all(isinstance(x, (int, float)) for x in (lower, upper)):
        return
    if not -1 <= lower <= upper <= 1:
        raise ValueError(
            f"lower={lower} and upper={upper} must be cosines with lower <= upper"
        )
