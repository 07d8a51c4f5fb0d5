"""Collectives at every step, inside `region_shard_map`.

If regions are CPU processes, all leaves cross as one flat buffer, by this package's
collectives or the backend's (`all_reduce`). Otherwise the compiler chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cocodc_jax.exchange import flat_buffer
from cocodc_jax.exchange.collectives import direct_gather, direct_sum
from cocodc_jax.sharding.mesh import REGION
from cocodc_jax.sharding.region_map import (
    all_gather_regions,
    as_varying,
    pmean_over_regions,
)
from cocodc_jax.transforms.numerics import wide_dtype

PyTree = Any


def mean_over_regions(tree: PyTree, in_flat_buffer: bool = False) -> PyTree:
    """Average a tree of `[block, ...]` leaves over all regions.

    Sums in at least float32: XLA's CPU backend aborts the process on a bfloat16
    all-reduce in a partly manual program.

    Args:
      tree: of a block of regions.
      in_flat_buffer: whether leaves cross as one, see `mesh.wants_flat_buffer`.
    """
    return _reduced(tree, pmean_over_regions, in_flat_buffer)


def mean_for_all(message: PyTree, all_reduce: str | None) -> PyTree:
    """Average all regions' messages, on each shard.

    Args:
      message: leaves `[block, ...]`.
      all_reduce: one of `collectives.ALL_REDUCES` if messages cross as a flat buffer;
        None lets the compiler choose.
    """
    if all_reduce != "direct":
        return as_varying(mean_over_regions(message, all_reduce is not None))
    num = jax.lax.axis_size(REGION)
    return _reduced(
        message, lambda x: direct_sum(x, REGION, num) / num, in_flat_buffer=True
    )


def gather_all(message: PyTree, all_reduce: str | None) -> PyTree:
    """Gather all regions' messages, `[R, ...]`; arguments as for `mean_for_all`."""
    if all_reduce is None:
        return all_gather_regions(message)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), message)
    buffer = flat_buffer.pack(message)
    if all_reduce == "direct":
        rows = direct_gather(buffer, REGION, jax.lax.axis_size(REGION))
    else:
        rows = all_gather_regions(buffer)
    return flat_buffer.unpack(rows, shapes)


def _reduced(tree: PyTree, mean: Callable, in_flat_buffer: bool) -> PyTree:
    """Apply `mean` to the blocks' means, keeping the dtypes of `tree`."""

    def of_block(x, *others):
        wide = jnp.result_type(*(wide_dtype(y.dtype) for y in (x, *others)))
        return x.astype(wide).mean(0)

    if in_flat_buffer:
        leaves = jax.tree.leaves(tree)
        means = jax.tree.map(lambda x: of_block(x, *leaves), tree)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), means)
        buffer = flat_buffer.pack(jax.tree.map(lambda x: x[None], means))
        means = flat_buffer.unpack(mean(buffer[0]), shapes)
    else:
        means = jax.tree.map(lambda x: mean(of_block(x)), tree)
    return jax.tree.map(lambda x, like: x.astype(like.dtype), means, tree)
