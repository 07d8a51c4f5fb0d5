"""DC-ASGD, asynchronous SGD with delay compensation, as two compositions.

    w <- w - learning_rate * (g + lambda_t * g * g * (w - w_stale))

    constant   lambda_t = strength
    adaptive   MS <- decay * MS + (1 - decay) * g * g
               lambda_t = strength / sqrt(MS + 1e-7), elementwise, MS from 0

`g` is a true gradient taken at `w_stale` (`stale_params`), descent is minus `g`. The
compensation is `delay_compensation` with the outer-product curvature, whose elements
the adaptive form divides by their own running size.

Source: Zheng et al., arXiv 1609.08326, equations 10 and 14. The constant form is as
read from the authors' code; the adaptive form's defaults are from memory, unchecked
(the paper uses decay 0 on ImageNet).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.transforms import curvature
from cocodc_jax.transforms.compensation import delay_compensation
from cocodc_jax.transforms.numerics import (
    cast_like,
    check_rate,
    check_unit_interval,
    descend,
    wide_zeros,
    widen,
)


def dc_asgd(
    learning_rate: optax.ScalarOrSchedule, strength: optax.ScalarOrSchedule = 0.04
) -> optax.GradientTransformationExtraArgs:
    """Descend gradients compensated by `strength * g * g * (params - stale_params)`.

    Args:
      learning_rate: step size of the descent.
      strength: lambda_0, a number or a schedule of the update count.

    Returns:
      A transformation whose `update` needs `params` and `stale_params=...`.

    >>> import jax.numpy as jnp, optax
    >>> w, w_stale = jnp.array([1.0]), jnp.array([3.0])
    >>> optimizer = dc_asgd(learning_rate=0.1, strength=0.5)
    >>> step, _ = optimizer.update(
    ...     jnp.array([1.0]), optimizer.init(w), w, stale_params=w_stale)
    >>> print(step)  # -0.1 * (1 + 0.5 * 1 * 1 * (1 - 3))
    [-0.]
    """
    return optax.chain(
        delay_compensation(curvature.outer_product(), strength), descend(learning_rate)
    )


def dc_asgd_adaptive(
    learning_rate: optax.ScalarOrSchedule,
    strength: float | jax.Array = 2.0,
    decay: float | jax.Array = 0.95,
) -> optax.GradientTransformationExtraArgs:
    """Descend gradients compensated with a lambda per parameter (DC-ASGD-a).

    All arguments but the learning rate are those of `adaptive_delay_compensation`.
    """
    return optax.chain(
        adaptive_delay_compensation(strength, decay), descend(learning_rate)
    )


class AdaptiveDelayCompensationState(NamedTuple):
    """State of `adaptive_delay_compensation`."""

    # tree like the parameters, float32 or wider, running mean of the squared updates.
    mean_square: optax.Updates
    # `DelayCompensationState` of the inner `delay_compensation`.
    compensation: optax.OptState


def adaptive_delay_compensation(
    strength: float | jax.Array = 2.0,
    decay: float | jax.Array = 0.95,
    eps: float = 1e-7,
) -> optax.GradientTransformationExtraArgs:
    """Compensate with `strength / sqrt(MS + eps) * g * g * D`, lambda per parameter.

    Args:
      strength: lambda_0.
      decay: b, of the running mean square MS of the updates, in [0, 1).
      eps: added to MS under the root, positive, in squared units of the updates.

    Returns:
      A transformation whose `update` needs `params` and `stale_params=...`.
    """
    check_unit_interval("decay", decay)
    check_rate("eps", eps)
    compensate = delay_compensation(_size_weighted_outer_product(eps), strength)

    def init_fn(params):
        # Squares of float16 would overflow in it.
        mean_square = jax.tree.map(wide_zeros, params)
        return AdaptiveDelayCompensationState(mean_square, compensate.init(params))

    def update_fn(updates, state, params=None, *, stale_params=None, **extra):
        mix = lambda u, m: decay * m + (1 - decay) * widen(u) ** 2  # noqa: E731
        mean_square = jax.tree.map(mix, updates, state.mean_square)
        mean_square = cast_like(mean_square, state.mean_square)
        updates, compensation = compensate.update(
            updates,
            state.compensation,
            params,
            stale_params=stale_params,
            second_moment=mean_square,
        )
        return updates, AdaptiveDelayCompensationState(mean_square, compensation)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _size_weighted_outer_product(eps):
    """Return H D = g * g * D / sqrt(second_moment + eps)."""

    def product(gradient, displacement, *, second_moment):
        weigh = lambda g, d, m: g * g * d / jnp.sqrt(widen(m) + eps)  # noqa: E731
        return jax.tree.map(weigh, gradient, displacement, second_moment)

    needs = frozenset({"second_moment"})
    return curvature.Curvature("size_weighted_outer_product", product, needs)
