"""Correct a gradient for the delay between where it was taken and where it is used.

    D  = params - stale_params
    g~ = g + strength * curvature(g, D)

The first-order Taylor expansion of the gradient field: with the true Hessian, strength
1 and a quadratic loss, `g~` is the gradient at `params`. `g` is gradient-like, old
minus new; the term is added.

Units: `g` may be a true gradient (a stale-gradient loop) or a per-step pseudo-gradient
in parameter units. In the region program it is the latter,

    u = (staged - local) / delay_steps
    g~ = delay_compensation(...)(u, params=theta_g, stale_params=staged)
    local <- theta_g - delay_steps * g~

so the curvature must return parameter units too (`curvature.py`).

Source: CoCoDC (arXiv 2504.17672) and DC-ASGD (arXiv 1609.08326), both as read from the
authors' code. The sign is derived here; `max_ratio` is ours.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.transforms import curvature as curvatures
from cocodc_jax.transforms.layers import nodes_of
from cocodc_jax.transforms.numerics import (
    check_number,
    check_positive,
    check_unit_interval,
    difference,
    fill_holes,
    has_holes,
    match_holes,
    matched,
    safe_norm,
    wide_dtype,
    widen,
)


class DelayCompensationState(NamedTuple):
    """State of `delay_compensation`.

    Attributes:
      update_count: int32 scalar, updates made; the argument of a scheduled `strength`.
      correction_ratio: float32 scalar, length of the last correction (after
        `max_ratio`) over the length of the last update; 0 when that is 0, not a number
        when that is none.
    """

    update_count: jax.Array
    correction_ratio: jax.Array


def delay_compensation(
    curvature: str | curvatures.Curvature,
    strength: optax.ScalarOrSchedule = 0.5,
    max_ratio: float | jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Correct stale updates to those at `params`, to first order.

    `update(updates, state, params, *, stale_params, **extra)` returns
    `updates + strength * curvature(updates, params - stale_params)`, in the dtype of
    `updates`; arithmetic is in float32 or wider. It descends nothing by itself: chain
    it before an optimizer, which then sees the compensated gradient.

    Args:
      curvature: a `Curvature`, or the name of one with its default options. There is
        no default: which one acts depends on the units of `updates` (`curvature.py`);
        `outer_product`, the published one, corrects small gradients by nothing that
        could be measured.
      strength: lambda, the weight of the correction: a number, an array, or a
        schedule of the update count. Negative values anti-compensate.
      max_ratio: trust region, the longest correction allowed in multiples of the
        length of `updates` (over the whole tree), or None.

    Returns:
      A transformation whose `update` takes `updates` (gradient or per-step
      pseudo-gradient, old minus new, taken at `stale_params`), `params` (where it is
      needed), `stale_params`, and what `curvature.needs` names; other extra arguments
      are ignored. All trees share structure and shapes; None and masked leaves of
      `updates` are skipped in the other trees.

    >>> import jax, jax.numpy as jnp, optax
    >>> loss = lambda w: jnp.sum(jnp.array([1.0, 4.0]) * w**2) / 2
    >>> stale, now = jnp.array([1.0, 1.0]), jnp.array([0.5, 0.75])
    >>> transform = delay_compensation("hessian_vector", strength=1.0)
    >>> fresh, state = transform.update(
    ...     jax.grad(loss)(stale), transform.init(now), now,
    ...     stale_params=stale, gradient_fn=jax.grad(loss))
    >>> print(fresh, jax.grad(loss)(now))
    [0.5 3. ] [0.5 3. ]
    """
    curvature = curvatures.as_curvature("curvature", curvature)
    check_number("strength", strength)
    if max_ratio is not None:
        check_positive("max_ratio", max_ratio)

    def init_fn(params):
        zero = jnp.zeros([], jnp.int32)
        return DelayCompensationState(zero, zero.astype(jnp.float32))

    def update_fn(updates, state, params=None, *, stale_params=None, **extra):
        extra = _needed_extras(curvature, updates, params, stale_params, extra)
        gradient = jax.tree.map(widen, updates)
        now, anchor = matched(updates, params=params, stale_params=stale_params)
        scale = strength(state.update_count) if callable(strength) else strength

        product = curvature.product(gradient, difference(now, anchor), **extra)
        correction = jax.tree.map(lambda c: scale * widen(c), product)
        correction, ratio = _limit(correction, gradient, max_ratio)
        compensated = jax.tree.map(
            lambda u, c: (widen(u) + c).astype(u.dtype), updates, correction
        )

        count = jnp.asarray(optax.safe_increment(state.update_count))
        return compensated, DelayCompensationState(count, ratio)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def adam_second_moment(b2: float | jax.Array) -> Callable[[Any], Any]:
    """Find Adam's second moment in an optimizer state, and correct its bias.

    Args:
      b2: the decay the inner optimizer was made with.

    Returns:
      A function of a regional optimizer state, every leaf `[R, ...]`. It returns a tree
      like the parameters, nu / (1 - b2^count), or nu, which is zero, for regions whose
      Adam has made no step yet. The state must hold one nu for each parameter.
    """
    check_unit_interval("b2", b2)

    def second_moment(opt_state):
        adam = nodes_of(optax.ScaleByAdamState, opt_state)
        if len(adam) != 1:
            raise ValueError(
                "the merge needs the inner Adam's second moment, but the optimizer's "
                f"state holds {len(adam)} Adam states; pass `second_moment`"
            )
        if nodes_of(optax.MaskedNode, adam[0].nu):
            raise ValueError(
                "the merge needs the inner Adam's second moment of every parameter, "
                "but the optimizer leaves some to others (optax.partition, Muon); pass "
                "`second_moment`, or use another curvature"
            )

        def correct(nu):
            count = adam[0].count
            wide = wide_dtype(nu.dtype)
            # Before the first step 0 / 0: of a region that was restored, or that waits.
            scale = jnp.where(count == 0, 1, 1 - b2 ** count.astype(wide))
            return nu / scale.reshape(-1, *(1,) * (nu.ndim - 1)).astype(nu.dtype)

        return jax.tree.map(correct, adam[0].nu)

    return second_moment


_TREES = frozenset({"stale_params", "second_moment", "later_gradient", "later_params"})


def _needed_extras(curvature, updates, params, stale_params, extra):
    """Select the arguments that the curvature needs; refuse missing ones."""
    available = {"params": params, "stale_params": stale_params} | extra
    needed = {"params", "stale_params"} | curvature.needs

    missing = sorted(name for name in needed if available.get(name) is None)
    if missing:
        raise ValueError(
            f"delay_compensation with curvature {curvature.name!r} needs "
            f"{', '.join(missing)}: pass update(updates, state, params, "
            "stale_params=..., ...)"
        )

    extra = {name: available[name] for name in curvature.needs}
    for name in _TREES & extra.keys():
        (extra[name],) = matched(updates, **{name: extra[name]})
    if not has_holes(updates):
        return extra

    # Functions of parameters see what a mask hides, as it was.
    def filled(part):
        return fill_holes(updates, part, stale_params)

    if gradient_fn := extra.get("gradient_fn"):
        extra["gradient_fn"] = lambda x: match_holes(updates, gradient_fn(filled(x)))
    if model_fn := extra.get("model_fn"):
        extra["model_fn"] = lambda x: model_fn(filled(x))
    return extra


def _limit(correction, gradient, max_ratio):
    """Clip the correction's length; return it and its ratio to the gradient's."""
    length = safe_norm(correction)
    reference = safe_norm(gradient)
    if max_ratio is not None:
        bound = max_ratio * reference
        shrink = jnp.where(length > bound, bound / jnp.where(length > 0, length, 1), 1)
        correction = jax.tree.map(lambda c: shrink.astype(c.dtype) * c, correction)
        length = shrink * length

    # NaN stays NaN: a run that diverges must not look uncorrected.
    is_zero = reference == 0
    ratio = jnp.where(is_zero, 0, length / jnp.where(is_zero, 1, reference))
    return correction, jax.lax.stop_gradient(ratio).astype(jnp.float32)
