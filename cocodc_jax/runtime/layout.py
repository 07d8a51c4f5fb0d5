"""Where every array of a run lives."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import optax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.runtime.mesh import outer_device, regional
from cocodc_jax.runtime.state import RegionState
from cocodc_jax.sync.fragments import Fragments

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shardings of a run's arrays.

    Attributes:
      region: of a `RegionState` (and in its shape), regions over the region axis.
      params: of one set of parameters on the mesh, the same for all regions.
      fragments: of each fragment on the mesh, the same for all regions.
      staged: of each fragment with its region axis.
      outer: of everything outer, one device.
    """

    region: RegionState
    params: PyTree
    fragments: tuple[dict[str, NamedSharding], ...]
    staged: tuple[dict[str, NamedSharding], ...]
    outer: SingleDeviceSharding

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        fragments: Fragments,
        optimizer: optax.GradientTransformation,
        shapes: PyTree,
        specs: PyTree | None,
    ) -> Layout:
        """Derives everything from how one region's parameters are laid out.

        Args:
          mesh: the inner mesh.
          fragments: the cut of the parameters.
          optimizer: the inner optimizer; what its state keeps for each parameter
            lies as that parameter does.
          shapes: shapes of one region's parameters.
          specs: for each parameter, a `PartitionSpec` over the axes inside a region,
            or None for all replicated.
        """
        if specs is None:
            specs = jax.tree.map(lambda _: P(), shapes)
        # A spec is a leaf here: flatten by the parameters' structure, not its own.
        listed = jax.tree.structure(shapes).flatten_up_to(specs)
        unflatten = jax.tree.structure(shapes).unflatten
        regions = unflatten([regional(mesh, spec) for spec in listed])

        def like_param(leaf, param, sharding):
            if isinstance(leaf, optax.MaskedNode):
                return leaf
            # Factored moments have another shape than their parameter.
            return sharding if leaf.shape == param.shape else regional(mesh)

        opt_state = optax.tree_map_params(
            optimizer,
            like_param,
            jax.eval_shape(optimizer.init, shapes),
            shapes,
            regions,
            transform_non_params=lambda _: regional(mesh),
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )
        return cls(
            region=RegionState(regions, opt_state, cast(Any, regional(mesh))),
            params=unflatten([NamedSharding(mesh, spec) for spec in listed]),
            fragments=tuple(
                {piece.path: NamedSharding(mesh, listed[piece.leaf]) for piece in part}
                for part in fragments.pieces
            ),
            staged=tuple(
                {piece.path: regional(mesh, listed[piece.leaf]) for piece in part}
                for part in fragments.pieces
            ),
            outer=SingleDeviceSharding(outer_device(mesh)),
        )

    def flight(self, fragment: int, is_staged: bool) -> tuple[PyTree, PyTree]:
        """Shardings of `(staged, mean_pseudo_gradient)` of a fragment in flight."""
        return (self.staged[fragment] if is_staged else None, self.fragments[fragment])


def place(shapes: PyTree, shardings: PyTree) -> PyTree:
    """Shapes with shardings, as a checkpoint is restored to."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        shapes,
        shardings,
    )
