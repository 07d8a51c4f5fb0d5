"""Losses that compute their gradient themselves, such as of a batch in parts.

Gradient accumulation takes the parts one after another, and their mean:

    g = 1/A sum over a of  grad loss(params, part a)

The parts are of one size, so that the mean of their means is that of the batch. One
part's activations exist at a time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any
# `(loss, aux), gradient` of `(params, batch)`.
GradientFn = Callable[[PyTree, PyTree], tuple[tuple[jax.Array, PyTree], PyTree]]


def accumulated(gradient: GradientFn, num_parts: int) -> GradientFn:
    """Return the same function of a batch, computed in parts."""
    if num_parts == 1:
        return gradient

    def mean(params: PyTree, batch: PyTree):
        parts = jax.tree.map(lambda x: x.reshape(num_parts, -1, *x.shape[1:]), batch)

        def add(total, part):
            out, grads = gradient(params, part)
            return jax.tree.map(jnp.add, total, grads), out

        zeros = jax.tree.map(jnp.zeros_like, params)
        total, outs = jax.lax.scan(add, zeros, parts)
        grads = jax.tree.map(lambda x: x / num_parts, total)
        return jax.tree.map(lambda x: x.mean(axis=0), outs), grads

    return mean


def make_accumulated_loss_fn(loss_fn: Callable, num_parts: int) -> Callable:
    """Make a loss whose gradient is accumulated.

    Args:
      loss_fn: `(params, batch, key) -> (loss, aux)`, means over the batch but for
        aux's `num_tokens`, a sum. All parts are given the same key.
      num_parts: A, a divisor of the batch's leading axis.

    Returns:
      The same function, but for the order of float32 sums; reverse mode, and forward
      mode over that.
    """
    if num_parts == 1:
        return loss_fn

    def loss_and_grad(params, batch, key):
        def gradient(params, part):
            return jax.value_and_grad(loss_fn, has_aux=True)(params, part, key)

        (value, aux), grads = accumulated(gradient, num_parts)(params, batch)
        if "num_tokens" in aux:
            aux["num_tokens"] *= num_parts
        return (value, aux), grads

    return with_gradient(loss_fn, loss_and_grad)


def with_gradient(loss_fn: Callable, loss_and_grad: Callable) -> Callable:
    """Return `loss_fn(params, batch, key) -> (loss, aux)`, with a gradient of its own.

    `loss_and_grad` returns `((loss, aux), gradient)`, of the same arguments. First
    derivatives are in reverse mode, and in forward mode over these.
    """

    @jax.custom_vjp
    def loss(params, batch, key):
        return loss_fn(params, batch, key)

    def backward(grads, cotangents):
        return jax.tree.map(lambda g: g * cotangents[0], grads), None, None

    loss.defvjp(loss_and_grad, backward)
    return loss
