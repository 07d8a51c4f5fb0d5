"""Scans whose number of steps is an argument, so that few lengths are compiled.

On a CPU, compiling inner steps takes as long as hundreds of them. Every length of a
`lax.scan` is a separate program, and events, evaluations and checkpoints cut a run into
many lengths: eight with H 100, N 8, tau 5 and an evaluation at every 25th step. A loop
whose number of steps is an argument is one program for all of them. Its inputs are
padded to a multiple of `LENGTH_BUCKET`; the padding is never read. Large batches are
not padded.

On accelerators scans keep their lengths: the compiler may plan transfers with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any

# Steps; divides most intervals.
LENGTH_BUCKET = 10

# Bytes of padding that are cheaper than another program.
_MOST_BYTES = 1 << 24


def scan(
    step: Callable, state: PyTree, xs: PyTree, num_steps: jax.Array | None = None
) -> tuple[PyTree, PyTree]:
    """Run `jax.lax.scan` over the first `num_steps` of `xs`.

    Args:
      step: `step(state, x) -> (state, out)`.
      state: before the first step.
      xs: leaves `[room, ...]`.
      num_steps: int32 scalar, at most `room`; None runs all with `lax.scan`.

    Returns:
      The final state, and each step's `out`, leaves `[room, ...]`, padded with zeros.
    """
    if num_steps is None:
        return jax.lax.scan(step, state, xs)
    step = jax.jit(step, inline=True)  # Traced once, not twice.
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
    """Return the number of steps that inputs are padded to.

    >>> [padded_length(num_steps) for num_steps in (1, 10, 11)]
    [10, 10, 20]
    """
    return -(-num_steps // length_bucket) * length_bucket


def takes(xs: PyTree, length_bucket: int = LENGTH_BUCKET) -> bool:
    """Return whether inputs `[num_steps, ...]` are small enough to pad."""
    leaves = jax.tree.leaves(xs)
    num_steps = leaves[0].shape[0]
    size = sum(x.size * np.dtype(x.dtype).itemsize for x in leaves)
    missing = padded_length(num_steps, length_bucket) - num_steps
    return size * missing <= _MOST_BYTES * num_steps


def padded(xs: PyTree, num_steps: int, length_bucket: int = LENGTH_BUCKET) -> PyTree:
    """Pad host arrays `[num_steps, ...]` with zeros."""
    missing = padded_length(num_steps, length_bucket) - num_steps
    if not missing:
        return xs
    return jax.tree.map(
        lambda x: np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]), xs
    )
