"""The regions on one device, and how a function of one region is mapped over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cocodc_jax.sharding.mesh import REGION, is_cpu

PyTree = Any

HOW_MAPPED = ("auto", "batched", "in_turn")

# Largest model, in parameters, whose regions a CPU computes as one batch.
_MAX_BATCHED_PARAMS = 2_000_000


@dataclasses.dataclass(frozen=True)
class LocalRegions:
    """The regions in one shard of the mesh's region axis.

    Attributes:
      size: how many.
      one_by_one: map over them in turn (`lax.map`), not all at once (`vmap`).
      in_batches_of_one: have `map_products` map over batches of one region each.
    """

    size: int
    one_by_one: bool
    in_batches_of_one: bool = False

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        num_regions: int,
        how: str = "auto",
        num_params: int | None = None,
    ) -> LocalRegions:
        """Return how `num_regions` regions are placed on `mesh` and mapped over.

        In turn, every step slices each array of a region out of those of all and puts
        it back, by a small program each; but only one region's activations exist at a
        time. In a batch there are fewer and larger kernels. On one core, steps of four
        regions took 0.75 to 0.98 of the time in a batch at 50,000 parameters, and 0.87
        at 840,000.

        Args:
          mesh: the inner mesh.
          num_regions: M.
          how: "batched", all at once; "in_turn"; or "auto": batched on accelerators,
            and on a CPU if each region is on one device and its model is small.
          num_params: of one region; None is many.
        """
        check_how(how)
        # With several devices per region the compiler lays out matrix products.
        is_whole = mesh.size == mesh.shape[REGION]
        is_small = num_params is not None and num_params <= _MAX_BATCHED_PARAMS
        one_by_one = how == "in_turn"
        if how == "auto":
            one_by_one = is_cpu(mesh) and not (is_whole and is_small)
        size = num_regions // mesh.shape[REGION]
        in_batches_of_one = is_cpu(mesh) and is_whole and (one_by_one or size == 1)
        return cls(size, one_by_one, in_batches_of_one)

    def map(self, fn: Callable, in_axes: Any = 0) -> Callable:
        """Map `fn`, written for one region, over the block; one path for all sizes.

        `in_axes` is 0 (mapped) or None (shared) for each argument, or one for all.
        """

        def mapped(*args):
            axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
            mapped = [i for i, axis in enumerate(axes) if axis is not None]
            each = [args[i] for i in mapped]

            def one(each):
                own = dict(zip(mapped, each, strict=True))
                return fn(*(own.get(i, arg) for i, arg in enumerate(args)))

            if self.size == 1:
                out = one(jax.tree.map(lambda x: x[0], each))
                return jax.tree.map(lambda x: x[None], out)
            return jax.lax.map(one, each) if self.one_by_one else jax.vmap(one)(each)

        return mapped

    def map_products(self, fn: Callable) -> Callable:
        """Map a gradient, whose matrix products dominate a step.

        Like `map`, but on a CPU over batches of one region. XLA transposes the operands
        of a batched product so that they are read in order. It leaves operands of plain
        products in the backward pass transposed, which its CPU kernels read more
        slowly: a tenth of a small transformer's step.
        """
        if not self.in_batches_of_one:
            return self.map(fn)
        if self.size == 1:
            return jax.vmap(fn)
        return lambda *args: jax.lax.map(lambda each: fn(*each), args, batch_size=1)


def check_how(how: str) -> None:
    """Refuse a value that is not in `HOW_MAPPED`."""
    if how not in HOW_MAPPED:
        raise ValueError(f"local_regions={how!r} is unknown; use one of {HOW_MAPPED}")


def for_all_regions(tree: PyTree, num_regions: int) -> PyTree:
    """Broadcast values to all regions: leaves `[R, ...]`."""
    return jax.tree.map(
        lambda x: jnp.broadcast_to(x[None], (num_regions, *x.shape)), tree
    )


def where_participating(participating: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Select `new` for the regions that participate, bool `[R]`, else `old`."""

    def choose(x, y):
        return jnp.where(participating.reshape(-1, *(1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(choose, new, old)
