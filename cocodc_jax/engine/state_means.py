"""Average state other than parameters: Adam's moments, and the model's state.

Inside a program moments are all-reduced. On the outer mesh they are packed into a flat
buffer, averaged between hosts, and copied back. Both sum in at least float32, whose
bytes count. A region whose moments are not finite is left out, and receives the mean of
the others. Two numbers that are summed with the moments for this do not count as bytes.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.engine import flat_buffer
from cocodc_jax.engine.between_hosts import OnOuterMesh, make_combine
from cocodc_jax.engine.collectives import averaged
from cocodc_jax.engine.crossing import Exchange, SyncSpec
from cocodc_jax.engine.mesh import REGION, regional, wants_flat_buffer
from cocodc_jax.engine.region_map import (
    as_varying,
    for_all_regions,
    psum_over_regions,
    region_shard_map,
    sum_of_block,
)
from cocodc_jax.sync import moments
from cocodc_jax.sync.averages import rescaled, shares_of
from cocodc_jax.sync.model_state import is_float
from cocodc_jax.sync.schedules.base import Event
from cocodc_jax.transforms.compressor import zeroed
from cocodc_jax.transforms.numerics import cast_like, is_finite, wide_dtype, widen

PyTree = Any


class MomentPrograms:
    """Compiled programs that average moments."""

    def __init__(self, spec: SyncSpec, exchange: Exchange):
        assert spec.sync.moments is not None
        self._spec = spec
        self._exchange = exchange
        self._every = spec.sync.moments
        self._inside = exchange.shares_mesh

        self._shapes = jax.eval_shape(spec.trainer.optimizer.init, spec.params)
        if not moments.take(self._shapes, ()):
            raise ValueError(
                "sync_moments finds no moments in the inner optimizer's state, which "
                "holds none of Adam's; use adamw, or leave it out"
            )

        self._programs: dict[tuple[str, ...], Callable] = {}

    @property
    def num_rounds(self) -> int:
        """Number of rounds after which the moments due repeat."""
        return math.lcm(max(self._every.first, 1), max(self._every.second, 1))

    def due(self, event: Event) -> tuple[str, ...]:
        """Return the names of the moments that are sent with a sync."""
        interval = self._spec.sync.schedule.sync_interval
        return self._every.due(event.start_step // interval)

    def num_bytes(self, due: tuple[str, ...]) -> int:
        """Return the bytes of the moments due that one region sends."""
        leaves = jax.tree.leaves(moments.take(self._shapes, due))
        if not leaves or self._spec.regions.num == 1:
            return 0
        size = sum(math.prod(x.shape) for x in leaves)
        return size * _common_dtype(leaves).itemsize

    def average(
        self, opt_state: PyTree, weights: tuple[float, ...], due: tuple[str, ...]
    ) -> tuple[PyTree, jax.Array]:
        """Replace the moments due, at least one, by their mean; donates `opt_state`.

        Returns the optimizer state, and an array that is ready when all of it is.
        """
        if due not in self._programs:
            make = self._make_inside if self._inside else self._make_outside
            self._programs[due] = make(due)

        spec = self._spec
        sharding = spec.shardings.channel(0).host
        if self._inside:
            sharding = regional(spec.mesh)
        return self._programs[due](opt_state, spec.devices.weights(weights, sharding))

    def _make_inside(self, due: tuple[str, ...]) -> Callable:
        spec = self._spec

        def average(opt_state: PyTree, weights: jax.Array) -> tuple[PyTree, jax.Array]:
            wide, shares = _finite(moments.take(opt_state, due))
            sums = sum_of_block((jax.tree.map(widen, wide), shares), weights)
            mean = rescaled(*psum_over_regions(sums))
            new_state = _handed_out(opt_state, as_varying(mean), due, spec.local.size)
            return new_state, jax.tree.leaves(mean)[0].reshape(-1)[0]

        return spec.devices.jit(
            region_shard_map(
                average, spec.mesh, in_specs=P(REGION), out_specs=(P(REGION), P())
            ),
            f"mean of moments {', '.join(due)}",
            self.num_bytes(due),
            donate_argnums=0,
            out_shardings=(spec.shardings.region.opt_state, None),
        )

    def _make_outside(self, due: tuple[str, ...]) -> Callable:
        spec = self._spec
        exchange = self._exchange
        devices = spec.devices
        channel = spec.shardings.channel(0)
        assert isinstance(exchange, OnOuterMesh)

        shapes = moments.take(self._shapes, due)
        common = _common_dtype(jax.tree.leaves(shapes))
        wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, common), shapes)
        shares = jax.ShapeDtypeStruct((2,), common)
        sent: Any = (wide, shares)

        def to_buffer(opt_state: PyTree) -> jax.Array:
            finite = _finite(moments.take(opt_state, due))
            return flat_buffer.pack(cast_like(finite, sent))

        combine = make_combine(None, channel.host, sent, all_reduce=exchange.all_reduce)

        def mean_of(rows: jax.Array, weights: jax.Array) -> PyTree:
            (sums, shares), _ = combine(rows, weights)
            return rescaled(sums, shares)

        of_regions = spec.shardings.region.opt_state
        pack = devices.jit(to_buffer, out_shardings=spec.shardings.region.key)
        cross = devices.jit(mean_of, out_shardings=channel.host)
        hand_out = devices.jit(
            functools.partial(_handed_out, due=due, num_regions=spec.regions.num),
            donate_argnums=0,
            out_shardings=of_regions,
        )
        of_mean = jax.tree.map(
            lambda sharding: NamedSharding(spec.mesh, P(*sharding.spec[1:])),
            moments.take(of_regions, due),
        )

        def average(opt_state: PyTree, weights: jax.Array) -> tuple[PyTree, jax.Array]:
            rows = devices.gather_rows(pack(opt_state), channel.rows)
            mean = cross(rows, weights)
            new_state = hand_out(opt_state, devices.move(mean, of_mean))
            return new_state, jax.tree.leaves(mean)[0]

        return average

        return average


def _finite(of_regions: list) -> tuple[list, jax.Array]:
    """Return regional moments, zero where a region's are not finite, and its shares."""
    finite = jax.vmap(is_finite)(of_regions)
    return zeroed(of_regions, finite), shares_of(finite)


def _handed_out(
    opt_state: PyTree, mean: PyTree, due: tuple[str, ...], num_regions: int
) -> PyTree:
    """Replace the moments of `num_regions` regions by the mean."""
    spread = for_all_regions(mean, num_regions)
    return moments.put(opt_state, cast_like(spread, moments.take(opt_state, due)))


def _common_dtype(leaves: list) -> np.dtype:
    dtypes = [wide_dtype(x.dtype) for x in leaves]
    return np.dtype(jnp.result_type(jnp.float32, *dtypes))


def make_model_average(spec: SyncSpec) -> Callable | None:
    """Make `average(model_state, params) -> (model_state, one)`, None if not needed.

    It donates its first argument. `params` are the regions', to check for a robust
    mean, else None. `one` is an array that is ready when the mean is, never donated.
    """
    state = spec.trainer.model_state
    if state is None or not state.averaged_bytes or spec.regions.num == 1:
        return None
    # Few bytes: use the algorithm with the fewest delays.
    kind = "direct" if wants_flat_buffer(spec.mesh) else None

    def average(tree: PyTree, params: PyTree) -> tuple[PyTree, jax.Array]:
        counted = jax.vmap(is_finite)((tree, params)) if spec.sync.robust else None
        new_state = averaged(tree, spec.local, kind, counted)
        first = next(x for x in jax.tree.leaves(new_state) if is_float(x))
        return new_state, first.reshape(spec.local.size, -1)[:, 0]

    return spec.devices.jit(
        region_shard_map(average, spec.mesh, in_specs=P(REGION), out_specs=P(REGION)),
        "mean of model state",
        donate_argnums=0,
        out_shardings=regional(spec.mesh),
    )
