"""Pack many small arrays into one flat buffer, so that a message is one transfer.

A collective takes several network round trips. A fragment of ten separate arrays would
take ten times the round trips.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def pack(tree: PyTree) -> jax.Array:
    """Concatenate regional arrays `[R, ...]`.

    Returns:
      `[R, n]`, in the arrays' dtype if all have the same, else as bytes, uint8.
    """
    leaves = jax.tree.leaves(tree)
    if len({x.dtype for x in leaves}) > 1:
        leaves = [as_bytes(x) for x in leaves]
    return jnp.concatenate([x.reshape(x.shape[0], -1) for x in leaves], axis=1)


def unpack(buffer: jax.Array, shapes: PyTree) -> PyTree:
    """Invert `pack`.

    Args:
      buffer: `[..., n]`, with any leading axes.
      shapes: of one region's tree, without the leading axis.
    """
    leaves, structure = jax.tree.flatten(shapes)
    is_bytes = len({x.dtype for x in leaves}) > 1
    out, at = [], 0
    for like in leaves:
        width = like.dtype.itemsize if is_bytes else 1
        size = math.prod(like.shape) * width
        part = buffer[..., at : at + size]
        at += size
        lead = buffer.shape[:-1]
        if is_bytes:
            part = from_bytes(part.reshape(*lead, -1, width), like.dtype)
        out.append(part.reshape(*lead, *like.shape))
    return jax.tree.unflatten(structure, out)


def as_bytes(x: jax.Array) -> jax.Array:
    """Return `[r, ...]` as its bytes, uint8 `[r, n]`."""
    rows = x.reshape(x.shape[0], -1)
    if rows.dtype == jnp.bool_:
        return rows.astype(jnp.uint8)
    flat = jax.lax.bitcast_convert_type(rows, jnp.uint8)
    return flat.reshape(x.shape[0], -1)


def from_bytes(x: jax.Array, dtype: Any) -> jax.Array:
    """Invert `as_bytes`: uint8 `[..., itemsize]` to `[...]`."""
    if dtype == jnp.bool_:
        return x[..., 0].astype(dtype)
    if dtype.itemsize == 1:
        return jax.lax.bitcast_convert_type(x[..., 0], dtype)
    return jax.lax.bitcast_convert_type(x, dtype)
