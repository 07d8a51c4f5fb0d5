"""An all-reduce and an all-gather with as few network delays as there can be.

The backend's own pass partial sums or messages on, 2 (M - 1) or M - 1 of them one after
the other, each of which waits for the network's delay (gloo's rings). Here, to sum,
each shard sends every other its part of the vector, sums the parts it gets, and sends
the sum to all: the same bytes with two delays, and every shard has the same sum to the
last bit. To gather, each sends its message to every other: the same bytes, one delay.
`direct_sum` and `direct_gather` are for inside a `shard_map`; the other two cross the
outer mesh, either way.
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
    """Gather the rows `x` `[r, ...]` of all `num` shards of an axis, `[num * r, ...]`.

    One shard's after the other's.
    """
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
    """Sum `rows` `[R, n]` over all regions, `[n]`, whole on all processes.

    Args:
      rows: with their regions' processes, columns over those of a region.
      weights: `[R]`, of the rows' dtype.
      everywhere: whole on every process's outer device.
      kind: one of `ALL_REDUCES`.
      in_shares: leave each process its columns, so that nothing crosses inside regions.
    """
    if kind == "direct" and isinstance(everywhere, NamedSharding):
        num = everywhere.mesh.shape[PROCESS]

        def of_process(rows, weights):
            return direct_sum(jnp.tensordot(weights, rows, axes=1), PROCESS, num)

        # What every process has is not seen to be the same: all make it alike.
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
    """Gather `rows` `[R, n]` whole to all processes; see `sum_over_processes`."""
    if kind == "direct" and isinstance(everywhere, NamedSharding):
        num = everywhere.mesh.shape[PROCESS]
        rows = jax.shard_map(
            lambda x: direct_gather(x, PROCESS, num),
            mesh=everywhere.mesh,
            in_specs=P(PROCESS, INSIDE),
            out_specs=P(None, INSIDE),
            check_vma=False,  # What every process has is not seen to be the same.
        )(rows)
    return _gathered(rows, everywhere, in_shares)


def _gathered(x: jax.Array, everywhere: Sharding, in_shares: bool) -> jax.Array:
    # In two steps, so that the slow network carries each share once a region.
    if isinstance(everywhere, NamedSharding):
        shares = P(*(None,) * (x.ndim - 1), INSIDE)
        crossed = NamedSharding(everywhere.mesh, shares)
        x = jax.lax.with_sharding_constraint(x, crossed)
    return x if in_shares else jax.lax.with_sharding_constraint(x, everywhere)
