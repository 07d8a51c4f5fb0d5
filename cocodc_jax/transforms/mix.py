"""A merge whose alpha is a weight per parameter, high where curvature is high.

Compensating an Adam update by sqrt(nu) (`curvature.adam_second_moment`) gives

    theta = theta_g + progress - w * D,   progress = local - staged,
                                          D = theta_g - staged,
    w = strength * delay_steps * inner_lr * sqrt(nu)

In those units w is about 1e-7 and does nothing. Here only the shape of sqrt(nu) is
kept, so a constant nu gives the isotropic compensation with c = mean_weight:

    w = min(1, mean_weight * sqrt(nu) / mean(sqrt(nu)))

No published source; the formulas are derived here, from CoCoDC's merge (arXiv
2504.17672) with the diagonal that Adam holds.
"""

import jax
import jax.numpy as jnp

from cocodc_jax.transforms.numerics import widen


def curvature_weights(second_moment, mean_weight: float | jax.Array = 0.5):
    """Spread `mean_weight` over each tensor in proportion to sqrt(second_moment).

    Args:
      second_moment: tree, the inner Adam's nu for the fragment; its scale (bias
        correction included) does not matter.
      mean_weight: mean of the weights of a tensor before the cut at 1, in [0, 1].

    Returns:
      A tree of weights in [0, 1], float32 or wider; a tensor whose nu is all zero
      gets `mean_weight` everywhere.
    """

    def spread(nu):
        root = jnp.sqrt(widen(nu))
        mean = jnp.mean(root)
        relative = jnp.where(mean > 0, root / jnp.where(mean > 0, mean, 1.0), 1.0)
        return jnp.minimum(1.0, mean_weight * relative)

    return jax.tree.map(spread, second_moment)


def curvature_weighted_mix(global_params, staged_params, local_params, weights):
    """Merge an arrived fragment: theta_g + (local - staged) - w * (theta_g - staged).

    Args:
      global_params: theta_g after its outer step, *replicated*.
      staged_params: the region's fragment when its sync started, *regional*.
      local_params: the region's fragment now, *regional*; sets the dtype.
      weights: tree of `curvature_weights`: 0 replays the progress on theta_g, 1 keeps
        the local parameters as they are.

    Returns:
      The region's new fragment.

    >>> import jax.numpy as jnp
    >>> nu = jnp.array([1.0, 9.0])
    >>> print(curvature_weights(nu, 0.5))
    [0.25 0.75]
    >>> print(curvature_weighted_mix(
    ...     jnp.array([2.0, 2.0]), jnp.zeros(2), jnp.ones(2), curvature_weights(nu)))
    [2.5 1.5]
    """

    def merge(new, staged, local, weight):
        new, staged = widen(new), widen(staged)
        progress = widen(local) - staged
        return (new + progress - weight * (new - staged)).astype(local.dtype)

    return jax.tree.map(merge, global_params, staged_params, local_params, weights)
