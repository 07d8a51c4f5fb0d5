"""Metrics of the regions: means, drift, finiteness."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.exchange.model_state import make_mean
from cocodc_jax.exchange.per_step import mean_over_regions
from cocodc_jax.program import inner_step as step
from cocodc_jax.program import merge
from cocodc_jax.sharding.mesh import REGION, wants_flat_buffer
from cocodc_jax.sharding.region_map import region_shard_map

PyTree = Any


class RegionMetrics:
    """Compiled programs that read a `RegionState`.

    Attributes:
      mean: `mean(params) -> one region's`, their mean.
      mean_state: `mean_state(model_state) -> one region's`, see `make_mean`.
      are_finite: `are_finite(params) -> bool [R]`.
      drift: `drift(params) -> float32`, see `merge.region_drift`.
      are_equal: `are_equal(params, others) -> bool`, of one region's each.
      first: `first(outputs, num_steps)`, of leaves `[room, R]`.
    """

    def __init__(self, mesh: Mesh):
        """Compile nothing."""
        mean = functools.partial(
            mean_over_regions, in_flat_buffer=wants_flat_buffer(mesh)
        )
        self.mean = jax.jit(
            region_shard_map(mean, mesh, in_specs=P(REGION), out_specs=P())
        )
        self.mean_state = make_mean(mesh)
        # Small: replicated to every process.
        everywhere = NamedSharding(mesh, P())
        self.are_finite = jax.jit(step.are_finite, out_shardings=everywhere)
        self.drift = jax.jit(merge.region_drift, out_shardings=everywhere)
        self.are_equal = jax.jit(_are_equal, out_shardings=everywhere)
        self.first = jax.jit(
            lambda outputs, num_steps: jax.tree.map(lambda x: x[:num_steps], outputs),
            static_argnums=1,
            out_shardings=NamedSharding(mesh, P(None, REGION)),
        )


def _are_equal(params: PyTree, others: PyTree) -> jax.Array:
    pairs = [*zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True)]
    if any(a.dtype != b.dtype for a, b in pairs):
        return jnp.zeros((), bool)
    return jnp.stack([(a == b).all() for a, b in pairs]).all()
