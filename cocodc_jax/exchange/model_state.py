"""Average the non-trained state of a model over regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.exchange.base import SyncSpec
from cocodc_jax.exchange.collectives import mean_for_all
from cocodc_jax.sharding.local_regions import LocalRegions, for_all_regions
from cocodc_jax.sharding.mesh import REGION, regional, wants_flat_buffer
from cocodc_jax.sharding.region_map import region_shard_map
from cocodc_jax.sync.model_state import is_float
from cocodc_jax.sync.robust import is_finite, without
from cocodc_jax.transforms.numerics import widen

PyTree = Any


def averaged(
    tree: PyTree,
    local: LocalRegions,
    all_reduce: str | None,
    counted: jax.Array | None = None,
) -> PyTree:
    """Replace floating-point leaves by their mean over regions, in `region_shard_map`.

    Args:
      tree: leaves `[block, ...]`.
      local: how a device computes its regions.
      all_reduce: see `collectives.mean_for_all`.
      counted: bool `[block]`, regions in the mean; None is all. If there are none, each
        region keeps its own.
    """
    leaves, treedef = jax.tree.flatten(tree)
    which = [i for i, leaf in enumerate(leaves) if is_float(leaf)]
    if not which:
        return tree
    own = [leaves[i] for i in which]
    if counted is None:
        new = for_all_regions(mean_for_all(own, all_reduce), local.size)
    else:
        new = _mean_of_counted(own, local, all_reduce, counted)
    for i, leaf in zip(which, new, strict=True):
        leaves[i] = leaf
    return treedef.unflatten(leaves)


def _mean_of_counted(
    own: list[jax.Array],
    local: LocalRegions,
    all_reduce: str | None,
    counted: jax.Array,
) -> list[jax.Array]:
    """Average as `averaged` does; the count is sent as one more number."""
    sent = [*without(own, counted), counted.astype(jnp.float32)]
    mean = for_all_regions(mean_for_all(sent, all_reduce), local.size)
    share = mean.pop()  # 1 if all count: exact.

    def of_counted(x: jax.Array, old: jax.Array) -> jax.Array:
        part = share.reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.where(part > 0, (widen(x) / part).astype(x.dtype), old)

    return list(map(of_counted, mean, own))


def make_average(spec: SyncSpec) -> Callable | None:
    """Make `average(model_state, params) -> (model_state, one)` of the regions.

    Returns:
      A function that donates its first argument, or None if there is nothing to
      average. `params` are the regions', to check for a robust mean, else None. `one`
      is an array that is ready when the mean is, and that is never donated.
    """
    state = spec.model_state
    if state is None or not state.averaged_bytes or spec.regions.num == 1:
        return None
    # Few bytes: use the algorithm with the fewest delays.
    kind = "direct" if wants_flat_buffer(spec.mesh) else None

    def average(tree: PyTree, params: PyTree) -> tuple[PyTree, jax.Array]:
        counted = None
        if spec.sync.robust:
            counted = jax.vmap(is_finite)((tree, params))
        new = averaged(tree, spec.local, kind, counted)
        first = next(filter(is_float, jax.tree.leaves(new)))
        return new, first.reshape(spec.local.size, -1)[:, 0]

    mapped = region_shard_map(
        average, spec.mesh, in_specs=P(REGION), out_specs=P(REGION)
    )
    return spec.devices.jit(
        mapped,
        "mean of model state",
        donate_argnums=0,
        out_shardings=regional(spec.mesh),
    )


def make_mean(mesh: jax.sharding.Mesh) -> Callable:
    """Make `mean(model_state) -> one region's`, replicated on the mesh.

    Floating-point leaves are averaged, in at least float32; of other leaves the first
    region's is taken.
    """

    def mean(x: jax.Array) -> jax.Array:
        if not is_float(x):
            return x[0]
        return widen(x).mean(0).astype(x.dtype)

    return jax.jit(
        lambda tree: jax.tree.map(mean, tree), out_shardings=NamedSharding(mesh, P())
    )
