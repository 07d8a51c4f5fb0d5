"""Regions on one device and over the mesh: how a function of one region is mapped.

`LocalRegions` is the block of regions of a device, and how it reaches the others (an
`Axis` of `sync.axis`); `region_shard_map` maps over the shards of the mesh's region
axis. A program is manual over that axis only. A value declared to be
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
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.core.axis import NamedAxis
from cocodc_jax.engine.mesh import REGION, is_cpu
from cocodc_jax.transforms.numerics import check_choice

PyTree = Any

HOW_MAPPED = ("auto", "batched", "in_turn")

# Largest model, in parameters, whose regions a CPU computes as one batch.
_MAX_BATCHED_PARAMS = 2_000_000


@dataclasses.dataclass(frozen=True)
class LocalRegions:
    """The regions in one shard of the mesh's region axis."""

    size: int  # Number of regions.
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
        each region is on one device and its model is small. In turn, small programs
        slice each array of a region out of the regions' arrays and put it back. In a
        batch, steps of four regions on one core took 0.67 of that time at 50,000
        parameters, and 0.87 at 840,000.
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

        def mapped(*args: Any) -> Any:
            axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
            of_regions = {i: args[i] for i, axis in enumerate(axes) if axis is not None}

            def of_region(own_args: dict[int, Any]) -> Any:
                return fn(*(own_args.get(i, arg) for i, arg in enumerate(args)))

            if self.size == 1:
                out = of_region(jax.tree.map(lambda x: x[0], of_regions))
                return jax.tree.map(lambda x: x[None], out)
            if self.one_by_one:
                return jax.lax.map(of_region, of_regions)
            return jax.vmap(of_region)(of_regions)

        return mapped

    @property
    def num_regions(self) -> int:
        """Number of all regions, M, inside `region_shard_map`."""
        return self.size * jax.lax.axis_size(REGION)

    def first(self, tree: PyTree) -> PyTree:
        """Return the first region's values; they are equal in all regions."""
        return jax.tree.map(lambda x: x[0], tree)

    def weighed(self, tree: PyTree, weights: jax.Array) -> PyTree:
        """Return the shard's sum of `[block, ...]` leaves with weights `[block]`."""
        return jax.tree.map(lambda x: x[None], sum_of_block(tree, weights))

    def sum(self, tree: PyTree, weights: jax.Array) -> PyTree:
        """Return the weighted sum over all regions."""
        return psum_over_regions(sum_of_block(tree, weights))

    def of_all(self, x: jax.Array) -> jax.Array:
        """Gather numbers `[block]` of all regions, `[M]`, replicated."""
        zeros = jnp.zeros(self.num_regions, x.dtype)
        block = jax.lax.dynamic_update_slice_in_dim(zeros, x, self._first(), 0)
        return psum_over_regions(block)

    def held(self, x: jax.Array) -> jax.Array:
        """Select the block of `[M]`."""
        return jax.lax.dynamic_slice_in_dim(x, self._first(), self.size)

    def neighbour(self, tree: PyTree, by: int) -> PyTree:
        """Fetch from the neighbours on the ring, see `Axis`.

        One permutation; a device with several regions gathers all, as no network is
        spared.
        """
        if self.size == 1:
            return NamedAxis(REGION).neighbour(tree, by)
        senders = (self._first() + jnp.arange(self.size) + by) % self.num_regions
        return self._of(tree, senders)

    def partner(self, tree: PyTree, row: jax.Array, partners: np.ndarray) -> PyTree:
        """Fetch from the partners, see `Axis`; as `neighbour`."""
        if self.size == 1:
            return NamedAxis(REGION).partner(tree, row, partners)
        return self._of(tree, self.held(jnp.asarray(partners)[row]))

    def _first(self) -> jax.Array:
        """Return the index of the block's first region."""
        return jax.lax.axis_index(REGION) * self.size

    def _of(self, tree: PyTree, senders: jax.Array) -> PyTree:
        """Gather the messages of all regions, and select those of some."""
        gathered = all_gather_regions(tree)
        return jax.tree.map(lambda x: jnp.take(x, senders, axis=0), gathered)


def for_all_regions(tree: PyTree, num_regions: int) -> PyTree:
    """Broadcast values to all regions: leaves `[R, ...]`."""
    return jax.tree.map(
        lambda x: jnp.broadcast_to(x[None], (num_regions, *x.shape)), tree
    )


def where_participating(participating: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Select `new` for the regions that participate, bool `[R]`, else `old`."""

    def choose(new_leaf: jax.Array, old_leaf: jax.Array) -> jax.Array:
        mask = participating.reshape(-1, *(1,) * (new_leaf.ndim - 1))
        return jnp.where(mask, new_leaf, old_leaf)

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
    shard_specs = for_shared(lambda _: P(REGION), out_specs)
    with_shard_axis = mapped(
        lambda *args: for_shared(lambda x: x[None], fn(*args)), out_specs=shard_specs
    )
    return lambda *args: for_shared(lambda x: x[0], with_shard_axis(*args))


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
