"""Place batches of a scan, `[T, R, B, ...]`, on a mesh."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.program import checks
from cocodc_jax.program import length_buckets as counted
from cocodc_jax.sharding import transfer
from cocodc_jax.sharding.mesh import REGION, batch_axes

PyTree = Any


class Batches:
    """Places batches on the mesh, B over the axes of `batch_axes`.

    Attributes:
      length_bucket: batches are padded to a multiple of this many steps, and the number
        of real steps is passed along, see `length_buckets.py`; None is no padding.
    """

    def __init__(self, mesh: Mesh, num_regions: int, length_bucket: int | None):
        """Map the regions of a program to its mesh."""
        self._mesh, self._num_regions = mesh, num_regions
        self.length_bucket = length_bucket
        self._everywhere = NamedSharding(mesh, P())
        self._numbers: dict[int, jax.Array] = {}  # On the mesh.

    @functools.cached_property
    def own_regions(self) -> int:
        """Number of regions that this process has a part of."""
        mine, mesh = jax.process_index(), self._mesh
        shards = [
            any(d.process_index == mine for d in shard.flat)
            for shard in np.moveaxis(mesh.devices, mesh.axis_names.index(REGION), 0)
        ]
        return sum(shards) * self._num_regions // len(shards)

    def num_steps(self, batches: PyTree) -> int:
        """Return T.

        Raises:
          ValueError: if the second axis of `batches` is not the regions.
        """
        return checks.check_batches(batches, self._num_regions, self.own_regions)

    def put(self, batches: PyTree) -> PyTree:
        """Place host batches on the mesh.

        With several processes, each passes the full rows of its own regions, including
        regions that it shares with other processes.
        """

        def put(x):
            where = self._where(np.ndim(x))
            if checks.is_on_mesh(x) or where.is_fully_addressable:
                return jax.device_put(x, where)
            return transfer.put_own(np.asarray(x), where, self._num_regions, axis=1)

        return jax.tree.map(put, batches)

    def for_steps(self, batches: PyTree) -> tuple[PyTree, jax.Array | None]:
        """Return batches in the form that the inner steps take.

        On a single device, host batches are passed straight to the program, which takes
        a fifth of the time of placing them first. `jax.transfer_guard` would reject
        that implicit transfer, so with a guard they are placed.
        """
        leaves, num_steps = jax.tree.leaves(batches), None
        is_host = all(isinstance(x, np.ndarray) for x in leaves)
        length_bucket = self._round_of(batches) if is_host else None
        if length_bucket is not None:
            num_steps = self._number(len(leaves[0]))
            batches = counted.padded(batches, len(leaves[0]), length_bucket)
        if self._mesh.size == 1 and is_host and not _is_guarded():
            return batches, num_steps
        return self.put(batches), num_steps

    def abstract(self, batches: PyTree) -> tuple[PyTree, jax.ShapeDtypeStruct | None]:
        """Return shapes, dtypes and shardings of the result of `for_steps`."""
        length_bucket = self._round_of(batches)

        def like(x):
            room = x.shape[0]
            if length_bucket is not None:
                room = counted.padded_length(room, length_bucket)
            where = self._where(x.ndim)
            return jax.ShapeDtypeStruct((room, *x.shape[1:]), x.dtype, sharding=where)

        num_steps = None
        if length_bucket is not None:
            num_steps = jax.ShapeDtypeStruct((), np.int32, sharding=self._everywhere)
        return jax.tree.map(like, batches), num_steps

    def _round_of(self, batches: PyTree) -> int | None:
        """Return the multiple that these batches are padded to, None for no padding."""
        steps = self.length_bucket
        return steps if steps is not None and counted.takes(batches, steps) else None

    def _number(self, value: int) -> jax.Array:
        if value not in self._numbers:
            self._numbers[value] = transfer.put(np.int32(value), self._everywhere)
        return self._numbers[value]

    def _where(self, ndim: int) -> NamedSharding:
        inside = (batch_axes(self._mesh),) if ndim > 2 else ()
        return NamedSharding(self._mesh, P(None, REGION, *inside))


def _is_guarded() -> bool:
    """Return whether JAX checks for implicit transfers to devices."""
    guard = jax.config.jax_transfer_guard_host_to_device  # pyright: ignore
    return guard not in (None, "allow")
