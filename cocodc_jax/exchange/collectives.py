"""All-reduce and all-gather with the fewest possible network delays.

The backend's ring algorithms (gloo) pass 2 (M - 1) partial sums or M - 1 messages on,
one after the other, and each waits for the network's delay. Here an all-reduce takes
two delays: each shard sends every other its part of the vector, sums the parts that it
receives, and sends the sum to all. The bytes are the same, and all shards get the same
bits. An all-gather takes one delay: each shard sends its message to every other.

`direct_sum` and `direct_gather` run inside a `shard_map`; the other two run either
algorithm over the outer mesh.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.sharding.mesh import INSIDE
from cocodc_jax.sharding.outer_mesh import PROCESS

ALL_REDUCES = ("direct", "ring")


def direct_sum(x: jax.Array, axis_name: str, num: int) -> jax.Array:
    """Sum `x` `[n]` over the `num` shards of an axis."""
    parts = jnp.pad(x, (0, -len(x) % num)).reshape(num, -1)
    summed = jax.lax.all_to_all(parts, axis_name, 0, 0).sum(0)
    return direct_gather(summed, axis_name, num)[: len(x)]


def direct_gather(x: jax.Array, axis_name: str, num: int) -> jax.Array:
    """Gather the rows `x` `[r, ...]` of `num` shards of an axis, `[num * r, ...]`."""
    copies = jnp.broadcast_to(x, (num, *x.shape))
    found = jax.lax.all_to_all(copies, axis_name, 0, 0)
    return found.reshape(-1, *x.shape[1:])


def sum_over_processes(
    rows: jax.Array,
    weights: jax.Array,
    everywhere: Sharding,
    kind: str,
    in_shares: bool = False,
) -> jax.Array:
    """Sum `rows` `[R, n]` over all regions, `[n]`, replicated on all processes.

    Args:
      rows: on their regions' processes, columns sharded over those of a region.
      weights: `[R]`, of the rows' dtype.
      everywhere: sharding that replicates to every process's outer device.
      kind: one of `ALL_REDUCES`.
      in_shares: leave each process its columns: no communication inside regions.
    """
    if kind == "direct" and isinstance(everywhere, NamedSharding):
        num = everywhere.mesh.shape[PROCESS]

        def of_process(rows, weights):
            return direct_sum(jnp.tensordot(weights, rows, axes=1), PROCESS, num)

        # The type system cannot see that all processes compute equal values.
        total = jax.shard_map(
            of_process,
            mesh=cast(Mesh, everywhere.mesh),
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
        num = everywhere.mesh.shape[PROCESS]
        rows = jax.shard_map(
            lambda x: direct_gather(x, PROCESS, num),
            mesh=everywhere.mesh,
            in_specs=P(PROCESS, INSIDE),
            out_specs=P(None, INSIDE),
            check_vma=False,  # It cannot see that all have equal values.
        )(rows)
    return _gathered(rows, everywhere, in_shares)


def _gathered(x: jax.Array, everywhere: Sharding, in_shares: bool) -> jax.Array:
    # Two steps: the slow network carries each share once per region.
    if isinstance(everywhere, NamedSharding):
        shares = P(*(None,) * (x.ndim - 1), INSIDE)
        crossed = NamedSharding(everywhere.mesh, shares)
        x = jax.lax.with_sharding_constraint(x, crossed)
    return x if in_shares else jax.lax.with_sharding_constraint(x, everywhere)
