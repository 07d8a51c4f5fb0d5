"""Placement of all arrays of a run: `Shardings`, and `OuterPlacement` of outer state.

Of P parameters of 4 bytes Adam keeps 8 P bytes that a step needs once, at its end. In
the pinned memory of the accelerators' hosts they leave accelerator memory for
activations, at 16 bytes per parameter and step over the host link. Leaves that are not
shaped like a parameter stay on the devices. In a segment with syncs (`segment.py`) a
TPU's compiler (libtpu 0.0.42) then peels the last step off the scan, so a message
arrives before that step.

An outer optimizer takes no accelerator memory by default, and its step does not delay
the regions. `OuterPlacement.kind` is resolved once:

    host        in full on each process's outer device, see `mesh.py`
    processes   there, divided over the processes of a region as their devices divide
                the parameters
    device      on the one CPU device that all regions compute on, where nothing could
                run concurrently
    mesh        divided over the devices of each region, in their memory (ZeRO, stage 1)
    pinned      divided likewise, in the memory of the devices' hosts, where syncs and
                inner steps share a program on accelerators
    regional    one outer model for each region, on its devices

With "pinned" a program loads one fragment at a time, each device its own shard, and
offloads it again. Leaves that are not shaped like a parameter, such as a step count,
stay on the devices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import optax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.core.state import InFlight, OuterState, RegionState, SyncState
from cocodc_jax.engine.mesh import (
    DATA,
    EXPERT,
    INSIDE,
    check_channels,
    is_one_cpu,
    outer_rows,
    outer_sharding,
    over_processes,
    process_grid,
    regional,
    spec_axes,
)
from cocodc_jax.engine.transfer import PINNED
from cocodc_jax.sync.fragments import Fragments, LeafSlice, PyTree
from cocodc_jax.sync.method import Method
from cocodc_jax.sync.needs import REGIONAL_COPIES, STALE
from cocodc_jax.sync.outer import Outer, RegionalOuter
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
        leaf_specs = jax.tree.leaves(specs)
        leaves = jax.tree.leaves(shapes)
        unflatten = jax.tree.structure(shapes).unflatten
        of_params = unflatten([regional(mesh, spec) for spec in leaf_specs])

        def like_param(leaf: Any, param: Any, sharding: NamedSharding) -> Any:
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
            of_params,
            transform_non_params=lambda _: regional(mesh),
            is_leaf=_is_masked,
        )

        fragment_specs = []
        for slices in fragments.slices:
            by_path = {
                part.path: _spec(
                    mesh, part, leaf_specs[part.leaf], leaves[part.leaf].shape
                )
                for part in slices
            }
            fragment_specs.append(by_path)

        def of_fragments(
            make: Callable[[Mesh, P], NamedSharding],
        ) -> tuple[ByPath, ...]:
            return tuple(
                {path: make(mesh, spec) for path, spec in by_path.items()}
                for by_path in fragment_specs
            )

        of_regions = cast(Any, regional(mesh))
        return cls(
            mesh=mesh,
            region=RegionState(
                params=of_params,
                opt_state=opt_state,
                key=of_regions,
                per_step=of_regions,
            ),
            params=unflatten([NamedSharding(mesh, spec) for spec in leaf_specs]),
            fragments=of_fragments(NamedSharding),
            staged=of_fragments(regional),
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


def shardings_of(tree: PyTree) -> PyTree:
    """Return the shardings of arrays, or of their shapes."""
    return jax.tree.map(lambda x: x.sharding, tree)


def with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
    """Add shardings to shapes, for restoring a checkpoint."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def _spec(mesh: Mesh, part: LeafSlice, spec: Any, shape: tuple[int, ...]) -> Any:
    """Return the spec of a leaf slice: its leaf's, if its layers or experts divide.

    For a range of experts, the expert axis shards the width instead: it would seldom
    divide the range, which in the parameters is on one device.
    """
    axis = part.axis
    if part.rows is None or len(part.rows) == shape[axis]:
        return spec
    if axis >= len(spec) or spec[axis] is None:
        return spec

    entries = [*spec[:axis], None, *spec[axis + 1 :]]
    if spec[axis] == EXPERT:
        for i, axes in enumerate(spec_axes(entries)):
            more = (*axes, EXPERT)
            if DATA in axes and shape[i] % _num_shards(mesh, more) == 0:
                entries[i] = more
        return P(*entries)

    if len(part.rows) % _num_shards(mesh, spec_axes(spec)[axis]) == 0:
        return spec
    return P(*entries)


def _num_shards(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _first_free(
    entries: Sequence[Any], shape: tuple[int, ...], num_shards: int
) -> int | None:
    """Return the first unsharded dimension that `num_shards` divides, if any.

    Args:
      entries: of a partition spec, one for each dimension; None or () is unsharded.
      shape: of the array.
      num_shards: devices along the axis that looks for a dimension.
    """
    for i, size in enumerate(shape):
        if not entries[i] and size and size % num_shards == 0:
            return i
    return None


def _like(shardings: ByPath, default: NamedSharding, tree: PyTree) -> PyTree:
    def sharding(path: tuple[Any, ...], x: Any) -> NamedSharding:
        of_leaf = named(shardings, path)
        if of_leaf is None or len(of_leaf.spec) > x.ndim:
            return default  # Of another rank: a factor or an encoding of the leaf.
        return of_leaf

    return jax.tree_util.tree_map_with_path(sharding, tree)


def named(shardings: ByPath, path: Any) -> Any:
    """Return the sharding by the end of a leaf's path, None if there is none."""
    key = getattr(path[-1], "key", None) if path else None
    return shardings.get(key) if isinstance(key, str) else None


def memory_kind(memory: str, mesh: Mesh, method: Method) -> str | None:
    """Return JAX's memory kind for `memory`; None is the devices' default.

    Raises:
      ValueError: if the devices have no host memory, or the method uses the state
        outside inner steps and merges.
    """
    check_choice("optimizer_memory", memory, MEMORIES)
    if memory == "device":
        return None

    device = mesh.devices.flat[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if PINNED not in kinds:
        raise ValueError(
            f"optimizer_memory={memory!r} needs memory of the kind {PINNED!r}, and "
            f"{device.platform} has {kinds}; use 'device'"
        )

    sync = method.sync
    if sync is not None and (sync.moments or sync.robust):
        reason = "averages moments" if sync.moments else "puts regions back"
        raise ValueError(
            f"optimizer_memory={memory!r} is not for method={method.name!r}, which "
            f"{reason}; use 'device'"
        )
    return PINNED


def load(opt_state: PyTree, shardings: PyTree) -> PyTree:
    """Load state from host memory to the devices, in a program of the mesh."""
    return _moved(opt_state, shardings, jax.memory.Space.Device)


def offload(opt_state: PyTree, shardings: PyTree) -> PyTree:
    """Invert `load`."""
    return _moved(opt_state, shardings, jax.memory.Space.Host)


def _moved(opt_state: PyTree, shardings: PyTree, space: Any) -> PyTree:
    def move(x: Any, sharding: Any) -> Any:
        is_moved = not _is_masked(x) and sharding.memory_kind == PINNED
        return jax.device_put(x, space) if is_moved else x

    return jax.tree.map(move, opt_state, shardings, is_leaf=_is_masked)


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


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
        mesh = shardings.mesh
        kind = "host"
        means = "mesh" if exchange == "program" else "outer"

        if isinstance(outer, RegionalOuter):
            kind = "regional"
            means = "mesh" if outer.group == "all" else "regions"
        elif outer.placement == "divided":
            kind = "mesh"
        elif overlap:
            memories = mesh.devices.flat[0].addressable_memories()
            is_pinned = PINNED in {memory.kind for memory in memories}
            kind = "pinned" if is_pinned else "mesh"
        elif exchange == "program" and is_one_cpu(mesh):
            kind = "device"
        elif exchange == "outer" and math.prod(process_grid(mesh) or ()) > 1:
            kind = "processes"

        return cls(kind, means, shardings)

    @property
    def is_regional(self) -> bool:
        """Whether each region has its own outer model."""
        return self.kind == "regional"

    @functools.cached_property
    def is_with_regions(self) -> bool:
        """Whether the outer state is on the regions' devices, so that nothing moves."""
        return self.kind == "device"

    @functools.cached_property
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

        def sharding(path: tuple[Any, ...], x: Any) -> Sharding:
            inside = named(self.shardings.fragments[fragment_id], path)
            return (
                host if inside is None else self._over_processes(host, inside, x.shape)
            )

        return jax.tree_util.tree_map_with_path(sharding, tree)

    def params(self) -> PyTree:
        """Return shardings of one set of parameters, of the first channel's kind."""
        if self.on_mesh or self.kind == "device":
            return self.shardings.params

        host = self.shardings.channels[0].host
        if self.kind == "host":
            return jax.tree.map(lambda _: host, self.shardings.params)
        return jax.tree.map(
            lambda inside: self._over_processes(host, inside), self.shardings.params
        )

    def lay_flight(self, fragment_id: int, flight: InFlight) -> InFlight:
        """Return the shardings of a fragment in flight."""
        lay_mean: Callable = self.lay
        if self.means == "mesh":
            lay_mean = self.shardings.of_all
        elif self.means == "regions":
            lay_mean = self.shardings.of_regions

        kept = {}
        for name, x in flight.kept.items():
            lay: Callable = lay_mean  # As what arrives with a mean.
            if name == STALE:
                lay = self.lay
            elif name in REGIONAL_COPIES:
                lay = self.shardings.of_regions
            kept[name] = lay(fragment_id, x)
        return InFlight(lay_mean(fragment_id, flight.mean), kept)

    def lay_sync(self, sync: SyncState) -> SyncState:
        """Return the shardings of all arrays of the syncs: the only rule for them."""

        def of_fragments(lay: Callable, trees: tuple[PyTree, ...]) -> tuple:
            return tuple(lay(k, tree) for k, tree in enumerate(trees))

        of_regions = self.shardings.of_regions
        return dataclasses.replace(
            sync,
            outer=OuterState(
                params=of_fragments(self.lay, sync.outer.params),
                opt_states=of_fragments(self.lay, sync.outer.opt_states),
            ),
            compressors=of_fragments(of_regions, sync.compressors),
            stale_params=of_fragments(of_regions, sync.stale_params),
            in_flight={
                (k, start_step): self.lay_flight(k, flight)
                for (k, start_step), flight in sync.in_flight.items()
            },
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
        """Return the sharding over processes of a value that is sharded `inside`."""
        assert isinstance(host, NamedSharding)
        axes = spec_axes(inside.spec)
        if len(shape) < len(axes) and shape:  # Factored: not shaped like its parameter.
            return host

        outer = cast(Mesh, host.mesh)
        spanning = list(over_processes(axes, self.shardings.mesh, outer))
        spanning += [()] * (len(shape) - len(spanning))

        # An axis that shards nothing yet goes to the first free dimension it divides.
        for axis in INSIDE:
            if axis in sum(spanning, ()) or outer.shape[axis] == 1:
                continue
            dimension = _first_free(spanning, shape, outer.shape[axis])
            if dimension is not None:
                spanning[dimension] = (axis,)

        return NamedSharding(outer, P(*(names or None for names in spanning)))

    def _divided(
        self, fragment_id: int, tree: PyTree, memory_kind: str | None = None
    ) -> PyTree:
        """Shard outer state over the devices of each region.

        A leaf shaped like a leaf slice of the fragment is sharded like it, and over the
        data axis too if the size of a free axis is a multiple of it.
        """
        mesh = self.shardings.mesh
        fragment = self.shardings.fragments[fragment_id]

        def sharding(path: tuple[Any, ...], x: Any) -> NamedSharding:
            replicated = NamedSharding(mesh, P())
            of_leaf = named(fragment, path)
            if of_leaf is None or math.prod(x.shape) <= 1:
                return replicated
            # A factored optimizer's rows and columns have fewer axes.
            if x.ndim < len(of_leaf.spec):
                return replicated

            entries = [*of_leaf.spec, *(None,) * (x.ndim - len(of_leaf.spec))]
            if DATA not in jax.tree.leaves(entries):
                dimension = _first_free(entries, x.shape, mesh.shape[DATA])
                if dimension is not None:
                    entries[dimension] = DATA

            return NamedSharding(mesh, P(*entries), memory_kind=memory_kind)

        return jax.tree_util.tree_map_with_path(sharding, tree)
