"""What one region hears from another alone, inside `region_shard_map`.

With a region on each shard an exchange is one permutation of messages, and a region
hears from nobody but whom it is for. A device that holds several regions gathers all of
them: there is no network to spare then.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.core import reduce
from cocodc_jax.sharding.local_regions import LocalRegions
from cocodc_jax.sharding.mesh import REGION
from cocodc_jax.sharding.region_map import all_gather_regions

PyTree = Any


def from_neighbour(
    message: PyTree, by: int, num_regions: int, local: LocalRegions
) -> PyTree:
    """Fetch the message of the region `by` places on along the ring.

    Args:
      message: of the regions of the shard, leaves `[block, ...]`.
      by: 1 or -1.
      num_regions: M.
      local: the regions that a shard holds.
    """
    if local.size == 1:
        return reduce.from_neighbour(message, by, num_regions, REGION)
    first = jax.lax.axis_index(REGION) * local.size
    whose = (first + jnp.arange(local.size) + by) % num_regions
    return _of_regions(message, whose)


def from_partner(
    message: PyTree, matching: jax.Array, partners: np.ndarray, local: LocalRegions
) -> PyTree:
    """Fetch each region's partner's message.

    Args:
      message: of the regions of the shard, leaves `[block, ...]`.
      matching: int32 scalar, the row of `partners` to use.
      partners: int `[N, R]`, each region's partner in each matching.
      local: the regions that a shard holds.
    """
    if local.size == 1:
        return reduce.from_partner(message, matching, partners, REGION)
    first = jax.lax.axis_index(REGION) * local.size
    mine = jax.lax.dynamic_slice_in_dim(
        jnp.asarray(partners)[matching], first, local.size
    )
    return _of_regions(message, mine)


def _of_regions(message: PyTree, whose: jax.Array) -> PyTree:
    """Gather the messages of all regions, and take those of the regions `whose`."""
    return jax.tree.map(
        lambda x: jnp.take(x, whose, axis=0), all_gather_regions(message)
    )
