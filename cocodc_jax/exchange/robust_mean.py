"""The mean over regions after filtering their messages, see `sync.robust`.

Lengths are measured as fragments are sent. In the program, they are all-reduced before
the messages, one number each. On the outer mesh they travel with encoded messages;
uncompressed messages wait for them, one more network delay.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from cocodc_jax.core.sync import Measured
from cocodc_jax.exchange.combine import make_combine
from cocodc_jax.exchange.shard_buffer import ShardBuffer
from cocodc_jax.exchange.sync_spec import SyncSpec
from cocodc_jax.sharding.mesh import REGION
from cocodc_jax.sharding.region_map import psum_over_regions
from cocodc_jax.sync.robust import VERDICT, without

PyTree = Any


def with_length(spec: SyncSpec, shapes: PyTree, rank: int) -> PyTree:
    """Return the shapes of a message as sent: `Measured` if it is filtered."""
    if spec.sync.robust is None:
        return shapes
    is_summed = spec.sync.message.compressor(rank) is None
    dtype = jax.tree.leaves(shapes)[0].dtype if is_summed else jnp.float32
    return Measured(shapes, jax.ShapeDtypeStruct((), dtype))


def filter_block(
    spec: SyncSpec, sent: PyTree, weights: jax.Array
) -> tuple[PyTree, jax.Array, dict[str, jax.Array]]:
    """Filter a shard's messages by those of all regions, inside `region_shard_map`.

    Args:
      spec: of the run.
      sent: `Measured` of the shard's regions, or the messages if there is no filter.
      weights: of the shard's regions.

    Returns:
      Messages and weights to sum, and the verdicts of all regions, `{}` without a
      filter.
    """
    robust = spec.sync.robust
    if robust is None:
        return sent, weights, {}
    size = len(weights)
    first = jax.lax.axis_index(REGION) * size

    def of_all(x):
        nowhere = jnp.zeros(spec.regions.num, x.dtype)
        own = jax.lax.dynamic_update_slice_in_dim(nowhere, x, first, 0)
        return psum_over_regions(own)

    verdict, counted = robust.judge(of_all(sent.length), of_all(weights))
    weights = jax.lax.dynamic_slice_in_dim(counted, first, size)
    return without(sent.message, weights), weights, {VERDICT: verdict}


def robust_mean(
    spec: SyncSpec, rank: int, sent: PyTree, weights: jax.Array
) -> tuple[PyTree, dict[str, jax.Array]]:
    """Return the mean of gathered messages, and the verdicts.

    Args:
      spec: of the run.
      rank: of the messages.
      sent: of all regions, as for `filter_block`.
      weights: `[M]`.
    """
    message, robust = spec.sync.message, spec.sync.robust
    if robust is None:
        return message.combine(sent, weights, rank), {}
    verdict, weights = robust.judge(sent.length, weights)
    found = without(sent.message, weights)
    return robust.combine(message, found, weights, rank), {VERDICT: verdict}


def make_robust_combine(
    spec: SyncSpec,
    rank: int,
    everywhere: Sharding,
    shapes: PyTree,
    num_times: int,
    all_reduce: str,
    layout: ShardBuffer | None = None,
) -> Callable:
    """Make the program between hosts; see `combine.make_combine`.

    Returns:
      `combine(rows, weights) -> (mean, times, verdicts)`; verdicts are `{}` without a
      filter.
    """
    robust, is_summed = spec.sync.robust, True
    mean_of = None
    if spec.sync.message.compressor(rank) is not None:
        is_summed, mean_of = False, functools.partial(robust_mean, spec, rank)
    leaves = jax.tree.leaves(shapes)
    at = sum(math.prod(x.shape) for x in leaves)
    if layout is not None and robust is not None:
        at = layout.column(len(leaves))
    shapes = with_length(spec, shapes, rank)
    crossing = make_combine(mean_of, everywhere, shapes, num_times, all_reduce, layout)

    def combine(rows, weights):
        told = {}
        if robust is not None and is_summed:
            lengths = jax.lax.with_sharding_constraint(rows[:, at], everywhere)
            told[VERDICT], weights = robust.judge(lengths, weights)
            rows = without(rows, weights)
        mean, times = crossing(rows, weights)
        if not is_summed:
            mean, told = mean
        elif robust is not None:
            mean = mean.message
        return mean, times, told

    return combine
