"""Make the regions' initial state, and read metrics of any state of theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.core.state import RegionState
from cocodc_jax.exchange.collectives import mean_over_regions
from cocodc_jax.exchange.model_state import make_mean
from cocodc_jax.exchange.programs import Devices
from cocodc_jax.program import checks, merge
from cocodc_jax.program import inner_step as step
from cocodc_jax.sharding.local_regions import for_all_regions
from cocodc_jax.sharding.mesh import REGION, regional, wants_flat_buffer
from cocodc_jax.sharding.region_map import region_shard_map
from cocodc_jax.sharding.shardings import Shardings, with_shardings
from cocodc_jax.sync.model_state import ModelState
from cocodc_jax.sync.per_step import PerStep

PyTree = Any


class InitState:
    """Makes the state of all regions of a program, equal except for their keys.

    Attributes:
      lies: a `RegionState` of shardings.
      make: compiled `make(params, key_data) -> RegionState`; arguments on the mesh.
      shapes: of its arguments.
    """

    def __init__(
        self,
        params: PyTree,
        optimizer: optax.GradientTransformation,
        shardings: Shardings,
        num_regions: int,
        own_keys: Callable[[jax.Array], jax.Array],
        of_all: int,
        per_step: PerStep | None,
        model_state: ModelState | None,
        devices: Devices,
    ):
        """Compile nothing."""
        self._optimizer, self._per_step = optimizer, per_step
        self._model_state = () if model_state is None else model_state.init
        self._num_regions, self._own_keys, self._of_all = num_regions, own_keys, of_all
        # Compiled programs wrap keys by the implementation that is the default now.
        self._key_impl = str(cast(Any, jax.config).jax_default_prng_impl)
        key_data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        self.shapes = params, key_data
        state = jax.eval_shape(self._make, *self.shapes)
        # Per-step exchange state is replicated on a region's devices.
        kept, of_model = jax.tree.map(
            lambda _: regional(shardings.mesh), (state.per_step, state.model_state)
        )
        self.lies = shardings.region._replace(per_step=kept, model_state=of_model)
        self.make = devices.jit(self._make, "first state", out_shardings=self.lies)

    def key_data(self, key: jax.Array) -> jax.Array:
        """Return a key's data, as `make` takes it.

        Raises:
          ValueError: if `key` is of another implementation than the program's.
        """
        checks.check_key(key, self._key_impl)
        return jax.random.key_data(key)

    def abstract(self) -> RegionState:
        """Return shapes, dtypes and shardings of the state."""
        return with_shardings(jax.eval_shape(self._make, *self.shapes), self.lies)

    def _make(self, params: PyTree, key_data: jax.Array) -> RegionState:
        key = jax.random.wrap_key_data(key_data)
        spread = functools.partial(for_all_regions, num_regions=self._num_regions)
        per_step = () if self._per_step is None else self._per_step.init(params)
        return RegionState(
            spread(params),
            spread(self._optimizer.init(params)),
            self._own_keys(jax.random.key_data(jax.random.split(key, self._of_all))),
            spread(per_step),
            spread(jax.tree.map(jnp.asarray, self._model_state)),
        )


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

    def __init__(self, mesh: Mesh, devices: Devices):
        """Compile nothing."""
        mean = functools.partial(
            mean_over_regions, in_flat_buffer=wants_flat_buffer(mesh)
        )
        self.mean = devices.jit(
            region_shard_map(mean, mesh, in_specs=P(REGION), out_specs=P()),
            "mean of regions",
        )
        self.mean_state = make_mean(mesh)
        # Small: replicated to every process.
        everywhere = NamedSharding(mesh, P())
        self.are_finite = jax.jit(step.are_finite, out_shardings=everywhere)
        self.drift = jax.jit(merge.region_drift, out_shardings=everywhere)
        self.are_equal = jax.jit(_are_equal, out_shardings=everywhere)
        self.first = devices.jit(
            lambda outputs, num_steps: jax.tree.map(lambda x: x[:num_steps], outputs),
            static_argnums=1,
            out_shardings=NamedSharding(mesh, P(None, REGION)),
        )


def _are_equal(params: PyTree, others: PyTree) -> jax.Array:
    pairs = [*zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True)]
    if any(a.dtype != b.dtype for a, b in pairs):
        return jnp.zeros((), bool)
    return jnp.stack([(a == b).all() for a, b in pairs]).all()
