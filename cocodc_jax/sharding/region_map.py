"""Programs over the shards of the mesh's region axis, and their collectives.

A program is manual over the region axis only. A value declared to be replicated must
come out of a collective: `check_vma` checks it.

With a single shard no collective may remain if a region has several devices. XLA (with
JAX 0.10.2) drops a manual axis of length 1 from the shardings, then treats an
all-reduce over it as automatic and fails ("hlo->sharding().IsManualSubgroup()"), and
replicates the operand of an all-gather on every device first. So with one shard these
functions return their arguments, which stay typed as varying, and `region_shard_map`
returns them as such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cocodc_jax.sharding.mesh import REGION

PyTree = Any


def region_shard_map(
    fn: Callable, mesh: Mesh, *, in_specs: PyTree, out_specs: PyTree
) -> Callable:
    """Map `fn` over the shards of the region axis, of any length.

    As `jax.shard_map`; each of `out_specs` names the region axis, or is `P()` for a
    value that is replicated over shards.
    """

    def mapped(fn: Callable, out_specs: PyTree) -> Callable:
        specs = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.shard_map(fn, mesh=mesh, axis_names={REGION}, **specs)

    if mesh.shape[REGION] > 1:
        return mapped(fn, out_specs)

    def for_shared(change: Callable, tree: PyTree) -> PyTree:
        """Apply `change` to the leaves that `out_specs` has as `P()`."""
        return jax.tree.map(
            lambda spec, part: part if spec != P() else jax.tree.map(change, part),
            out_specs,
            tree,
        )

    # Replicated results get an axis of one shard, which is dropped outside.
    own_specs = for_shared(lambda _: P(REGION), out_specs)
    own = mapped(lambda *args: for_shared(lambda x: x[None], fn(*args)), own_specs)
    return lambda *args: for_shared(lambda x: x[0], own(*args))


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


def _are_several() -> bool:
    return jax.lax.axis_size(REGION) > 1
