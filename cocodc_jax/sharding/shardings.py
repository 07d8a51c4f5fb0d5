"""Shardings of all arrays of a run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, cast

import jax
import optax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.core.state import RegionState
from cocodc_jax.sharding.mesh import DATA, INSIDE, regional, spec_axes
from cocodc_jax.sharding.outer_mesh import (
    check_channels,
    outer_rows,
    outer_sharding,
    over_processes,
    process_grid,
)
from cocodc_jax.sync.fragments import Fragments, LeafSlice

PyTree = Any
ByPath = dict[str, NamedSharding]


class Channel(NamedTuple):
    """Shardings on one outer mesh.

    Attributes:
      host: of state on its devices, one copy in each process.
      rows: of messages on its devices, regions over processes, and columns over the
        processes of a region.
    """

    host: Sharding
    rows: Sharding


@dataclasses.dataclass(frozen=True)
class Shardings:
    """Shardings of a run's arrays.

    Attributes:
      mesh: the inner mesh.
      region: a tree of a `RegionState`'s shardings, regions over the region axis.
      params: of one set of parameters on the mesh, replicated over regions.
      fragments: of each fragment on the mesh, replicated over regions.
      staged: of each fragment with its region axis.
      channels: the outer meshes; fragments are assigned to them in turn.
      is_near: whether outer state is on the one device that regions compute on.
      divides_host: whether the processes of a region shard the outer state, as their
        devices shard the parameters.
    """

    mesh: Mesh
    region: RegionState
    params: PyTree
    fragments: tuple[ByPath, ...]
    staged: tuple[ByPath, ...]
    channels: tuple[Channel, ...]
    is_near: bool = False
    divides_host: bool = False

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        fragments: Fragments,
        optimizer: optax.GradientTransformation,
        shapes: PyTree,
        specs: PyTree,
        outer_channels: int = 1,
        is_near: bool = False,
        divides_host: bool = False,
        optimizer_memory: str | None = None,
    ) -> Shardings:
        """Derive all shardings from those of one region's parameters.

        Args:
          mesh: the inner mesh.
          fragments: the cut of the parameters.
          optimizer: the inner optimizer; its state is sharded like the parameters.
          shapes: shapes of one region's parameters.
          specs: for each parameter a `PartitionSpec` over the axes inside a region.
          outer_channels: number of outer meshes.
          is_near: keep outer state on the mesh, of one device, sharded like fragments.
          divides_host: shard outer state over the processes of a region.
          optimizer_memory: memory kind of the inner optimizer's state, for leaves
            shaped like a parameter; None is the devices' default.

        Raises:
          ValueError: if there are too few devices for them.
        """
        check_channels(mesh, outer_channels)
        channels = tuple(
            Channel(outer_sharding(mesh, i), outer_rows(mesh, i))
            for i in range(outer_channels)
        )
        if is_near:
            channels = (Channel(NamedSharding(mesh, P()), regional(mesh)),)
        listed = jax.tree.leaves(specs)
        unflatten = jax.tree.structure(shapes).unflatten
        regions = unflatten([regional(mesh, spec) for spec in listed])

        def like_param(leaf, param, sharding):
            if isinstance(leaf, optax.MaskedNode):
                return leaf
            # Factored moments have other shapes than their parameters.
            if leaf.shape != param.shape:
                return regional(mesh)
            if optimizer_memory is None:
                return sharding
            return sharding.with_memory_kind(optimizer_memory)

        opt_state = optax.tree_map_params(
            optimizer,
            like_param,
            jax.eval_shape(optimizer.init, shapes),
            shapes,
            regions,
            transform_non_params=lambda _: regional(mesh),
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )
        of_regions = cast(Any, regional(mesh))
        return cls(
            mesh=mesh,
            region=RegionState(regions, opt_state, of_regions, of_regions),
            params=unflatten([NamedSharding(mesh, spec) for spec in listed]),
            fragments=tuple(
                {
                    each.path: NamedSharding(mesh, _spec(mesh, each, listed))
                    for each in part
                }
                for part in fragments.slices
            ),
            staged=tuple(
                {each.path: regional(mesh, _spec(mesh, each, listed)) for each in part}
                for part in fragments.slices
            ),
            channels=channels,
            is_near=is_near,
            divides_host=divides_host and math.prod(process_grid(mesh) or ()) > 1,
        )

    def channel(self, fragment_id: int) -> Channel:
        """Return the outer mesh of a fragment's outer state and messages."""
        return self.channels[fragment_id % len(self.channels)]

    def on_host(
        self, fragment_id: int, tree: PyTree, channel: int | None = None
    ) -> PyTree:
        """Return the shardings of `tree` on the fragment's outer devices.

        Args:
          fragment_id: which.
          tree: arrays, or their shapes; leaves shaped like the fragment are sharded if
            processes shard the outer state.
          channel: another than the fragment's own.
        """
        if self.is_near:
            return self.of_all(fragment_id, tree)
        host = self.channel(fragment_id if channel is None else channel).host
        if not self.divides_host:
            return jax.tree.map(lambda _: host, tree)

        def sharding(path, x):
            found = _named(self.fragments[fragment_id], path)
            return self._divided_host(host, found, x.shape) if found else host

        return jax.tree_util.tree_map_with_path(sharding, tree)

    def params_on_host(self) -> PyTree:
        """Return shardings of one set of parameters on the first channel."""
        host = self.channels[0].host
        if not self.divides_host:
            return jax.tree.map(lambda _: host, self.params)
        return jax.tree.map(lambda x: self._divided_host(host, x), self.params)

    def _divided_host(
        self, host: Sharding, inside: NamedSharding, shape: tuple[int, ...] = ()
    ) -> Sharding:
        """Shard over processes what is sharded `inside` regions."""
        assert isinstance(host, NamedSharding)
        axes = spec_axes(inside.spec)
        if len(shape) < len(axes) and shape:  # Factored: not shaped like its parameter.
            return host
        outer = cast(Mesh, host.mesh)
        kept = list(over_processes(axes, self.mesh, outer))
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

    def of_regions(self, fragment_id: int, tree: PyTree) -> PyTree:
        """Return shardings of leaves `[R, ...]`; those like the fragment follow it."""
        return _like(self.staged[fragment_id], regional(self.mesh), tree)

    def of_all(self, fragment_id: int, tree: PyTree) -> PyTree:
        """Return shardings of leaves replicated over regions, as `of_regions`."""
        default = NamedSharding(self.mesh, P())
        return _like(self.fragments[fragment_id], default, tree)

    def divided(
        self, fragment_id: int, tree: PyTree, memory_kind: str | None = None
    ) -> PyTree:
        """Shard outer state over the devices of each region (ZeRO, stage 1).

        A leaf shaped like a leaf slice of the fragment is sharded like it, and over the
        data axis too if the size of a free axis is a multiple of it.

        Args:
          fragment_id: which fragment.
          tree: arrays, or their shapes.
          memory_kind: of such a leaf; None is the devices' default.
        """
        size = self.mesh.shape[DATA]

        def divide(path, x):
            spec = _named(self.fragments[fragment_id], path).spec
            spec = (*spec, *(None,) * (x.ndim - len(spec)))
            if DATA not in jax.tree.leaves(spec):
                free = [
                    i for i, used in enumerate(spec)
                    if used is None and x.shape[i] % size == 0 and x.shape[i]
                ]  # fmt: skip
                if free:
                    spec = (*spec[: free[0]], DATA, *spec[free[0] + 1 :])
            return NamedSharding(self.mesh, P(*spec), memory_kind=memory_kind)

        def sharding(path, x):
            known = _named(self.fragments[fragment_id], path) and math.prod(x.shape) > 1
            return divide(path, x) if known else NamedSharding(self.mesh, P())

        return jax.tree_util.tree_map_with_path(sharding, tree)


def with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
    """Add shardings to shapes, for restoring a checkpoint."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        shapes,
        shardings,
    )


def _spec(mesh: Mesh, part: LeafSlice, listed: list[Any]) -> Any:
    """Return the spec of a leaf slice: its leaf's, if its layers divide."""
    spec = listed[part.leaf]
    if part.rows is None or part.axis or not spec or spec[0] is None:
        return spec
    return spec if len(part.rows) % mesh.shape[spec[0]] == 0 else P(None, *spec[1:])


def _like(shardings: ByPath, default: NamedSharding, tree: PyTree) -> PyTree:
    def sharding(path, x):
        found = _named(shardings, path)
        # Another rank: a factor or an encoding of the leaf.
        return found if found and len(found.spec) <= x.ndim else default

    return jax.tree_util.tree_map_with_path(sharding, tree)


def _named(shardings: ByPath, path: Any) -> Any:
    """Return the sharding by the end of a leaf's path, None if there is none."""
    key = getattr(path[-1], "key", None) if path else None
    return shardings.get(key) if isinstance(key, str) else None
