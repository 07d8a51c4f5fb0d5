"""Steps one after another, as many as their inputs are, or as an argument tells.

Compiling inner steps takes a CPU as long as hundreds of them, every length of a
`lax.scan` is a program of its own, and events, evaluations and checkpoints cut a run
into many: with H 100, N 8, tau 5 and an evaluation at every 25th step into eight. A
loop whose number of steps is an argument is one program for all of them. Its inputs
are padded to a multiple of `LENGTH_BUCKET`; the padding is never read. Where batches
are so large that this would be felt, scans stay what they are.

On accelerators scans stay what they are: a compiler that knows the length may plan
transfers with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any

# Steps; most intervals are multiples of it.
LENGTH_BUCKET = 10

# Zeros behind the last step that are worth a program less.
_MOST_BYTES = 1 << 24


def scan(
    step: Callable, state: PyTree, xs: PyTree, num_steps: jax.Array | None = None
) -> tuple[PyTree, PyTree]:
    """Do as `jax.lax.scan`, for the first `num_steps` of `xs` alone.

    Args:
      step: `step(state, x) -> (state, out)`.
      state: before the first step.
      xs: leaves `[room, ...]`.
      num_steps: int32 scalar, at most `room`; None is all, which is a `lax.scan`.

    Returns:
      The state after them, and `out` of each, leaves `[room, ...]`, zeros behind.
    """
    if num_steps is None:
        return jax.lax.scan(step, state, xs)
    step = jax.jit(step, inline=True)  # Traced once, for shapes and for the loop.
    _, out = jax.eval_shape(step, state, jax.tree.map(lambda x: x[0], xs))
    room = jax.tree.leaves(xs)[0].shape[0]
    outs = jax.tree.map(lambda x: jnp.zeros((room, *x.shape), x.dtype), out)

    def body(i: jax.Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        state, outs = carry
        x = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), xs
        )
        state, out = step(state, x)
        outs = jax.tree.map(
            lambda to, x: jax.lax.dynamic_update_index_in_dim(to, x, i, 0), outs, out
        )
        return state, outs

    return jax.lax.fori_loop(0, num_steps, body, (state, outs))


def padded_length(num_steps: int, length_bucket: int = LENGTH_BUCKET) -> int:
    """Return the steps that inputs of so many are laid out for.

    >>> [padded_length(num_steps) for num_steps in (1, 10, 11)]
    [10, 10, 20]
    """
    return -(-num_steps // length_bucket) * length_bucket


def takes(xs: PyTree, length_bucket: int = LENGTH_BUCKET) -> bool:
    """Tell whether inputs `[num_steps, ...]` are small enough to be given room.

    Args:
      xs: arrays, or their shapes and dtypes.
      length_bucket: of which room is a multiple.
    """
    leaves = jax.tree.leaves(xs)
    num_steps = leaves[0].shape[0]
    size = sum(x.size * np.dtype(x.dtype).itemsize for x in leaves)
    missing = padded_length(num_steps, length_bucket) - num_steps
    return size * missing <= _MOST_BYTES * num_steps


def padded(xs: PyTree, num_steps: int, length_bucket: int = LENGTH_BUCKET) -> PyTree:
    """Return host arrays `[num_steps, ...]` with room, zeros behind."""
    missing = padded_length(num_steps, length_bucket) - num_steps
    if not missing:
        return xs
    return jax.tree.map(
        lambda x: np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]), xs
    )
