"""Regions as the axis of a mapped program: of `jax.vmap`, or of a mesh.

In such code each instance of the program holds one region.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.core.sync import Left
from cocodc_jax.sync.axis import BY_RINGS, GATHERED

PyTree = Any


@dataclasses.dataclass(frozen=True)
class NamedAxis:
    """The axis of regions by its name, an `Axis` of `sync.axis`."""

    name: Any

    @property
    def num_regions(self) -> int:
        """Number of all regions, M."""
        return jax.lax.axis_size(self.name)

    def map(self, fn: Callable, in_axes: Any = 0) -> Callable:
        """Return `fn` itself: one region is held."""
        return fn

    def first(self, tree: PyTree) -> PyTree:
        """Return the region's own values."""
        return tree

    def weighed(self, tree: PyTree, weights: jax.Array) -> PyTree:
        """Return the region's values times its weight, a scalar."""
        return jax.tree.map(lambda x: x * weights.astype(x.dtype), tree)

    def sum(self, tree: PyTree, weights: jax.Array) -> PyTree:
        """Return the weighted sum over all regions."""
        return jax.lax.psum(self.weighed(tree, weights), self.name)

    def of_all(self, x: jax.Array) -> jax.Array:
        """Gather a scalar of every region, `[M]`."""
        return jax.lax.all_gather(x, self.name)

    def held(self, x: jax.Array) -> jax.Array:
        """Select the region's own entry of `[M]`."""
        return x[jax.lax.axis_index(self.name)]

    def neighbour(self, tree: PyTree, by: int) -> PyTree:
        """Fetch from a neighbour on the ring, see `Axis`: one permutation."""
        num = self.num_regions
        perm = [(m, (m - by) % num) for m in range(num)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.name, perm), tree)

    def partner(self, tree: PyTree, row: jax.Array, partners: np.ndarray) -> PyTree:
        """Fetch from the partner, see `Axis`: one permutation."""
        permute = functools.partial(jax.lax.ppermute, axis_name=self.name)
        permutations = [tuple(enumerate(row)) for row in partners.tolist()]
        branches = [functools.partial(permute, perm=perm) for perm in permutations]
        return jax.lax.switch(row, branches, tree)

    def cross(self, sender: Any, left: Left, weights: np.ndarray | None = None) -> Left:
        """Let what left cross regions.

        Args:
          sender: a `Message` or a `RegionalOuter`, whose `way` says how.
          left: of this region.
          weights: `[M]`, of the regions in a mean, known in all of them.
        """
        if sender.way == GATHERED:
            gathered = jax.lax.all_gather(left.sent, self.name)
            known_weights = () if weights is None else jnp.asarray(weights, float)
            return left._replace(sent=gathered, weights=known_weights)

        if sender.way == BY_RINGS:
            total = sender.ring_sum(left.sent, self.name)
            return left._replace(sent=same_in_all(total, self.name))

        return left


def same_in_all(tree: PyTree, axis_name: Any) -> PyTree:
    """Drop the region axis of values that are equal in all regions, under `jax.vmap`.

    A loop bound or predicate must not be batched over regions: the loop would run for
    all of them and select. Elsewhere this is the identity. It never communicates.
    """
    return _of_first(jax.lax.axis_index(axis_name), tree)


@jax.custom_batching.custom_vmap
def _of_first(index: jax.Array, tree: PyTree) -> PyTree:
    return tree  # The index exists only to be batched.


@_of_first.def_vmap
def _(size: int, is_batched: tuple, index: jax.Array, tree: PyTree):
    index_is_batched, is_batched_tree = is_batched
    if not index_is_batched:  # Another `vmap`'s axis.
        return _of_first(index, tree), is_batched_tree

    first = jax.tree.map(
        lambda x, batched: x[0] if batched else x, tree, is_batched_tree
    )
    return first, jax.tree.map(lambda _: False, is_batched_tree)
