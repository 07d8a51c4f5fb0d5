"""Shardings of all arrays of a run, and the memory of the inner optimizer's state.

Of P parameters of 4 bytes Adam keeps 8 P bytes that a step needs once, at its end. In
the pinned memory of the accelerators' hosts they leave accelerator memory for
activations, at 16 bytes per parameter and step over the host link. Leaves that are not
shaped like a parameter stay on the devices.

In a segment with syncs (`program/segment.py`) a TPU's compiler (libtpu 0.0.42) then
peels the last step off the scan, and makes a message arrive before that step.
"""

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
from cocodc_jax.sharding.transfer import PINNED
from cocodc_jax.sync.fragments import Fragments, LeafSlice, PyTree
from cocodc_jax.sync.method import Method
from cocodc_jax.transforms.numerics import check_choice

MEMORIES = ("device", "host")  # Of the inner optimizer's state.
ByPath = dict[str, NamedSharding]


class Channel(NamedTuple):
    """Shardings on one outer mesh."""

    host: Sharding  # Of state on its devices, one copy in each process.
    # Of messages on its devices, regions over processes, and columns over the processes
    # of a region.
    rows: Sharding


@dataclasses.dataclass(frozen=True)
class Shardings:
    """Shardings of a run's arrays."""

    mesh: Mesh  # The inner mesh.
    # A tree of a `RegionState`'s shardings, regions over the region axis.
    region: RegionState
    params: PyTree  # Of one set of parameters on the mesh, replicated over regions.
    # Of each fragment on the mesh, replicated over regions.
    fragments: tuple[ByPath, ...]
    staged: tuple[ByPath, ...]  # Of each fragment with its region axis.
    # The outer meshes; fragments are assigned to them in turn.
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
        """Derive all shardings from `specs`, those of one region's parameters.

        The inner optimizer's state is sharded like the parameters. Its leaves that are
        shaped like one have the memory kind `optimizer_memory`; None is the devices'
        default. Refuses more outer meshes than there are devices for.
        """
        check_channels(mesh, outer_channels)
        listed, leaves = jax.tree.leaves(specs), jax.tree.leaves(shapes)
        unflatten = jax.tree.structure(shapes).unflatten
        regions = unflatten([regional(mesh, spec) for spec in listed])

        def like_param(leaf, param, sharding):
            if _is_masked(leaf):
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
            is_leaf=_is_masked,
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
    if len(part.rows) % math.prod(mesh.shape[a] for a in spec_axes(spec)[axis]) == 0:
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


def memory_kind(memory: str, mesh: Mesh, method: Method) -> str | None:
    """Return JAX's memory kind for `memory`; None is the devices' default.

    Refused where a method uses the state outside inner steps and merges.
    """
    check_choice("optimizer_memory", memory, MEMORIES)
    if memory == "device":
        return None
    device = mesh.devices.flat[0]
    there = sorted(each.kind for each in device.addressable_memories())
    if PINNED not in there:
        raise ValueError(
            f"optimizer_memory={memory!r} needs memory of the kind {PINNED!r}, and "
            f"{device.platform} has {there}; use 'device'"
        )
    sync = method.sync
    if sync is not None and (sync.moments or sync.robust):
        what = "averages moments" if sync.moments else "puts regions back"
        raise ValueError(
            f"optimizer_memory={memory!r} is not for method={method.name!r}, which "
            f"{what}; use 'device'"
        )
    return PINNED


def load(opt_state: PyTree, lies: PyTree) -> PyTree:
    """Load state from host memory to the devices, in a program of the mesh."""
    return _moved(opt_state, lies, jax.memory.Space.Device)


def offload(opt_state: PyTree, lies: PyTree) -> PyTree:
    """Invert `load`."""
    return _moved(opt_state, lies, jax.memory.Space.Host)


def _moved(opt_state: PyTree, lies: PyTree, space: Any) -> PyTree:
    def one(x, sharding):
        is_moved = not _is_masked(x) and sharding.memory_kind == PINNED
        return jax.device_put(x, space) if is_moved else x

    return jax.tree.map(one, opt_state, lies, is_leaf=_is_masked)


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)
