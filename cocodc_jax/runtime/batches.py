"""How the batches of a scan are laid over a mesh, `[T, R, B, ...]` each."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.runtime import checks
from cocodc_jax.runtime.devices import transfer
from cocodc_jax.runtime.devices.mesh import DATA, REGION

PyTree = Any


class Batches:
    """Puts batches where a mesh wants them: B over the data axis."""

    def __init__(self, mesh: Mesh, num_regions: int):
        """Lay out the regions of a program over its mesh."""
        self._mesh, self._num_regions = mesh, num_regions

    @functools.cached_property
    def own_regions(self) -> int:
        """How many regions this process has a part of."""
        mine, mesh = jax.process_index(), self._mesh
        shards = [
            any(d.process_index == mine for d in shard.flat)
            for shard in np.moveaxis(mesh.devices, mesh.axis_names.index(REGION), 0)
        ]
        return sum(shards) * self._num_regions // len(shards)

    def num_steps(self, batches: PyTree) -> int:
        """Return T.

        Raises:
          ValueError: if `batches` does not have the regions along its second axis.
        """
        return checks.check_batches(batches, self._num_regions, self.own_regions)

    def put(self, batches: PyTree) -> PyTree:
        """Place host batches on the mesh.

        With several processes each gives the rows of its own regions, whole, also
        those that it shares with other processes.
        """

        def put(x):
            where = self._where(np.ndim(x))
            if checks.is_on_mesh(x) or where.is_fully_addressable:
                return jax.device_put(x, where)
            return transfer.put_own(np.asarray(x), where, self._num_regions, axis=1)

        return jax.tree.map(put, batches)

    def put_unless_taken(self, batches: PyTree) -> PyTree:
        """Place batches, unless the program of the steps takes them in as they are.

        A single device takes host batches in with its other arguments, in a fifth of
        the time that it takes to place them first.
        """
        is_host = (isinstance(x, np.ndarray) for x in jax.tree.leaves(batches))
        if self._mesh.size == 1 and all(is_host):
            return batches
        return self.put(batches)

    def abstract(self, batches: PyTree) -> PyTree:
        """Return shapes and dtypes with shardings."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=self._where(x.ndim)
            ),
            batches,
        )

    def _where(self, ndim: int) -> NamedSharding:
        spec = P(None, REGION, DATA) if ndim > 2 else P(None, REGION)
        return NamedSharding(self._mesh, spec)
