"""The regions that one device holds, and how a function of one is mapped over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cocodc_jax.runtime.devices.mesh import REGION

PyTree = Any


@dataclasses.dataclass(frozen=True)
class LocalRegions:
    """The regions that one shard of the mesh's region axis holds.

    Attributes:
      size: how many.
      one_by_one: map over them in turn (`lax.map`), not all at once (`vmap`): on a
        CPU a batch of matrix products is slower than as many plain ones.
      in_batches_of_one: have `map_products` map over batches of one region each.
    """

    size: int
    one_by_one: bool
    in_batches_of_one: bool = False

    @classmethod
    def of(cls, mesh: Mesh, num_regions: int) -> LocalRegions:
        """Tell how `num_regions` regions lie on `mesh`."""
        is_cpu = mesh.devices.flat[0].platform == "cpu"
        # Inside a region of several devices the compiler lays out its products.
        is_whole = mesh.size == mesh.shape[REGION]
        return cls(num_regions // mesh.shape[REGION], is_cpu, is_cpu and is_whole)

    def map(self, fn: Callable, in_axes: Any = 0) -> Callable:
        """Map `fn`, written for one region, over the block; one path for all sizes.

        Args:
          fn: function of one region's values.
          in_axes: 0 (mapped) or None (shared) for each argument, or one for all.
        """

        def mapped(*args):
            axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
            is_shared = [axis is None for axis in axes]
            each = tuple(
                None if shared else arg
                for arg, shared in zip(args, is_shared, strict=True)
            )

            def one(each):
                return fn(
                    *(
                        arg if shared else x
                        for arg, x, shared in zip(args, each, is_shared, strict=True)
                    )
                )

            if self.size == 1:
                out = one(jax.tree.map(lambda x: x[0], each))
                return jax.tree.map(lambda x: x[None], out)
            return jax.lax.map(one, each) if self.one_by_one else jax.vmap(one)(each)

        return mapped

    def map_products(self, fn: Callable) -> Callable:
        """Map a gradient, whose matrix products are most of a step.

        As `map` does, but on a CPU over batches of one region. XLA moves the operands
        of a batched product to where they are read in order. Of plain ones it leaves
        those of the backward pass transposed as they are, and its CPU kernels then take
        longer: a tenth of a small transformer's step.
        """
        if not self.in_batches_of_one:
            return self.map(fn)
        if self.size == 1:
            return jax.vmap(fn)
        return lambda *args: jax.lax.map(lambda each: fn(*each), args, batch_size=1)


def for_all_regions(tree: PyTree, num_regions: int) -> PyTree:
    """Give every region the same: leaves `[R, ...]`."""
    return jax.tree.map(
        lambda x: jnp.broadcast_to(x[None], (num_regions, *x.shape)), tree
    )


def where_participating(participating: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Take `new` for the regions that participate, bool `[R]`, `old` for the others."""

    def choose(x, y):
        return jnp.where(participating.reshape(-1, *(1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(choose, new, old)
