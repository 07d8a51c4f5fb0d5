"""The inner Adam's second moment, which some curvatures take as a Fisher diagonal."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.transforms.layers import nodes_of
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

    def second_moment(opt_state: PyTree) -> PyTree:
        adam = nodes_of(optax.ScaleByAdamState, opt_state)
        if len(adam) != 1:
            raise ValueError(
                f"the merge needs the inner Adam's second moment, but the optimizer's "
                f"state holds {len(adam)} Adam states; pass `second_moment`"
            )
        if nodes_of(optax.MaskedNode, adam[0].nu):
            raise ValueError(
                "the merge needs the inner Adam's second moment of every parameter, "
                "but the optimizer leaves some to others (optax.partition, Muon); pass "
                "`second_moment`, or use another curvature"
            )

        def correct(nu):
            count, wide = adam[0].count, wide_dtype(nu.dtype)
            # Before the first step 0 / 0: of a region that was restored, or that waits.
            scale = jnp.where(count == 0, 1, 1 - b2 ** count.astype(wide))
            return nu / scale.reshape(-1, *(1,) * (nu.ndim - 1)).astype(nu.dtype)

        return jax.tree.map(correct, adam[0].nu)

    return second_moment
