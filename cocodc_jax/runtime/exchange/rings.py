"""A sum over the region axis by several rings at once, each with its own share.

The numbers are laid end to end and dealt to the rings, and each share is cut into a
chunk for every shard. With q a shard's position on a ring of D shards, at every step
k = 0 .. D - 2 it passes one chunk on to its next:

    summing     chunk q - k, to which the next adds its own; in the end shard q has the
                whole sum of chunk q + 1
    gathering   chunk q + 1 - k, which the next keeps

so each shard sends 2 (D - 1) / D of the numbers. Each chunk is summed once, and copied:
all shards end with the same bits. Orders of the rings: `sync/rings.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cocodc_jax.runtime.devices.mesh import REGION
from cocodc_jax.sync.rings import ByRings

PyTree = Any


def make_ring_sum(mesh: Mesh, rings: ByRings) -> Callable[[PyTree], PyTree]:
    """Make the sum over the shards of the region axis.

    Args:
      mesh: the inner mesh.
      rings: how many, and their orders.

    Returns:
      `ring_sum(tree)`: leaves `[D, ...]`, one entry a shard, to their sums `[...]`.
    """
    num_shards = mesh.shape[REGION]
    strides = rings.strides(num_shards)

    def of_shard(tree):
        flat, restore = ravel_pytree(jax.tree.map(lambda x: x[0], tree))
        chunk = rings.chunk_size(flat.size, num_shards)
        shape = (rings.num, num_shards, chunk)
        padded = jnp.pad(flat, (0, rings.num * num_shards * chunk - flat.size))
        shares = tuple(padded.reshape(shape))
        shares = _ring_sums(shares, strides, num_shards)
        return restore(jnp.stack(shares).ravel()[: flat.size])

    # Every shard has copies of the same sums, but a permutation's result is typed as
    # varying and nothing can say otherwise: so no check here, in a program with
    # nothing else in it. A test compares the shards bit for bit.
    return jax.shard_map(
        of_shard,
        mesh=mesh,
        axis_names={REGION},
        in_specs=P(REGION),
        out_specs=P(),
        check_vma=False,
    )


def _ring_sums(shares, strides, num_shards):
    """Sum `[D, chunk]` shares over the shards, all rings at every step."""
    shard = jax.lax.axis_index(REGION)
    each = range(num_shards)
    perms = [[(p, (p + s) % num_shards) for p in each] for s in strides]
    # Position q is shard q s, so a shard's position is it times s inverted.
    positions = [
        shard * (pow(s, -1, num_shards) if num_shards > 1 else 0) for s in strides
    ]

    def pass_on(share, perm, sent):
        return jax.lax.ppermute(share[sent % num_shards], REGION, perm)

    def add(k, shares):
        out = []
        for share, perm, q in zip(shares, perms, positions, strict=True):
            got = pass_on(share, perm, q - k)
            out.append(share.at[(q - k - 1) % num_shards].add(got))
        return tuple(out)

    def keep(k, shares):
        out = []
        for share, perm, q in zip(shares, perms, positions, strict=True):
            got = pass_on(share, perm, q + 1 - k)
            out.append(share.at[(q - k) % num_shards].set(got))
        return tuple(out)

    shares = jax.lax.fori_loop(0, num_shards - 1, add, shares)
    return jax.lax.fori_loop(0, num_shards - 1, keep, shares)
