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
from cocodc_jax.sharding.mesh import DATA, EXPERT, regional, spec_axes
from cocodc_jax.sharding.outer_mesh import check_channels, outer_rows, outer_sharding
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
    """

    mesh: Mesh
    region: RegionState
    params: PyTree
    fragments: tuple[ByPath, ...]
    staged: tuple[ByPath, ...]
    channels: tuple[Channel, ...]

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        fragments: Fragments,
        optimizer: optax.GradientTransformation,
        shapes: PyTree,
        specs: PyTree,
        outer_channels: int = 1,
        optimizer_memory: str | None = None,
    ) -> Shardings:
        """Derive all shardings from those of one region's parameters.

        Args:
          mesh: the inner mesh.
          fragments: the cut of the parameters.
          optimizer: the inner optimizer; its state is sharded like the parameters.
          shapes: shapes of one region's parameters.
          specs: for each parameter a `PartitionSpec` over the axes inside a region.
          outer_channels: number of outer meshes; refused if devices are too few.
          optimizer_memory: memory kind of the inner optimizer's state, for leaves
            shaped like a parameter; None is the devices' default.
        """
        check_channels(mesh, outer_channels)
        listed, leaves = jax.tree.leaves(specs), jax.tree.leaves(shapes)
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
        parts = [
            {x.path: _spec(mesh, x, listed[x.leaf], leaves[x.leaf].shape) for x in part}
            for part in fragments.slices
        ]

        def each_fragment(make):
            return tuple({n: make(mesh, x) for n, x in part.items()} for part in parts)

        return cls(
            mesh=mesh,
            region=RegionState(regions, opt_state, of_regions, of_regions),
            params=unflatten([NamedSharding(mesh, spec) for spec in listed]),
            fragments=each_fragment(NamedSharding),
            staged=each_fragment(regional),
            channels=tuple(
                Channel(outer_sharding(mesh, i), outer_rows(mesh, i))
                for i in range(outer_channels)
            ),
        )

    def channel(self, fragment_id: int) -> Channel:
        """Return the outer mesh of a fragment's outer state and messages."""
        return self.channels[fragment_id % len(self.channels)]

    def of_regions(self, fragment_id: int, tree: PyTree) -> PyTree:
        """Return shardings of leaves `[R, ...]`; those like the fragment follow it."""
        return _like(self.staged[fragment_id], regional(self.mesh), tree)

    def of_all(self, fragment_id: int, tree: PyTree) -> PyTree:
        """Return shardings of leaves replicated over regions, as `of_regions`."""
        default = NamedSharding(self.mesh, P())
        return _like(self.fragments[fragment_id], default, tree)


def with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
    """Add shardings to shapes, for restoring a checkpoint."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        shapes,
        shardings,
    )


def _spec(mesh: Mesh, part: LeafSlice, spec: Any, shape: tuple[int, ...]) -> Any:
    """Return the spec of a leaf slice: its leaf's, if its layers or experts divide.

    Of a range of experts every device of their axis has a share of the width instead:
    the range would seldom divide, and be one device's in the parameters.
    """
    axis = part.axis
    if part.rows is None or len(part.rows) == shape[axis]:
        return spec
    if axis >= len(spec) or spec[axis] is None:
        return spec
    rest = [*spec[:axis], None, *spec[axis + 1 :]]
    if spec[axis] == EXPERT:
        for i, axes in enumerate(spec_axes(rest)):
            more = (*axes, EXPERT)
            if DATA in axes and shape[i] % math.prod(mesh.shape[a] for a in more) == 0:
                rest[i] = more
        return P(*rest)
    if len(part.rows) % mesh.shape[spec[axis]] == 0:
        return spec
    return P(*rest)


def _like(shardings: ByPath, default: NamedSharding, tree: PyTree) -> PyTree:
    def sharding(path, x):
        found = named(shardings, path)
        # Another rank: a factor or an encoding of the leaf.
        return found if found and len(found.spec) <= x.ndim else default

    return jax.tree_util.tree_map_with_path(sharding, tree)


def named(shardings: ByPath, path: Any) -> Any:
    """Return the sharding by the end of a leaf's path, None if there is none."""
    key = getattr(path[-1], "key", None) if path else None
    return shardings.get(key) if isinstance(key, str) else None
