"""Backward passes of products and norms, in the order that is fast on CPUs.

In a product y = x W of tokens, the weight's gradient is x' g. JAX writes it as (g' x)',
and XLA's CPU backend then transposes g, often the wider of the two, for each weight;
here it transposes x, once for all weights that read it. The gradient of a number that
scales a row is a sum over that row, which is slow on this backend. If a product with
ones spreads the number over the row, its gradient is a product. Forward mode cannot
differentiate such gradients.
"""

from typing import Any

import jax
import jax.numpy as jnp

PLAIN = "plain"
CPU = "cpu"


def choose(
    backward: str, platform: str, is_shared: bool, needs_forward_mode: bool
) -> str:
    """Return which backward passes a run has; auto is cpu on CPUs if possible.

    It is not if devices share a region's work, or if gradients are differentiated
    again.
    """
    against = (
        ("is for regions of one CPU device", is_shared or platform != "cpu"),
        ("has no second derivatives, which the method takes", needs_forward_mode),
    )
    reasons = [text for text, is_so in against if is_so]
    if backward == CPU and reasons:
        raise ValueError(
            f"backward={backward!r} {' and '.join(reasons)}; use backward='auto'"
        )
    return PLAIN if backward == PLAIN or reasons else CPU


def product(
    x_BLD: jax.Array, w_DF: jax.Array, backward: str, dtype: Any = None
) -> jax.Array:
    """Multiply tokens by a weight of their dtype; sums are in `dtype`, or in x's."""
    if backward == CPU:
        return _product(x_BLD, w_DF, dtype)
    return _matmul(x_BLD, w_DF, dtype)


def spread(x_BL1: jax.Array, width: int, backward: str) -> jax.Array:
    """Return the float32 scale of each row, as [..., 1] or spread to [..., width]."""
    if backward == CPU:
        return x_BL1 @ jnp.ones((1, width), x_BL1.dtype)
    return x_BL1


def _matmul(x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return jnp.matmul(x, w, preferred_element_type=dtype)


def _product_forward(
    x: jax.Array, w: jax.Array, dtype: Any
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _matmul(x, w, dtype), (x, w)


def _product_backward(
    dtype: Any, residuals: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    tokens = tuple(range(x.ndim - 1))
    grad_x = grad @ w.T.astype(grad.dtype)
    grad_w = jax.lax.dot_general(
        x.astype(grad.dtype), grad, ((tokens, tokens), ((), ()))
    )
    return grad_x.astype(x.dtype), grad_w.astype(w.dtype)


_product = jax.custom_vjp(_matmul, nondiff_argnums=(2,))
_product.defvjp(_product_forward, _product_backward)
