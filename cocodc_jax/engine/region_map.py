"""Regions on one device and over the mesh: how a function of one region is mapped.

`LocalRegions` maps over the regions of a device, `region_shard_map` over the shards of
the mesh's region axis. A program is manual over that axis only. A value declared to be
replicated must come out of a collective: `check_vma` checks it.

With a single shard no collective may remain if a region has several devices. XLA (with
JAX 0.10.2) drops a manual axis of length 1 from the shardings, then treats an
all-reduce over it as automatic and fails ("hlo->sharding().IsManualSubgroup()"), and
replicates the operand of an all-gather on every device first. So with one shard the
collectives return their arguments, which stay typed as varying, and `region_shard_map`
returns them as such.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.engine.mesh import REGION, is_cpu
from cocodc_jax.transforms.numerics import check_choice

PyTree = Any

HOW_MAPPED = ("auto", "batched", "in_turn")

# Largest model, in parameters, whose regions a CPU computes as one batch.
_MAX_BATCHED_PARAMS = 2_000_000


@dataclasses.dataclass(frozen=True)
class LocalRegions:
    """The regions in one shard of the mesh's region axis."""

    size: int  # How many.
    one_by_one: bool  # Map over them in turn (`lax.map`), not all at once (`vmap`).

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        num_regions: int,
        how: str = "auto",
        num_params: int | None = None,
    ) -> LocalRegions:
        """Return how `num_regions` regions are placed on `mesh` and mapped over.

        `how` is "batched", all at once; "in_turn", so that only one region's
        activations exist at a time; or "auto": batched on accelerators, and on a CPU if
        each region is on one device and its model is small. On one core, steps of four
        regions took 0.67 of the time in a batch at 50,000 parameters, and 0.87 at
        840,000: in turn, each array of a region is sliced out of those of all and put
        back, by a small program each.
        """
        check_choice("local_regions", how, HOW_MAPPED)
        # With several devices per region the compiler lays out matrix products.
        is_whole = mesh.size == mesh.shape[REGION]
        is_small = num_params is not None and num_params <= _MAX_BATCHED_PARAMS
        one_by_one = how == "in_turn"
        if how == "auto":
            one_by_one = is_cpu(mesh) and not (is_whole and is_small)
        return cls(num_regions // mesh.shape[REGION], one_by_one)

    def map(self, fn: Callable, in_axes: Any = 0) -> Callable:
        """Map `fn`, written for one region, over the block; one path for all sizes.

        `in_axes` is 0 (mapped) or None (shared) for each argument, or one for all.
        """

        def mapped(*args):
            axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
            each = {i: args[i] for i, axis in enumerate(axes) if axis is not None}

            def one(own):
                return fn(*(own.get(i, arg) for i, arg in enumerate(args)))

            if self.size == 1:
                out = one(jax.tree.map(lambda x: x[0], each))
                return jax.tree.map(lambda x: x[None], out)
            return jax.lax.map(one, each) if self.one_by_one else jax.vmap(one)(each)

        return mapped


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


def region_shard_map(
    fn: Callable, mesh: Mesh, *, in_specs: PyTree, out_specs: PyTree
) -> Callable:
    """Map `fn` over the shards of the region axis, of any length.

    As `jax.shard_map`; each of `out_specs` names the region axis, or is `P()` for a
    value that is replicated over shards.
    """
    mapped = functools.partial(
        jax.shard_map, mesh=mesh, axis_names={REGION}, in_specs=in_specs
    )
    if mesh.shape[REGION] > 1:
        return mapped(fn, out_specs=out_specs)

    def for_shared(change: Callable, tree: PyTree) -> PyTree:
        """Apply `change` to the leaves that `out_specs` has as `P()`."""
        return jax.tree.map(
            lambda spec, part: part if spec != P() else jax.tree.map(change, part),
            out_specs,
            tree,
        )

    # Replicated results get an axis of one shard, which is dropped outside.
    own_specs = for_shared(lambda _: P(REGION), out_specs)
    own = mapped(
        lambda *args: for_shared(lambda x: x[None], fn(*args)), out_specs=own_specs
    )
    return lambda *args: for_shared(lambda x: x[0], own(*args))


def sum_of_block(tree: PyTree, weights: jax.Array) -> PyTree:
    """Sum `[block, ...]` leaves that are at least float32, weighted."""
    return jax.tree.map(
        lambda x: jnp.tensordot(weights.astype(x.dtype), x, axes=1), tree
    )


def psum_over_regions(tree: PyTree) -> PyTree:
    """Sum leaves over the shards, inside `region_shard_map`."""
    return jax.lax.psum(tree, REGION) if _are_several() else tree


def pmean_over_regions(tree: PyTree) -> PyTree:
    """Average leaves over the shards, inside `region_shard_map`."""
    return jax.lax.pmean(tree, REGION) if _are_several() else tree


def as_varying(tree: PyTree) -> PyTree:
    """Cast a sum or mean over the shards to varying."""
    return jax.lax.pcast(tree, REGION, to="varying") if _are_several() else tree


def all_gather_regions(tree: PyTree) -> PyTree:
    """Gather the `[block, ...]` leaves of all shards, `[R, ...]` on each."""
    if not _are_several():
        return tree
    return jax.tree.map(lambda x: jax.lax.all_gather(x, REGION, tiled=True), tree)


def everywhere(mesh: Mesh, tree: PyTree) -> PyTree:
    """Replicate arrays on every device of the mesh: an all-gather of regional ones."""
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, P()))


def _are_several() -> bool:
    return jax.lax.axis_size(REGION) > 1
