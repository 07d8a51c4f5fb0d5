"""Programs over the shards of the mesh's region axis, and what crosses them.

A program is manual over the region axis alone. What it says to be the same on all
shards has to come out of a collective over them: `check_vma` sees to that.

With a single shard there is nothing to cross, and no collective may be left where the
inside of the region is divided: XLA, as JAX 0.10.2 has it, drops a manual axis of
length 1 from the shardings, takes an all-reduce over it for one in an automatic program
and refuses it ("hlo->sharding().IsManualSubgroup()"), and makes the operand of an
all-gather whole on every device first. So the functions here then hand on what they
are given; it stays typed as the shard's own, and `region_shard_map` takes it out of the
program as such.
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

    Args:
      fn: what each shard computes, of its own part of the arguments.
      mesh: the inner mesh.
      in_specs: as `jax.shard_map`'s.
      out_specs: likewise; a spec names the region axis or is `P()`, for what is the
        same on all shards.
    """

    def mapped(fn: Callable, out_specs: PyTree) -> Callable:
        return jax.shard_map(
            fn,
            mesh=mesh,
            axis_names={REGION},
            in_specs=in_specs,
            out_specs=out_specs,
        )

    if mesh.shape[REGION] > 1:
        return mapped(fn, out_specs)

    def for_shared(change: Callable, tree: PyTree) -> PyTree:
        """Apply `change` to the leaves that `out_specs` has as `P()`."""
        return jax.tree.map(
            lambda spec, part: part if spec != P() else jax.tree.map(change, part),
            out_specs,
            tree,
        )

    # Shared results leave with the one shard in front, and lose it outside.
    own_specs = for_shared(lambda _: P(REGION), out_specs)
    own = mapped(lambda *args: for_shared(lambda x: x[None], fn(*args)), own_specs)
    return lambda *args: for_shared(lambda x: x[0], own(*args))


def psum_over_regions(tree: PyTree) -> PyTree:
    """Sum leaves that each shard has over the shards, inside `region_shard_map`."""
    return jax.lax.psum(tree, REGION) if _are_several() else tree


def pmean_over_regions(tree: PyTree) -> PyTree:
    """Average leaves that each shard has over the shards, as `psum_over_regions`."""
    return jax.lax.pmean(tree, REGION) if _are_several() else tree


def as_varying(tree: PyTree) -> PyTree:
    """Type a sum or mean over the shards as each one's own, to go on with there."""
    return jax.lax.pcast(tree, REGION, to="varying") if _are_several() else tree


def all_gather_regions(tree: PyTree) -> PyTree:
    """Gather the `[block, ...]` leaves of all shards, `[R, ...]` on each."""
    if not _are_several():
        return tree
    return jax.tree.map(lambda x: jax.lax.all_gather(x, REGION, tiled=True), tree)


def _are_several() -> bool:
    return jax.lax.axis_size(REGION) > 1
