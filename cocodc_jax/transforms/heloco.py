"""HeLoCo: a late pseudo-gradient is kept, turned, or partly removed.

Per tensor, with D the late pseudo-gradient (old - new), m the outer momentum, u and v
their unit directions, c = u . v, and conf = ||D|| / (||D|| + kappa ||m|| + eps):

    c >= c_ok        D^ = D                                               keep
    0 <= c < c_ok    D^ = ||D|| unit((1 - l) u + l v)                     turn
                     l  = min(k_d (1 - c) conf, 1)
    c < 0            D^ = D - min(k_s (-c) conf, beta_max) c ||D|| v      take off

Here beta c ||D|| v is the share beta of D's component along m, which opposes m. Then

    G = rho D^;   m <- mu m + (1 - mu) G;   theta <- theta - learning_rate (G + mu m)

and regions continue from the look-ahead point theta - learning_rate mu m, to which the
momentum alone would lead (`look_ahead`). Without the correction this is `mla`.

Source: HeLoCo, arXiv 2606.00271, from a published table of the rule. While m (or D) is
zero there is no angle, and D is kept; the table does not mention this case.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.transforms.layers import nodes_of
from cocodc_jax.transforms.numerics import (
    cast_like,
    check_between,
    check_not_negative,
    check_positive,
    check_unit_interval,
    descend,
    fill_holes,
    inner_product,
    match_holes,
    safe_norm,
    widen,
)

_EPS = 1e-12


class AveragedMomentumState(NamedTuple):
    """State of `scale_by_heloco` and `scale_by_mla`: m, a tree like the parameters."""

    momentum: optax.Updates


def scale_by_heloco(
    momentum: float | jax.Array = 0.9,
    keep_cosine: float | jax.Array = 0.2,
    removal_rate: float | jax.Array = 0.5,
    turn_rate: float | jax.Array = 1.0,
    confidence_scale: float | jax.Array = 3.0,
    max_removal: float | jax.Array = 0.5,
    weight: float | jax.Array = 1.0,
) -> optax.GradientTransformation:
    """Correct each tensor by the momentum, then look ahead along it.

    Args:
      momentum: mu, in [0, 1).
      keep_cosine: c_ok in [-1, 1], the cosine from which D is kept; at -1 all are.
      removal_rate: k_s, at least 0.
      turn_rate: k_d, at least 0.
      confidence_scale: kappa, at least 0: the weight of the momentum's length in conf.
      max_removal: beta_max, in [0, 1], the largest share of the opposing component that
        is removed.
      weight: rho, positive.

    Returns:
      A transformation to a descent direction. A tensor is a leaf, so the layers of a
      scanned stack are treated as one.
    """
    check_between("keep_cosine", keep_cosine, -1, 1)
    check_between("max_removal", max_removal, 0, 1)
    check_not_negative("removal_rate", removal_rate)
    check_not_negative("turn_rate", turn_rate)
    check_not_negative("confidence_scale", confidence_scale)

    def correct(g, m):
        g_length = safe_norm(g)
        m_length = safe_norm(m)
        u = g / _or_one(g_length)
        v = m / _or_one(m_length)
        c = jnp.clip(inner_product(u, v), -1.0, 1.0)
        confidence = g_length / (g_length + confidence_scale * m_length + _EPS)

        removed = jnp.minimum(removal_rate * -c * confidence, max_removal)
        turned = jnp.minimum(turn_rate * (1 - c) * confidence, 1.0)
        between = (1 - turned) * u + turned * v
        between = g_length * between / _or_one(safe_norm(between))

        changed = jnp.where(c < 0, g - removed * c * g_length * v, between)
        is_known = (g_length > 0) & (m_length > 0)
        return jnp.where(is_known & (c < keep_cosine), changed, g)

    return _look_ahead_momentum(momentum, weight, correct)


def scale_by_mla(
    momentum: float | jax.Array = 0.9, weight: float | jax.Array = 1.0
) -> optax.GradientTransformation:
    """Look ahead along the momentum without a correction; see `scale_by_heloco`."""
    return _look_ahead_momentum(momentum, weight, lambda g, m: g)


def heloco(
    learning_rate: optax.ScalarOrSchedule = 0.7,
    momentum: float | jax.Array = 0.9,
    keep_cosine: float | jax.Array = 0.2,
    removal_rate: float | jax.Array = 0.5,
    turn_rate: float | jax.Array = 1.0,
    confidence_scale: float | jax.Array = 3.0,
    max_removal: float | jax.Array = 0.5,
    weight: float | jax.Array = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """Take outer steps on pseudo-gradients corrected by the momentum.

    The learning rate is eta; all other arguments are those of `scale_by_heloco`.

    >>> import jax.numpy as jnp
    >>> outer = heloco(learning_rate=1.0, momentum=0.5, confidence_scale=0.0)
    >>> state = outer.init(jnp.zeros(2))
    >>> _, state = outer.update(jnp.array([2.0, 0.0]), state)
    >>> step, state = outer.update(jnp.array([-3.0, 4.0]), state)  # c is -0.6
    >>> print(step.round(4))  # 0.3 of the -3 is taken off: D^ = [-2.1, 4]
    [ 2.375 -5.   ]
    """
    corrected = scale_by_heloco(
        momentum=momentum,
        keep_cosine=keep_cosine,
        removal_rate=removal_rate,
        turn_rate=turn_rate,
        confidence_scale=confidence_scale,
        max_removal=max_removal,
        weight=weight,
    )
    return optax.chain(corrected, descend(learning_rate))


def mla(
    learning_rate: optax.ScalarOrSchedule = 0.7,
    momentum: float | jax.Array = 0.9,
    weight: float | jax.Array = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """Take outer steps of momentum look-ahead; eta, and `scale_by_mla`'s arguments."""
    return optax.chain(scale_by_mla(momentum, weight), descend(learning_rate))


def look_ahead(
    learning_rate: float, momentum: float
) -> Callable[[optax.Params, optax.OptState], optax.Params]:
    """Make `start(params, state) -> params`, the point that the momentum leads to.

        start = params - learning_rate * mu * m

    eta and mu are those of the `heloco` or `mla` whose `state` it is given, also in one
    that wrappers of Optax have around it.

    >>> import jax.numpy as jnp
    >>> outer, params = mla(1.0, 0.5), jnp.array([4.0])
    >>> _, state = outer.update(jnp.array([2.0]), outer.init(params))  # m = 1
    >>> print(look_ahead(1.0, 0.5)(params, state))
    [3.5]
    """

    def start(params, state):
        momenta = [inner.momentum for inner in nodes_of(AveragedMomentumState, state)]
        if len(momenta) != 1:
            raise ValueError(
                f"state holds {len(momenta)} momenta of heloco or mla, but look_ahead "
                "uses one: pass the state of that optimizer"
            )

        (m,) = momenta

        def lead(x, v):
            return (x - learning_rate * momentum * v).astype(x.dtype)

        ahead = jax.tree.map(lead, match_holes(m, params), m)
        return fill_holes(m, ahead, params)

    return start


def _look_ahead_momentum(momentum, weight, correct) -> optax.GradientTransformation:
    """Build the transformation; `correct(g, m)` of one tensor, both widened."""
    check_unit_interval("momentum", momentum)
    check_positive("weight", weight)

    def init_fn(params):
        return AveragedMomentumState(optax.tree.zeros_like(params))

    def update_fn(updates, state, params=None):
        corrected = jax.tree.map(
            lambda g, m: weight * correct(widen(g), widen(m)), updates, state.momentum
        )
        new_momentum = jax.tree.map(
            lambda g, m: momentum * widen(m) + (1 - momentum) * g,
            corrected,
            state.momentum,
        )
        direction = jax.tree.map(lambda g, m: g + momentum * m, corrected, new_momentum)

        return cast_like(direction, updates), AveragedMomentumState(
            cast_like(new_momentum, state.momentum)
        )

    return optax.GradientTransformation(init_fn, update_fn)


def _or_one(x):
    """Return x, or 1 where that is zero, to divide by."""
    return jnp.where(x > 0, x, 1.0)
