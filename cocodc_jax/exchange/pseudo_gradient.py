"""Encode each region's pseudo-gradient, Delta = theta^g - theta^m.

Pseudo-gradients are old minus new and at least float32, whatever the parameters'
dtype. They are measured from `stale_params`: the outer fragment, equal in all regions,
or the one that each region last received, if regions are asynchronous.

A robust mean filters messages by their lengths (`sync.robust`), measured as fragments
are sent. In the program, lengths are all-reduced before the messages, one number each.
On the outer mesh they travel with encoded messages; uncompressed messages wait for
them, one more network delay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from cocodc_jax.core.sync import Measured, encode
from cocodc_jax.exchange.base import SyncSpec
from cocodc_jax.sharding.mesh import REGION
from cocodc_jax.sharding.region_map import psum_over_regions
from cocodc_jax.sync.averages import sync_key
from cocodc_jax.sync.needs import STAGED
from cocodc_jax.sync.robust import VERDICT, without

PyTree = Any


def make_messages(spec: SyncSpec, fragment_id: int, rank: int) -> Callable:
    """Make the encoding of a fragment on a shard, for `region_shard_map`.

    Returns:
      `outgoing(params, stale_params, state, weights, keys, start_step) -> (staged,
      message, state)` over the regions of a shard. `staged` is the current fragment if
      a merge needs it, else None. `message` is the value to average (see
      `sync.averages`), encoded if the method compresses, and `Measured` for a robust
      mean. A region of weight 0 keeps its compressor's state. `start_step` is
      `SyncSpec.start_step`'s.
    """
    sync, is_by_region = spec.sync, spec.sync.schedule.is_by_region
    keeps = STAGED in sync.copies

    def outgoing(params, stale_params, state, weights, keys, start_step):
        staged = spec.fragments.take(params, fragment_id, lead=1)
        key = None if start_step is None else sync_key(fragment_id, start_step)

        def one_region(anchor, whole, part, memory, weight, key_data):
            return encode(
                sync, whole, part, anchor, memory, key_data, weight, key, rank
            )

        axes = (0 if is_by_region else None, 0, 0, 0, 0, 0)
        message, new = spec.local.map(one_region, axes)(
            stale_params, params, staged, state, weights, keys
        )
        if sync.message.compressor(rank) is not None:
            state = new
        return staged if keeps else None, message, state

    return outgoing


def in_specs(spec: SyncSpec) -> tuple:
    """Return the specs over the region axis of `make_messages`'s arguments."""
    stale = P(REGION) if spec.sync.schedule.is_by_region else P()
    return (P(REGION), stale, *(P(REGION),) * 3, P())


def make_restore(spec: SyncSpec, fragment_id: int) -> Callable:
    """Make `restore(mean, start_step) -> mean pseudo-gradient`, see `sync.averages`."""
    like = spec.outer_shapes[fragment_id]

    def restore(mean, start_step):
        key = None if start_step is None else sync_key(fragment_id, start_step)
        return spec.sync.message.average.after(mean, like, key)

    return restore


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

    `sent` is `Measured`, or the messages if there is no filter. Returns messages and
    weights to sum, and the verdicts of all regions, `{}` without a filter.
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
    """Return the mean of all regions' messages, and verdicts; see `filter_block`."""
    message, robust = spec.sync.message, spec.sync.robust
    if robust is None:
        return message.combine(sent, weights, rank), {}
    verdict, weights = robust.judge(sent.length, weights)
    found = without(sent.message, weights)
    return robust.combine(message, found, weights, rank), {VERDICT: verdict}
