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
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.core.sync import Measured, encode
from cocodc_jax.exchange.base import SyncSpec
from cocodc_jax.sharding.mesh import REGION
from cocodc_jax.sharding.region_map import psum_over_regions, region_shard_map
from cocodc_jax.sync.averages import sync_key
from cocodc_jax.sync.needs import STAGED
from cocodc_jax.sync.robust import VERDICT, without
from cocodc_jax.sync.schedules.base import Event

PyTree = Any


def make_messages(spec: SyncSpec, fragment_id: int, rank: int) -> Callable:
    """Make the encoding of a fragment on a shard, for `region_shard_map`.

    Returns:
      `outgoing(params, stale_params, state, weights, keys, start_step) -> (staged,
      message, state)` over the regions of a shard. `staged` is the current fragment if
      a merge needs it, else None. `message` is the value to average (see
      `sync.averages`), encoded if the method compresses, and `Measured` for a robust
      mean. A region of weight 0 keeps its compressor's state. `start_step` is
      `start_step_of`'s.
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


def jit_messages(
    spec: SyncSpec,
    fragment_id: int,
    rank: int,
    kept: PyTree,
    pack: Callable,
    where: NamedSharding | None = None,
    sent_bytes: int = 0,
) -> Callable:
    """Make the program that encodes a fragment but does not send it.

    Args:
      spec: of the run.
      fragment_id: which fragment.
      rank: of the message, if the schedule sets one.
      kept: shapes of the compressors' state, `[R, ...]`.
      pack: `pack(messages, times) -> [R, n]`, a flat buffer.
      where: sharding of the buffer; None replicates it inside each region.
      sent_bytes: of one region's message.

    Returns:
      `encode(params, stale_params, state, weights, keys, start_step, times) ->
      (staged, buffer, state)`, compiled; otherwise as `make_messages`.
    """
    of_shard = make_messages(spec, fragment_id, rank)
    outgoing = region_shard_map(
        of_shard, spec.mesh, in_specs=in_specs(spec), out_specs=P(REGION)
    )

    def encode(params, stale_params, state, weights, keys, start_step, times):
        staged, out, state = outgoing(
            params, stale_params, state, weights, keys, start_step
        )
        return staged, pack(out, times), state

    shardings = spec.shardings
    staged = shardings.staged[fragment_id] if STAGED in spec.sync.copies else None
    kept = shardings.of_regions(fragment_id, kept)
    lying = where or shardings.region.key
    return spec.devices.jit(
        encode,
        f"send fragment {fragment_id}",
        sent_bytes,
        out_shardings=(staged, lying, kept),
    )


def in_specs(spec: SyncSpec) -> tuple:
    """Return the specs over the region axis of `make_messages`'s arguments."""
    stale = P(REGION) if spec.sync.schedule.is_by_region else P()
    return (P(REGION), stale, *(P(REGION),) * 3, P())


def start_step_of(spec: SyncSpec, event: Event) -> np.int32 | None:
    """Return the step that a sync's key derives from; None if no average draws."""
    draws = spec.sync.message.average.draws
    return np.int32(event.start_step) if draws else None


def make_restore(spec: SyncSpec, fragment_id: int) -> Callable:
    """Make `restore(mean, start_step) -> mean pseudo-gradient`, see `sync.averages`."""
    like = spec.outer_shapes[fragment_id]

    def restore(mean, start_step):
        key = None if start_step is None else sync_key(fragment_id, start_step)
        return spec.sync.message.average.after(mean, like, key)

    return restore


def sum_of_block(tree: PyTree, weights: jax.Array) -> PyTree:
    """Sum `[block, ...]` leaves that are at least float32, weighted."""
    return jax.tree.map(
        lambda x: jnp.tensordot(weights.astype(x.dtype), x, axes=1), tree
    )


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
