"""The program between hosts: collectives over the outer mesh, and the mean.

Uncompressed pseudo-gradients are all-reduced. Compressed messages are all-gathered, and
each process decodes them. If a region has several processes, each of them handles a
share of the columns: those of its own devices' shards (`shard_buffer.py`), for its part
of the mean. Arrays that every device holds in full are shared out evenly, and the
result is gathered inside the region.

Measured times travel in the same flat buffer: appended to a compressed message; for a
pseudo-gradient in separate columns of each region, to which the others add zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from cocodc_jax.exchange import flat_buffer
from cocodc_jax.exchange.collectives import (
    gather_from_processes,
    sum_over_processes,
)
from cocodc_jax.exchange.shard_buffer import ShardBuffer
from cocodc_jax.transforms.compressor import Compressor

PyTree = Any


def make_buffer(
    message: PyTree,
    times: jax.Array | None,
    compressor: Compressor | None,
    layout: ShardBuffer | None = None,
) -> jax.Array:
    """Pack what regions send into a flat buffer, `[R, n]`.

    Args:
      message: leaves `[R, ...]`.
      times: measured seconds of each region, float32 `[R, 2]`, or None.
      compressor: of the message; None if it is not compressed.
      layout: how devices pack their shards, or None; see `sent_shapes`.
    """
    if times is not None and compressor is None:
        dtype = jax.tree.leaves(message)[0].dtype
        own = jnp.eye(len(times), dtype=dtype)
        times = own[:, :, None] * times[:, None].astype(dtype)
    sent = (message, times)
    return flat_buffer.pack(sent) if layout is None else layout.pack(sent)


def make_combine(
    mean_of: Callable[[PyTree, jax.Array], PyTree] | None,
    everywhere: Sharding,
    shapes: PyTree,
    num_times: int = 0,
    all_reduce: str = "direct",
    layout: ShardBuffer | None = None,
) -> Callable:
    """Make the program that averages messages over the outer mesh.

    Args:
      mean_of: `mean_of(messages, weights)`, the mean of all regions' encoded messages;
        None for uncompressed pseudo-gradients.
      everywhere: sharding that replicates to every process's outer device.
      shapes: of one region's message.
      num_times: regions whose times are sent too; 0 for none.
      all_reduce: "ring" or "direct".
      layout: of the rows, unless they are a `flat_buffer`.

    Returns:
      `combine(rows [R, n], weights [R]) -> (mean, times)`. `rows` are `make_buffer`'s,
      on their regions' processes; further columns are ignored. `times` are float32
      `[R, 2]`, or None; those of a region of weight 0 are 0.
    """
    sent = sent_shapes(mean_of is not None, shapes, num_times)
    how = everywhere, all_reduce, layout is not None

    def combine(rows, weights):
        if mean_of is None:
            weights = weights.astype(rows.dtype)
            crossed = sum_over_processes(rows, weights, *how)
        else:
            crossed = gather_from_processes(rows, *how)
        if layout is None:
            message, times = flat_buffer.unpack(crossed, sent)
        else:
            message, times = layout.unpack(crossed, everywhere)
        if mean_of is not None:
            return mean_of(message, weights), times
        if times is not None:
            share = weights[:, None]
            known = jnp.where(share > 0, times / jnp.where(share > 0, share, 1), 0)
            times = known.astype(jnp.float32)
        return message, times

    return combine


def times_bytes(compressor: Compressor | None, num_times: int) -> int:
    """Return the bytes that the times add to one region's message."""
    return 8 * (num_times if compressor is None else min(num_times, 1))


def sent_shapes(
    is_encoded: bool, shapes: PyTree, num_times: int
) -> tuple[PyTree, jax.ShapeDtypeStruct | None]:
    """Return the shapes of all that one region sends."""
    if not num_times:
        return shapes, None
    if is_encoded:
        return shapes, jax.ShapeDtypeStruct((2,), jnp.float32)
    dtype = jax.tree.leaves(shapes)[0].dtype
    return shapes, jax.ShapeDtypeStruct((num_times, 2), dtype)
