"""How code of one region reaches the others: the protocol `Axis`.

What crosses regions is written once, in terms of an axis, and runs in two places:

- in an Optax transform under `jax.vmap` or `jax.shard_map`. The code holds one region,
  and its arrays have no axis of regions (`core.axis.NamedAxis`);
- in a program of the engine. A device holds a block of regions, and arrays are
  `[block, ...]` (`engine.region_map.LocalRegions`).

A `vmap` axis inside of a `shard_map` axis cannot be reduced over together with it. So
code maps over the block itself (`Axis.map`), and asks the axis for what crosses.

A message crosses in one of three ways. They say what remains to be done between regions
after the code that holds some of them has run:

    SUMMED     nothing: sums were made on the way
    GATHERED   each region needs the messages of all others, `[M, ...]`
    BY_RINGS   the blocks' sums are summed by rings, see `sync.summed`
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

PyTree = Any

SUMMED = "summed"
GATHERED = "gathered"
BY_RINGS = "by_rings"


class Axis(Protocol):
    """The regions that a program holds, and how it reaches the others."""

    @property
    def num_regions(self) -> int:
        """Number of all regions, M."""
        ...

    def map(self, fn: Callable, in_axes: Any = 0) -> Callable:
        """Map a function of one region over the regions that are held.

        `in_axes` is 0 (of each region) or None (shared) for each argument, or one for
        all.
        """
        ...

    def first(self, tree: PyTree) -> PyTree:
        """Return one region's values; they are equal in all regions."""
        ...

    def weighed(self, tree: PyTree, weights: jax.Array) -> PyTree:
        """Return the weighted sum over the regions that are held, at least float32."""
        ...

    def sum(self, tree: PyTree, weights: jax.Array) -> PyTree:
        """Return the weighted sum over all regions: a collective."""
        ...

    def of_all(self, x: jax.Array) -> jax.Array:
        """Return a number of each region, `[M]`, in all of them."""
        ...

    def held(self, x: jax.Array) -> jax.Array:
        """Select the regions that are held from `[M]`."""
        ...

    def neighbour(self, tree: PyTree, by: int) -> PyTree:
        """Fetch what the region `by` positions ahead on the ring has; `by` is 1 or -1.

        Regions are on the ring in the order of their indices.
        """
        ...

    def partner(self, tree: PyTree, row: jax.Array, partners: np.ndarray) -> PyTree:
        """Fetch what each region's partner has.

        Args:
          tree: of the regions that are held.
          row: int32 scalar, equal in all regions.
          partners: int `[N, M]`; a row has each region's partner.
        """
        ...
