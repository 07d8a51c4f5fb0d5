"""Make the regions' initial state, and read metrics of their state."""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.core.state import RegionState
from cocodc_jax.engine.collectives import mean_over_regions
from cocodc_jax.engine.devices import Devices
from cocodc_jax.engine.mesh import REGION, regional, wants_flat_buffer
from cocodc_jax.engine.placement import Shardings, with_shardings
from cocodc_jax.engine.region_map import for_all_regions, region_shard_map
from cocodc_jax.sync.inner_keys import fold_keys, has_keys
from cocodc_jax.sync.model_state import ModelState, is_float
from cocodc_jax.sync.per_step import PerStep
from cocodc_jax.transforms.numerics import is_finite, widen

PyTree = Any


class InitState:
    """Makes the state of all regions of a program, equal except for random state.

    `make(params, key_data) -> RegionState` takes arrays on the mesh, of these `shapes`;
    `shardings` has the shardings of its result.
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
        self._optimizer = optimizer
        self._per_step = per_step
        self._model_state = () if model_state is None else model_state.init
        self._num_regions = num_regions
        self._own_keys = own_keys
        self._of_all = of_all
        # Regions that exchange something at every step stay equal.
        self._has_own_keys = of_all > 1 and per_step is None
        # Compiled programs wrap keys by the implementation that is the default now.
        self._key_impl = str(cast(Any, jax.config).jax_default_prng_impl)

        key_data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        self.shapes = (params, key_data)
        state = jax.eval_shape(self._make, *self.shapes)
        # Per-step exchange state is replicated on a region's devices.
        of_per_step, of_model = jax.tree.map(
            lambda _: regional(shardings.mesh), (state.per_step, state.model_state)
        )
        self.shardings = shardings.region._replace(
            per_step=of_per_step, model_state=of_model
        )

        self.make = devices.jit(self._make, "first state", out_shardings=self.shardings)
        self.opt_state_of = jax.jit(
            lambda params: self._with_own_keys(jax.vmap(optimizer.init)(params)),
            out_shardings=self.shardings.opt_state,
        )

    def key_data(self, key: jax.Array) -> jax.Array:
        """Return the data of one key, which must be of the program's implementation."""
        try:
            impl = str(jax.random.key_impl(key))
            data = jax.random.key_data(key)
        except TypeError as error:
            raise ValueError(
                f"key={key!r} must be a PRNG key: jax.random.key(seed)"
            ) from error

        if data.ndim != 1:
            raise ValueError(
                f"key has the shape {key.shape}, but must be one PRNG key: "
                "jax.random.key(seed); each region gets its own from it"
            )

        expected = self._key_impl
        if impl != expected:
            raise ValueError(
                f"key is of the PRNG implementation {impl!r}, but the program was "
                f"made for {expected!r}, JAX's default then: give jax.random.key(seed, "
                f"impl={expected!r}), or set "
                f"jax.config.update('jax_default_prng_impl', {impl!r}) before the "
                "program is made"
            )
        return data

    def abstract(self) -> RegionState:
        """Return shapes, dtypes and shardings of the state."""
        return with_shardings(jax.eval_shape(self._make, *self.shapes), self.shardings)

    def _with_own_keys(self, opt_state: PyTree) -> PyTree:
        """Give each region random state of its own, the first the optimizer's."""
        if not (self._has_own_keys and has_keys(opt_state)):
            return opt_state
        numbers = self._own_keys(jnp.arange(self._of_all))
        return jax.vmap(fold_keys)(opt_state, numbers)

    def _make(self, params: PyTree, key_data: jax.Array) -> RegionState:
        key = jax.random.wrap_key_data(key_data)
        spread = functools.partial(for_all_regions, num_regions=self._num_regions)
        per_step = () if self._per_step is None else self._per_step.init(params)

        return RegionState(
            params=spread(params),
            opt_state=self._with_own_keys(spread(self._optimizer.init(params))),
            key=self._own_keys(
                jax.random.key_data(jax.random.split(key, self._of_all))
            ),
            per_step=spread(per_step),
            model_state=spread(jax.tree.map(jnp.asarray, self._model_state)),
        )


class RegionMetrics:
    """Compiled programs that read a `RegionState`.

    `first` returns the first steps' outputs `[T, R]` of padded ones `[room, R]`.
    """

    def __init__(self, mesh: Mesh, devices: Devices):
        mean = functools.partial(
            mean_over_regions, in_flat_buffer=wants_flat_buffer(mesh)
        )
        self.mean = devices.jit(
            region_shard_map(mean, mesh, in_specs=P(REGION), out_specs=P()),
            "mean of regions",
        )

        # Small: replicated to every process.
        everywhere = NamedSharding(mesh, P())
        self.mean_state = jax.jit(mean_model_state, out_shardings=everywhere)
        self.are_finite = jax.jit(jax.vmap(is_finite), out_shardings=everywhere)
        self.drift = jax.jit(region_drift, out_shardings=everywhere)
        self.are_equal = jax.jit(_are_equal, out_shardings=everywhere)

        self.first = devices.jit(
            lambda outputs, num_steps: jax.tree.map(lambda x: x[:num_steps], outputs),
            static_argnums=1,
            out_shardings=NamedSharding(mesh, P(None, REGION)),
        )


def _are_equal(params: PyTree, others: PyTree) -> jax.Array:
    pairs = list(zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True))
    if any(a.dtype != b.dtype for a, b in pairs):
        return jnp.zeros((), bool)
    return jnp.stack([(a == b).all() for a, b in pairs]).all()


def mean_model_state(model_state: PyTree) -> PyTree:
    """Average floating-point leaves, in at least float32; take the first of others."""
    return jax.tree.map(
        lambda x: widen(x).mean(0).astype(x.dtype) if is_float(x) else x[0], model_state
    )


def region_drift(params: PyTree) -> jax.Array:
    """Return the RMS distance of regions to their mean, relative to its norm.

    It is 0 if regions are equal, also if they are all 0. If they differ and their mean
    is 0, it is infinite.
    """
    squared_distances = []
    squared_norms = []
    for leaf in jax.tree.leaves(params):
        wide = widen(leaf)
        mean = wide.mean(0)
        squared_distances.append(jnp.square(wide - mean[None]).sum() / len(wide))
        squared_norms.append(jnp.square(mean).sum())

    distance = sum(squared_distances)
    norm = jnp.where(distance > 0, sum(squared_norms), 1)
    return jnp.sqrt(distance / norm).astype(jnp.float32)
