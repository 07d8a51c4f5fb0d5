"""A per-tensor weight for any curvature, from the observed change of the gradient.

A region has the gradient at two points of its path, `g` at stale_params and `g_later`
at later_params. A curvature B predicts the change `B s` over the step
`s = later_params - stale_params`; the observed change is `y = g_later - g`. The weight
that fits best is the secant estimate

    w = argmin ||y - w B s||^2 = <y, B s> / <B s, B s>,   clipped to [0, max_weight]

and the result is `w B D`. With `isotropic`, w is the inverse of the long
Barzilai-Borwein step; with the exact Hessian of a quadratic, w = 1. A negative w would
mean that the curvature points in the wrong direction, so there is no correction then.

It has no published source and is derived here: CoCoDC (arXiv 2504.17672) has a fixed
weight. It costs one more product of B and three tree reductions, but no gradient.
"""

import functools

import jax
import jax.numpy as jnp

from cocodc_jax.transforms.curvature import Curvature, as_curvature
from cocodc_jax.transforms.numerics import (
    check_choice,
    check_positive,
    difference,
    inner_product,
)


def secant(
    base: str | Curvature, max_weight: float | None = None, scope: str = "tensor"
) -> Curvature:
    """Weight `base` by the observed change of the gradient between two points.

    Besides the needs of `base`, `delay_compensation(...).update` needs `later_gradient`
    (a tree like the updates, in their units and sign) and `later_params` (where it was
    taken). In the region program the updates are the per-step pseudo-gradient of the
    full overlap, `later_gradient` is that plus the change from its first half to the
    second, and `later_params` is halfway.

    Args:
      base: the curvature to weigh, or the name of one with its default options; its
        own scale and units do not matter.
      max_weight: largest weight, or None for no cap.
      scope: "tensor" fits one weight per leaf, "tree" one for all leaves.

    Returns:
      A curvature whose strength 1 takes the estimate as it is.

    >>> import jax, jax.numpy as jnp
    >>> from cocodc_jax.transforms import curvature
    >>> from cocodc_jax.transforms.compensation import delay_compensation
    >>> gradient = jax.grad(lambda w: 3.0 * jnp.sum(w**2) / 2)
    >>> stale, later, now = jnp.ones(2), jnp.array([0.9, 0.7]), jnp.array([2.0, 3.0])
    >>> transform = delay_compensation(secant(curvature.isotropic()), strength=1.0)
    >>> fresh, _ = transform.update(
    ...     gradient(stale), transform.init(now), now, stale_params=stale,
    ...     later_params=later, later_gradient=gradient(later), delay_steps=1)
    >>> print(jnp.allclose(fresh, gradient(now), rtol=1e-6))
    True
    """
    base = as_curvature("base", base)
    if max_weight is not None:
        check_positive("max_weight", max_weight)
    check_choice("scope", scope, ("tensor", "tree"))

    def fit(change, predicted):
        # Squares of what a weak curvature predicts would vanish in float32.
        scale = _power_of_two(predicted)
        predicted = jax.tree.map(lambda b: b / scale.astype(b.dtype), predicted)
        size = inner_product(predicted, predicted)
        weight = inner_product(change, predicted) / jnp.where(size > 0, size, 1.0)
        return jnp.clip(weight / scale.astype(weight.dtype), 0.0, max_weight)

    def product(gradient, displacement, *, later_gradient, later_params, **extra):
        base_extra = {name: extra[name] for name in base.needs}
        step = difference(later_params, extra["stale_params"])
        change = difference(later_gradient, gradient)
        predicted = base.product(gradient, step, **base_extra)

        curved = base.product(gradient, displacement, **base_extra)
        if scope == "tree":
            weight = fit(change, predicted)
            return jax.tree.map(lambda c: weight * c, curved)
        return jax.tree.map(lambda y, b, c: fit(y, b) * c, change, predicted, curved)

    needs = base.needs | {"later_gradient", "later_params", "stale_params"}
    return Curvature(f"secant({base.name})", product, needs)


def _power_of_two(tree):
    """Return one near the largest entry: what is divided by it is not rounded."""
    largest = [jnp.max(jnp.abs(x), initial=0.0) for x in jax.tree.leaves(tree)]
    power = functools.reduce(
        jnp.maximum, (x.astype(jnp.float32) for x in largest), jnp.float32(0)
    )
    power = jax.lax.reduce_precision(power, exponent_bits=8, mantissa_bits=0)
    return jnp.where((power > 0) & jnp.isfinite(power), power, 1.0)
