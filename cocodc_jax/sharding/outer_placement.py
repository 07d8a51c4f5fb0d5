"""Placement of outer parameters and optimizer state: one value, resolved once.

An outer optimizer costs no accelerator memory by default, and its step does not hold up
the regions:

    host        in full on each process's outer device, see `outer_mesh.py`
    processes   there, divided over the processes of a region as their devices divide
                the parameters
    device      on the one CPU device that all regions compute on, where nothing could
                run concurrently
    mesh        divided over the devices of each region, in their memory (ZeRO, stage 1)
    pinned      divided likewise, in the memory of the devices' hosts, where syncs and
                inner steps share a program on accelerators (`program/segment.py`)
    regional    one outer model for each region, on its devices

With "pinned" a program loads one fragment at a time, each device its own shard, and
offloads it again. Leaves that are not shaped like a parameter, such as a step count,
stay on the devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import jax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.core.state import InFlight, OuterState, SyncState
from cocodc_jax.sharding.mesh import DATA, INSIDE, is_one_cpu, spec_axes
from cocodc_jax.sharding.outer_mesh import over_processes, process_grid
from cocodc_jax.sharding.shardings import Shardings, named
from cocodc_jax.sharding.transfer import PINNED
from cocodc_jax.sync.needs import REGIONAL_COPIES, STALE
from cocodc_jax.sync.outer import Outer, RegionalOuter

PyTree = Any


@dataclasses.dataclass(frozen=True)
class OuterPlacement:
    """Where the outer state of a run is."""

    kind: str  # "host", "processes", "device", "mesh", "pinned" or "regional".
    # Where means arrive: "outer", where the outer state is; "mesh", equal in all
    # regions; or "regions", one for each.
    means: str
    shardings: Shardings  # Of all other arrays.

    @classmethod
    def resolve(
        cls, outer: Outer, shardings: Shardings, exchange: str, overlap: bool
    ) -> OuterPlacement:
        """Choose by the exchange and whether syncs and inner steps share a program."""
        mesh, kind = shardings.mesh, "host"
        means = "mesh" if exchange == "program" else "outer"
        if isinstance(outer, RegionalOuter):
            kind, means = "regional", "mesh" if outer.group == "all" else "regions"
        elif outer.placement == "divided":
            kind = "mesh"
        elif overlap:
            there = {x.kind for x in mesh.devices.flat[0].addressable_memories()}
            kind = "pinned" if PINNED in there else "mesh"
        elif exchange == "program" and is_one_cpu(mesh):
            kind = "device"
        elif exchange == "outer" and math.prod(process_grid(mesh) or ()) > 1:
            kind = "processes"
        return cls(kind, means, shardings)

    @property
    def is_regional(self) -> bool:
        """Whether each region has an outer model of its own."""
        return self.kind == "regional"

    @property
    def on_mesh(self) -> bool:
        """Whether the outer step is a program of the inner mesh."""
        return self.kind in ("mesh", "pinned", "regional")

    @property
    def is_pinned(self) -> bool:
        """Whether a program has to load the state before it computes with it."""
        return self.kind == "pinned"

    @property
    def has_channels(self) -> bool:
        """Whether fragments are on several outer meshes."""
        return not self.on_mesh and len(self.shardings.channels) > 1

    def lay(self, fragment_id: int, tree: PyTree, channel: int | None = None) -> PyTree:
        """Return the shardings of a fragment's outer parameters or optimizer state."""
        if self.kind == "regional":
            return self.shardings.of_regions(fragment_id, tree)
        if self.kind == "device":
            return self.shardings.of_all(fragment_id, tree)
        if self.on_mesh:
            return self._divided(fragment_id, tree, PINNED if self.is_pinned else None)
        host = self.shardings.channel(fragment_id if channel is None else channel).host
        if self.kind == "host":
            return jax.tree.map(lambda _: host, tree)

        def sharding(path, x):
            found = named(self.shardings.fragments[fragment_id], path)
            return self._over_processes(host, found, x.shape) if found else host

        return jax.tree_util.tree_map_with_path(sharding, tree)

    def params(self) -> PyTree:
        """Return shardings of one set of parameters, of the first channel's kind."""
        if self.on_mesh or self.kind == "device":
            return self.shardings.params
        host, divides = self.shardings.channels[0].host, self.kind == "processes"
        return jax.tree.map(
            lambda x: self._over_processes(host, x) if divides else host,
            self.shardings.params,
        )

    def lay_flight(self, fragment_id: int, flight: InFlight) -> InFlight:
        """Return the shardings of a fragment in flight."""
        shardings = self.shardings
        lays = {"mesh": shardings.of_all, "regions": shardings.of_regions}
        lay_mean: Callable = lays.get(self.means, self.lay)
        lay: dict[str, Callable] = {STALE: self.lay}
        lay |= dict.fromkeys(REGIONAL_COPIES, shardings.of_regions)
        return InFlight(
            lay_mean(fragment_id, flight.mean),
            {n: lay.get(n, lay_mean)(fragment_id, x) for n, x in flight.kept.items()},
        )

    def lay_sync(self, sync: SyncState) -> SyncState:
        """Return the shardings of all arrays of the syncs: the only rule for them."""

        def of_each(lay, trees):
            return tuple(map(lay, range(len(trees)), trees))

        of_regions, flights = self.shardings.of_regions, sync.in_flight.items()
        return dataclasses.replace(
            sync,
            outer=OuterState(*(of_each(self.lay, trees) for trees in sync.outer)),
            compressors=of_each(of_regions, sync.compressors),
            stale_params=of_each(of_regions, sync.stale_params),
            in_flight={each: self.lay_flight(each[0], x) for each, x in flights},
        )

    def load(self, fragment_id: int, tree: PyTree) -> PyTree:
        """Load parameters or state on the mesh into device memory, in a program."""
        return jax.device_put(tree, self._divided(fragment_id, tree))

    def offload(self, fragment_id: int, tree: PyTree) -> PyTree:
        """Invert `load`."""
        return jax.device_put(tree, self.lay(fragment_id, tree))

    def _over_processes(
        self, host: Sharding, inside: NamedSharding, shape: tuple[int, ...] = ()
    ) -> Sharding:
        """Shard over processes what is sharded `inside` regions."""
        assert isinstance(host, NamedSharding)
        axes = spec_axes(inside.spec)
        if len(shape) < len(axes) and shape:  # Factored: not shaped like its parameter.
            return host
        outer = cast(Mesh, host.mesh)
        kept = list(over_processes(axes, self.shardings.mesh, outer))
        kept += [()] * (len(shape) - len(kept))
        for axis in INSIDE:
            if axis in sum(kept, ()) or outer.shape[axis] == 1:
                continue
            free = [
                i for i, size in enumerate(shape)
                if not kept[i] and size and size % outer.shape[axis] == 0
            ]  # fmt: skip
            if free:
                kept[free[0]] = (axis,)
        return NamedSharding(outer, P(*(each or None for each in kept)))

    def _divided(
        self, fragment_id: int, tree: PyTree, memory_kind: str | None = None
    ) -> PyTree:
        """Shard outer state over the devices of each region.

        A leaf shaped like a leaf slice of the fragment is sharded like it, and over the
        data axis too if the size of a free axis is a multiple of it.
        """
        mesh, fragment = self.shardings.mesh, self.shardings.fragments[fragment_id]
        size = mesh.shape[DATA]

        def sharding(path, x):
            known = named(fragment, path)
            # A factored optimizer's rows and columns have fewer axes.
            if not known or x.ndim < len(known.spec) or math.prod(x.shape) <= 1:
                return NamedSharding(mesh, P())
            spec = (*known.spec, *(None,) * (x.ndim - len(known.spec)))
            if DATA not in jax.tree.leaves(spec):
                free = [
                    i for i, used in enumerate(spec)
                    if used is None and x.shape[i] % size == 0 and x.shape[i]
                ]  # fmt: skip
                if free:
                    spec = (*spec[: free[0]], DATA, *spec[free[0] + 1 :])
            return NamedSharding(mesh, P(*spec), memory_kind=memory_kind)

        return jax.tree_util.tree_map_with_path(sharding, tree)
