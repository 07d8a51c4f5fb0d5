"""A sum over the region axis by several rings at once, see `core.reduce.ring_sum`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cocodc_jax.core.reduce import ring_sum
from cocodc_jax.sharding.mesh import REGION
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

    def of_shard(tree):
        return ring_sum(jax.tree.map(lambda x: x[0], tree), rings, REGION)

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
