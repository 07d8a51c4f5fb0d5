"""Move a trainer's arrays to the engine's mesh and back, without copying a byte.

The engine's programs are written for a mesh with the axes `(region, stage, data,
expert, sequence, model)`, all automatic. A trainer's mesh has other names, other axes,
perhaps Explicit ones. Both are views of the same devices, so an array changes its mesh
by declaring its shards to be those of an array over the other mesh.

A trainer has its regions in one of three forms:

- *stacked*: leaves `[R, ...]`, sharded over regions by the axes of the trainer's mesh
  that shard the leading axis, or all regions on every device;
- *own*: leaves `[...]` of the one region that this program trains;
- *processes*: leaves `[...]` on the devices of this process, and every process of a
  `jax.distributed` job is one region.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.engine import transfer
from cocodc_jax.engine.frozen import copied
from cocodc_jax.engine.mesh import (
    DATA,
    EXPERT,
    INSIDE,
    MODEL,
    REGION,
    SEQUENCE,
    STAGE,
    spec_axes,
)
from cocodc_jax.region_sync.trees import Leaves

# The trainer's axes inside a region take the engine's names in this order. Only `data`,
# over which outer state is sharded, and `expert` have a meaning for the engine.
_NAMES = (DATA, MODEL, STAGE, SEQUENCE, EXPERT)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a trainer's arrays are placed.

    Attributes:
      form: "stacked", "own" or "processes".
      mesh: the engine's mesh, over the trainer's devices.
      specs: of one region's leaves over `mesh`, by path.
      regions: the trainer's axes that shard the regions; none if all regions are on
        every device.
      names: the engine's name of each of the trainer's axes inside a region.
    """

    form: str
    mesh: Mesh
    specs: dict[str, P]
    regions: tuple[str, ...] = ()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def has_region_axis(self) -> bool:
        """Whether the trainer's leaves have a leading axis of regions."""
        return self.form == "stacked"

    def enter(self, arrays: Leaves) -> Leaves:
        """Return the trainer's arrays as the engine's, `[R, ...]`; donates them."""
        if not self.has_region_axis:
            arrays = _with_axis(arrays)
        if self.form == "processes":
            return {
                path: relabeled(x, self.regional[path], self._shape(x))
                for path, x in arrays.items()
            }
        return all_relabeled(arrays, self.regional)

    def first(self, arrays: Leaves) -> Leaves:
        """Return a copy of the first region's arrays on the engine's mesh, `[...]`.

        If leaves have no region axis, copy this program's region; it must equal the
        others.
        """
        shardings = {
            path: NamedSharding(self.mesh, spec) for path, spec in self.specs.items()
        }
        if self.form == "processes":
            return transfer.put(jax.tree.map(np.asarray, arrays), shardings)
        if self.form == "own":
            return jax.device_put(copied(arrays), shardings)

        take = jax.jit(
            lambda arrays: {path: x[0] for path, x in arrays.items()},
            out_shardings=shardings,
        )
        regional = {
            path: relabeled(x, self.regional[path]) for path, x in arrays.items()
        }
        return take(regional)

    def leave(self, arrays: Leaves, shardings: dict[str, Sharding]) -> Leaves:
        """Return the engine's arrays under the trainer's shardings; donates them."""
        if self.form == "processes":
            arrays = {path: _own_part(x) for path, x in arrays.items()}
        if not self.has_region_axis:
            arrays = _without_axis(arrays)
        return all_relabeled(arrays, shardings)

    def sharding_of(self, x: Any) -> NamedSharding:
        """Return the engine's sharding of any array of the trainer's.

        Raises:
          ValueError: if it is sharded over some of the regions' axes, but not all.
        """
        sharding = x.sharding
        if not isinstance(sharding, NamedSharding):
            return NamedSharding(self.mesh, P())
        entries = [self._renamed(axes) for axes in spec_axes(sharding.spec)]
        return NamedSharding(self.mesh, P(*entries))

    def _renamed(self, axes: tuple[str, ...]) -> tuple[str, ...] | None:
        names = []
        num_regions_axes = len(self.regions)
        if self.regions and axes[:num_regions_axes] == self.regions:
            names.append(REGION)
            axes = axes[num_regions_axes:]

        split = set(axes) & set(self.regions)
        if split:
            raise ValueError(
                f"an array is sharded over {sorted(split)}, a part of the axes "
                f"{self.regions} over which the regions are"
            )

        # Axes of one device have no name here, and shard nothing.
        names += [self.names[axis] for axis in axes if axis in self.names]
        return tuple(names) or None

    def _shape(self, x: jax.Array) -> tuple[int, ...]:
        if self.form != "processes":
            return x.shape
        return (jax.process_count(), *x.shape[1:])

    @functools.cached_property
    def regional(self) -> dict[str, NamedSharding]:
        """The engine's shardings of the averaged arrays, `[R, ...]`, by path."""
        return {
            path: NamedSharding(self.mesh, P(REGION, *spec))
            for path, spec in self.specs.items()
        }


def layout_of(arrays: Leaves, num_regions: int, form: str) -> Layout:
    """Find the layout of a trainer's arrays, or of their shapes with shardings.

    Raises:
      ValueError: if leaves in the form "stacked" have no leading axis of `num_regions`,
        if leaves are not all on one mesh, or if a region has more than five mesh axes.
    """
    if form == "stacked":
        _check_stacked(arrays, num_regions)
    shardings = {path: _named(path, x) for path, x in arrays.items()}
    mesh = _one_mesh(shardings)
    specs = {
        path: _axes_of(sharding, mesh, arrays[path].ndim)
        for path, sharding in shardings.items()
    }

    regions: tuple[str, ...] = ()
    if form == "stacked":
        regions = _region_axes(specs)
        specs = {path: spec[1:] for path, spec in specs.items()}
    inside = [
        axis for axis in mesh.axis_names if axis not in regions and mesh.shape[axis] > 1
    ]
    if len(inside) > len(_NAMES):
        raise ValueError(
            f"params are over a mesh with the axes {inside} inside a region; use at "
            f"most {len(_NAMES)} of more than one device"
        )

    names = dict(zip(inside, _NAMES, strict=False))
    renamed = {
        path: P(*(tuple(names[axis] for axis in axes) or None for axes in spec))
        for path, spec in specs.items()
    }
    return Layout(
        form=form,
        mesh=_engine_mesh(mesh, regions, names, form),
        specs=renamed,
        regions=regions,
        names={str(axis): name for axis, name in names.items()},
    )


def _axes_of(sharding: NamedSharding, mesh: Mesh, ndim: int) -> list[tuple[str, ...]]:
    """Return the axes of each dimension; an axis of one device shards nothing."""
    entries = [*spec_axes(sharding.spec), *[()] * ndim]
    return [
        tuple(axis for axis in axes if mesh.shape[axis] > 1) for axes in entries[:ndim]
    ]


def relabeled(x: Any, sharding: Sharding, shape: tuple[int, ...] | None = None) -> Any:
    """Declare an array's shards to be those of an array with another sharding.

    If the other sharding needs other shards, the array is moved. A shape with a
    sharding gives such a shape.
    """
    if shape is None:
        shape = tuple(x.shape)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    if x.sharding == sharding and x.shape == shape:
        return x

    if shape == x.shape and not _has_same_shards(x.sharding, sharding, shape):
        return jax.device_put(x, sharding)

    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def all_relabeled(arrays: Leaves, shardings: Mapping[str, Sharding]) -> Leaves:
    """Relabel many arrays in one call; donates them.

    A program that returns its donated arguments takes a tenth of the time of declaring
    the arrays one by one, and moves no byte either.
    """
    places = tuple((x.sharding, shardings[path]) for path, x in arrays.items())
    is_view = len({id(x) for x in arrays.values()}) == len(arrays) and all(
        _is_view(old, new, x.shape)
        for (old, new), x in zip(places, arrays.values(), strict=True)
    )
    if not is_view:
        return {path: relabeled(x, shardings[path]) for path, x in arrays.items()}
    if all(old == new for old, new in places):
        return arrays

    leaves = _declare(tuple(new for _, new in places))(list(arrays.values()))
    return dict(zip(arrays, leaves, strict=True))


@functools.lru_cache(maxsize=64)
def _declare(shardings: tuple[Sharding, ...]) -> Callable[[list], list]:
    return jax.jit(lambda leaves: leaves, donate_argnums=0, out_shardings=[*shardings])


@functools.lru_cache(maxsize=4096)
def _is_view(old: Sharding, new: Sharding, shape: tuple[int, ...]) -> bool:
    """Return whether a program can take `old` and return `new` without moving bytes."""
    shards = [list(x.devices_indices_map(shape).items()) for x in (old, new)]
    return old.memory_kind == new.memory_kind and shards[0] == shards[1]


def first_region(x: Any) -> Any:
    """Return the first entry of an array `[R, ...]` of any sharding."""
    if not hasattr(x, "shape"):
        return x

    if isinstance(x.sharding, NamedSharding):
        inside = NamedSharding(x.sharding.mesh, P(*x.sharding.spec[1:]))
        return x.at[0].get(out_sharding=inside)
    return x[0]


@functools.lru_cache(maxsize=4096)
def _has_same_shards(a: Sharding, b: Sharding, shape: tuple[int, ...]) -> bool:
    return a.devices_indices_map(shape) == b.devices_indices_map(shape)


def _check_stacked(arrays: Leaves, num_regions: int) -> None:
    for path, x in arrays.items():
        if not x.ndim or x.shape[0] != num_regions:
            raise ValueError(
                f"params has a leaf {path!r} of shape {tuple(x.shape)}, whose leading "
                f"axis must be the regions={num_regions}: stack the regions' "
                "parameters, or name the exchange between the processes or jobs that "
                "are the regions"
            )


def _named(path: str, x: Any) -> NamedSharding:
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return sharding

    if sharding is None:
        devices = [jax.local_devices()[0]]
    elif isinstance(sharding, SingleDeviceSharding):
        devices = list(sharding.device_set)
    else:
        raise ValueError(
            f"params has a leaf {path!r} with a {type(sharding).__name__}; give it a "
            "NamedSharding, or keep it on one device"
        )
    return NamedSharding(Mesh(np.array(devices), ("alone",)), P())


def _one_mesh(shardings: dict[str, NamedSharding]) -> Mesh:
    meshes = {}
    for path, sharding in shardings.items():
        mesh = sharding.mesh
        assert isinstance(mesh, Mesh)
        devices = (mesh.devices.shape, tuple(mesh.devices.flat))
        meshes.setdefault((mesh.axis_names, devices), (path, mesh))
    if len(meshes) > 1:
        (path, mesh), (other_path, other), *_ = meshes.values()
        raise ValueError(
            f"params has a leaf {path!r} over the mesh {dict(mesh.shape)} and "
            f"{other_path!r} over {dict(other.shape)}; all leaves must be over one mesh"
        )

    ((_, mesh),) = meshes.values()
    return mesh


def _region_axes(specs: dict[str, list[tuple[str, ...]]]) -> tuple[str, ...]:
    axes = {spec[0]: path for path, spec in specs.items()}
    if len(axes) > 1:
        (first, path), (second, other), *_ = axes.items()
        raise ValueError(
            f"params has the regions of {path!r} over the mesh axes {first} and of "
            f"{other!r} over {second}; all leaves must have them over the same"
        )

    return next(iter(axes))


def _engine_mesh(
    mesh: Mesh, regions: tuple[str, ...], names: Mapping[Any, str], form: str
) -> Mesh:
    """Return the engine's mesh of the trainer's devices."""
    axis_of = {name: axis for axis, name in names.items()}
    order = [*regions, *(axis_of[name] for name in INSIDE if name in axis_of)]
    order += [axis for axis in mesh.axis_names if axis not in order]
    grid = mesh.devices.transpose([mesh.axis_names.index(axis) for axis in order])
    sizes = [mesh.shape[axis_of[name]] if name in axis_of else 1 for name in INSIDE]

    num_shards = math.prod(mesh.shape[axis] for axis in regions)
    if form == "processes":
        grid = _of_all_processes(grid)
        num_shards = len(grid)
    axes = (REGION, *INSIDE)
    return Mesh(
        grid.reshape(num_shards, *sizes),
        axes,
        axis_types=(AxisType.Auto,) * len(axes),
    )


def _of_all_processes(grid: np.ndarray) -> np.ndarray:
    """Return the devices of every process, placed as those of this one in `grid`."""
    index = {device: i for i, device in enumerate(jax.local_devices())}
    places = [index[device] for device in grid.flat]

    by_process: dict[int, list[Any]] = {}
    for device in jax.devices():
        by_process.setdefault(device.process_index, []).append(device)
    rows = [[by_process[process][i] for i in places] for process in sorted(by_process)]
    return np.array(rows)


_with_axis = jax.jit(
    lambda arrays: {path: x[None] for path, x in arrays.items()}, donate_argnums=0
)
_without_axis = jax.jit(
    lambda arrays: {path: x[0] for path, x in arrays.items()}, donate_argnums=0
)


def _own_part(x: jax.Array) -> jax.Array:
    """Return this process's region of an array over processes, `[1, ...]`."""
    sharding = x.sharding
    assert isinstance(sharding, NamedSharding)
    assert isinstance(sharding.mesh, Mesh)

    row = jax.process_index()
    names = sharding.mesh.axis_names
    own_mesh = Mesh(
        sharding.mesh.devices[row : row + 1],
        names,
        axis_types=(AxisType.Auto,) * len(names),
    )
    shape = (1, *x.shape[1:])
    return relabeled(x, NamedSharding(own_mesh, sharding.spec), shape)
