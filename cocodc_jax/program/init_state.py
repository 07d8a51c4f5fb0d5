"""The regions' initial state and its shardings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.core.state import RegionState
from cocodc_jax.program import checks
from cocodc_jax.sharding.local_regions import for_all_regions
from cocodc_jax.sharding.mesh import regional
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
        self.make = jax.jit(self._make, out_shardings=self.lies)

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
