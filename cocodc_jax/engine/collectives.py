"""All-reduce and all-gather with the fewest possible network delays.

The backend's ring algorithms (gloo) pass 2 (M - 1) partial sums or M - 1 messages
around the ring, one after another, and each waits for the network's delay. Here an
all-reduce takes two delays: each shard sends every other its part of the vector, sums
the parts that it receives, and sends the sum to all. The bytes are the same, and all
shards get the same bits. An all-gather takes one delay: each shard sends its message to
every other.

`direct_sum` and `direct_gather` run inside a `shard_map`; `sum_over_processes` and
`gather_from_processes` run either algorithm over the outer mesh. `mean_for_all` and
`gather_all` are the collectives of every step: if regions are CPU processes, all leaves
cross as one flat buffer, otherwise the compiler chooses.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.engine import flat_buffer
from cocodc_jax.engine.mesh import INSIDE, PROCESS, REGION
from cocodc_jax.engine.region_map import (
    LocalRegions,
    all_gather_regions,
    as_varying,
    for_all_regions,
    pmean_over_regions,
)
from cocodc_jax.sync.model_state import is_float
from cocodc_jax.sync.robust import without
from cocodc_jax.transforms.numerics import cast_like, wide_dtype, widen

PyTree = Any
ALL_REDUCES = ("direct", "ring")


def direct_sum(x: jax.Array, axis_name: str) -> jax.Array:
    """Sum `x` `[n]` over the shards of an axis."""
    num = jax.lax.axis_size(axis_name)
    parts = jnp.pad(x, (0, -len(x) % num)).reshape(num, -1)
    summed = jax.lax.all_to_all(parts, axis_name, 0, 0).sum(0)
    return direct_gather(summed, axis_name)[: len(x)]


def direct_gather(x: jax.Array, axis_name: str) -> jax.Array:
    """Gather the rows `x` `[r, ...]` of D shards of an axis, `[D * r, ...]`."""
    copies = jnp.broadcast_to(x, (jax.lax.axis_size(axis_name), *x.shape))
    gathered = jax.lax.all_to_all(copies, axis_name, 0, 0)
    return gathered.reshape(-1, *x.shape[1:])


def sum_over_processes(
    rows: jax.Array,
    weights: jax.Array,
    everywhere: Sharding,
    kind: str,
    in_shares: bool = False,
) -> jax.Array:
    """Sum `rows` `[R, n]` over all regions, `[n]`, replicated on all processes.

    Rows are on their regions' processes, columns sharded over those of a region.
    `weights` `[R]` have the rows' dtype. `everywhere` replicates to every process's
    outer device; `in_shares` leaves each process its columns instead.
    """
    if kind == "direct" and isinstance(everywhere, NamedSharding):
        # The type system cannot see that all processes compute equal values.
        total = jax.shard_map(
            lambda x, weights: direct_sum(jnp.tensordot(weights, x, axes=1), PROCESS),
            mesh=everywhere.mesh,
            in_specs=(P(PROCESS, INSIDE), P(PROCESS)),
            out_specs=P(INSIDE),
            check_vma=False,
        )(rows, weights)
    else:
        total = jnp.tensordot(weights, rows, axes=1)
    return _gathered(total, everywhere, in_shares)


def gather_from_processes(
    rows: jax.Array, everywhere: Sharding, kind: str, in_shares: bool = False
) -> jax.Array:
    """Gather `rows` `[R, n]` in full on all processes; see `sum_over_processes`."""
    if kind == "direct" and isinstance(everywhere, NamedSharding):
        rows = jax.shard_map(
            lambda x: direct_gather(x, PROCESS),
            mesh=everywhere.mesh,
            in_specs=P(PROCESS, INSIDE),
            out_specs=P(None, INSIDE),
            check_vma=False,  # It cannot see that all have equal values.
        )(rows)
    return _gathered(rows, everywhere, in_shares)


def _gathered(x: jax.Array, everywhere: Sharding, in_shares: bool) -> jax.Array:
    if isinstance(everywhere, NamedSharding):
        # Two steps: the slow network carries each share once per region.
        leading = (None,) * (x.ndim - 1)
        shares = NamedSharding(everywhere.mesh, P(*leading, INSIDE))
        x = jax.lax.with_sharding_constraint(x, shares)
    if in_shares:
        return x
    return jax.lax.with_sharding_constraint(x, everywhere)


def mean_over_regions(tree: PyTree, in_flat_buffer: bool = False) -> PyTree:
    """Average a tree of `[block, ...]` leaves over all regions.

    Sums in at least float32: XLA's CPU backend aborts the process on a bfloat16
    all-reduce in a partly manual program. For `in_flat_buffer` see `wants_flat_buffer`.
    """
    return _reduced(tree, pmean_over_regions, in_flat_buffer)


def mean_for_all(message: PyTree, all_reduce: str | None) -> PyTree:
    """Average all regions' messages, leaves `[block, ...]`, on each shard.

    `all_reduce` is one of `ALL_REDUCES` if messages cross as a flat buffer; None lets
    the compiler choose.
    """
    if all_reduce != "direct":
        return as_varying(mean_over_regions(message, all_reduce is not None))

    num_shards = jax.lax.axis_size(REGION)
    mean = lambda x: direct_sum(x, REGION) / num_shards  # noqa: E731
    return _reduced(message, mean, in_flat_buffer=True)


def gather_all(message: PyTree, all_reduce: str | None) -> PyTree:
    """Gather all regions' messages, `[R, ...]`; arguments as for `mean_for_all`."""
    if all_reduce is None:
        return all_gather_regions(message)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), message)
    buffer = flat_buffer.pack(message)
    if all_reduce == "direct":
        rows = direct_gather(buffer, REGION)
    else:
        rows = all_gather_regions(buffer)
    return flat_buffer.unpack(rows, shapes)


def _reduced(tree: PyTree, mean: Callable, in_flat_buffer: bool) -> PyTree:
    """Apply `mean` to the blocks' means, keeping the dtypes of `tree`."""

    def of_block(x: jax.Array, *others: jax.Array) -> jax.Array:
        """Average over a block, in a dtype that is wide enough for the others too."""
        dtypes = [wide_dtype(y.dtype) for y in (x, *others)]
        return x.astype(jnp.result_type(*dtypes)).mean(0)

    if in_flat_buffer:
        leaves = jax.tree.leaves(tree)
        of_blocks = jax.tree.map(lambda x: of_block(x, *leaves), tree)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), of_blocks
        )
        buffer = flat_buffer.pack(jax.tree.map(lambda x: x[None], of_blocks))
        means = flat_buffer.unpack(mean(buffer[0]), shapes)
    else:
        means = jax.tree.map(lambda x: mean(of_block(x)), tree)
    return cast_like(means, tree)


def averaged(
    tree: PyTree,
    local: LocalRegions,
    all_reduce: str | None,
    counted: jax.Array | None = None,
) -> PyTree:
    """Replace floating-point leaves by their mean over regions, in `region_shard_map`.

    Leaves are `[block, ...]`. `counted`, bool `[block]`, are the regions in the mean,
    None for all; if there are none, each region keeps its own. For `all_reduce` see
    `mean_for_all`.
    """
    leaves, treedef = jax.tree.flatten(tree)
    averaged_ids = [i for i, leaf in enumerate(leaves) if is_float(leaf)]
    if not averaged_ids:
        return tree

    of_regions = [leaves[i] for i in averaged_ids]
    if counted is None:
        means = for_all_regions(mean_for_all(of_regions, all_reduce), local.size)
    else:
        # The count is sent as one more number.
        sent = [*without(of_regions, counted), counted.astype(jnp.float32)]
        *sums, share = for_all_regions(mean_for_all(sent, all_reduce), local.size)

        def of_counted(x: jax.Array, old: jax.Array) -> jax.Array:
            # The share is 1 if all regions count: exact.
            part = share.reshape(-1, *(1,) * (x.ndim - 1))
            return jnp.where(part > 0, (widen(x) / part).astype(x.dtype), old)

        means = [of_counted(x, old) for x, old in zip(sums, of_regions, strict=True)]

    for i, mean in zip(averaged_ids, means, strict=True):
        leaves[i] = mean
    return treedef.unflatten(leaves)
