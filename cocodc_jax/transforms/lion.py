"""Distributed Lion: regions send the signs of their updates, one bit a value.

In region i, with its gradient g_i and its own momentum m_i (from zero),

    d_i = sign(b1 m_i + (1 - b1) g_i), sign(0) = +1;    m_i <- b2 m_i + (1 - b2) g_i

and of the d_i of all M regions

    average    d = sum(d_i) / M
    majority   d = sign(sum(d_i)), sign(0) = 0

then everywhere theta <- theta - eta (d + wd theta), which is
`optax.chain(optax.add_decayed_weights(wd), optax.scale_by_learning_rate(eta))`.

A region whose gradient is not finite keeps its momentum and does not count: with the
bits, regions send a byte for this. If no region counts, d is NaN.

Source: Distributed Lion, arXiv 2404.00438, both of its rules; not checked against the
authors' code. Differs from the paper: a bit has no zero, which is sent as +1.
"""

import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.transforms.compressor import Compressor, per_leaf, zeroed
from cocodc_jax.transforms.numerics import (
    cast_like,
    check_choice,
    check_unit_interval,
    is_finite,
    wide_zeros,
    widen,
)
from cocodc_jax.transforms.packing import pack, unpack

VoteRule = Literal["average", "majority"]
RULES = get_args(VoteRule)


class LionState(NamedTuple):
    """State of one region: `momentum`, tree like the parameters, float32 or wider."""

    momentum: optax.Updates


class LionMessage(NamedTuple):
    """A region's message."""

    signs: Any  # One bit a value, as `sign_bits` encodes them.
    counted: jax.Array  # uint8 scalar, 0 if the region's gradient was not finite.


def sign_bits() -> Compressor:
    """Send one bit a value and no scale: decoded to +1 for x >= 0, else -1.

    >>> import jax.numpy as jnp
    >>> message, _ = sign_bits().encode(jnp.array([0.5, -3.0, 0.0]), ())
    >>> message.arrays.nbytes
    1
    >>> print(sign_bits().decode(message))
    [ 1. -1.  1.]
    """

    def decode_leaf(arrays, shape):
        return 2.0 * unpack(arrays, 1, math.prod(shape)) - 1.0

    return per_leaf(
        "sign_bits", lambda x, key: pack((x >= 0).reshape(-1), 1), decode_leaf
    )


def init(params) -> LionState:
    """Return the state of a region whose parameters are `params`."""
    return LionState(jax.tree.map(wide_zeros, params))


def send(
    gradients,
    state: LionState,
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.99,
):
    """Encode the signs of a region's update and advance its momentum.

    The `LionMessage` holds ceil(n / 8) bytes for a tensor of n values, and one more. If
    the gradients are not finite, the momentum stays as it was. b1 and b2 are in [0, 1);
    gradients and state are *regional*.
    """
    check_unit_interval("b1", b1)
    check_unit_interval("b2", b2)

    def interpolate(weight):
        return jax.tree.map(
            lambda m, g: weight * m + (1 - weight) * widen(g), state.momentum, gradients
        )

    # Decode restores the dtype that was encoded. A cast of the numbers themselves would
    # make zeros of small ones, whose sign is +.
    signs = jax.tree.map(lambda x: jnp.where(x >= 0, 1.0, -1.0), interpolate(b1))
    bits, _ = sign_bits().encode(cast_like(signs, gradients), ())

    new = interpolate(b2)
    finite = is_finite(new)
    momentum = jax.tree.map(lambda x, m: jnp.where(finite, x, m), new, state.momentum)
    return LionMessage(bits, finite.astype(jnp.uint8)), LionState(momentum)


def combine(messages, rule: str = "average"):
    """Combine the signs of all regions to one direction.

    Args:
      messages: messages of M regions as one tree, a region axis M before every array:
        what `jax.lax.all_gather` or `jax.vmap(send)` gives.
      rule: "average", in [-1, 1], or "majority": -1, 1, or 0 for a tie; of the regions
        that count.

    Returns:
      The direction, minus which is descent, in the shapes and dtypes of the gradients;
      NaN if no region counts.

    >>> import jax, jax.numpy as jnp
    >>> gradients = jnp.array([[1.0, 2.0], [3.0, -1.0], [-1.0, -9.0]])
    >>> messages, _ = jax.vmap(send)(gradients, jax.vmap(init)(gradients))
    >>> print(combine(messages, "majority"))
    [ 1. -1.]
    """
    check_choice("rule", rule, RULES)
    signs = jax.vmap(sign_bits().decode)(messages.signs)
    counted = messages.counted > 0

    def mean(d):
        votes = zeroed(widen(d), counted).sum(axis=0)
        return (votes / counted.sum().astype(votes.dtype)).astype(d.dtype)

    means = jax.tree.map(mean, signs)
    return means if rule == "average" else jax.tree.map(jnp.sign, means)
