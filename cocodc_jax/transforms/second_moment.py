"""The inner Adam's second moment, which some curvatures take as a Fisher diagonal."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.transforms.numerics import wide_dtype

PyTree = Any


def adam_second_moment(b2: float | jax.Array) -> Callable[[PyTree], PyTree]:
    """Find Adam's second moment in an optimizer state, and corrects its bias.

    Args:
      b2: the decay the inner optimizer was made with.

    Returns:
      A function of a regional optimizer state, every leaf `[R, ...]`, that gives a
      tree like the parameters, nu / (1 - b2^count), and nu itself, zeros, of a region
      whose Adam has made no step yet. The state must hold one Adam's nu of each.
    """

    def is_adam(state: Any) -> bool:
        return isinstance(state, optax.ScaleByAdamState)

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    def second_moment(opt_state: PyTree) -> PyTree:
        adam = list(filter(is_adam, jax.tree.leaves(opt_state, is_leaf=is_adam)))
        if len(adam) != 1:
            raise ValueError(
                f"the merge needs the inner Adam's second moment, but the optimizer's "
                f"state holds {len(adam)} Adam states; pass `second_moment`"
            )

        if any(map(is_masked, jax.tree.leaves(adam[0].nu, is_leaf=is_masked))):
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
