"""Devices that keep the outer state: one copy in each process, or in each region.

It lives on a host device that no region computes on: the process's own CPU where
regions are on accelerators, a spare virtual device where regions are on the CPU. Where
all regions share one CPU device and messages are averaged there, it lies beside them:
nothing is left to run meanwhile, and moving arrays took more time than the outer step.
With several processes these devices form the *outer mesh*, over which messages can
cross while the inner mesh computes. Its axes are `(process, stage, data, sequence,
model)`: where a region is several processes, each holds a block of the region's devices
and stands where that block does, so that what lies over the axes inside a region lies
over its processes alike. Each has its devices' share of the region's message. A device
runs one program after another. So that several messages can cross at once there may be
several outer meshes of the same shape, the *channels*: another spare device of every
process each, with connections of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from cocodc_jax.sharding.mesh import INSIDE

PROCESS = "process"


def outer_device(mesh: Mesh, process: int | None = None, channel: int = 0) -> Any:
    """Find the device that keeps the outer state: a CPU outside of `mesh` if any.

    Args:
      mesh: the inner mesh.
      process: whose; None is this one.
      channel: of which of the outer meshes; `check_channels` tells whether there are as
        many.
    """
    process = jax.process_index() if process is None else process
    spare = _spare_devices(mesh, process)
    own = [d for d in mesh.devices.flat if d.process_index == process]
    return spare[-1 - channel] if spare else own[0]


def _spare_devices(mesh: Mesh, process: int) -> list[Any]:
    """List the CPU devices of a process outside of the inner mesh."""
    used = set(mesh.devices.flat)
    try:
        cpus = jax.devices("cpu")
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out.
        return []
    return [d for d in cpus if d.process_index == process and d not in used]


def check_channels(mesh: Mesh, outer_channels: int) -> None:
    """Refuse more channels than there are devices for.

    Raises:
      ValueError: naming the process that has too few.
    """
    for process in _processes(mesh.devices):
        there = len(_spare_devices(mesh, process))
        if outer_channels > max(there, 1):
            raise ValueError(
                f"outer_channels={outer_channels} needs as many CPU devices outside "
                f"the inner mesh, but process {process} has {there}; use fewer, or "
                "ask for more devices (`use_cpu_devices`)"
            )


def outer_sharding(mesh: Mesh, channel: int = 0) -> Sharding:
    """Tell where outer state lies: whole on the outer device of every process."""
    if jax.process_count() == 1:
        return SingleDeviceSharding(outer_device(mesh, channel=channel))
    return NamedSharding(outer_mesh(mesh, channel), PartitionSpec())


def outer_rows(mesh: Mesh, channel: int = 0) -> Sharding:
    """Tell where messages `[R, n]` lie to cross: with their regions' processes.

    The processes of a region have equal shares of its columns.
    """
    if jax.process_count() == 1:
        return SingleDeviceSharding(outer_device(mesh, channel=channel))
    return NamedSharding(outer_mesh(mesh, channel), PartitionSpec(PROCESS, INSIDE))


def outer_mesh(mesh: Mesh, channel: int = 0) -> Mesh:
    """Make a mesh of the outer devices of all processes, in the order of their regions.

    Where the processes of a region hold no blocks of its devices, see `process_grid`,
    they stand along the data axis.

    Args:
      mesh: the inner mesh.
      channel: which of the outer meshes.

    Raises:
      ValueError: if processes neither hold whole regions nor make up whole ones.
    """
    shards = [_processes(shard) for shard in mesh.devices]
    processes = _processes(mesh.devices)
    members = len(shards[0])
    is_even = {len(shard) for shard in shards} == {members}
    if not is_even or (members > 1 and len(processes) != members * len(shards)):
        raise ValueError(
            f"the shards of the mesh's region axis lie in the processes {shards}: "
            "each process must hold whole shards, or each shard be so many processes "
            "of its own"
        )
    devices = np.array([outer_device(mesh, p, channel) for p in processes])
    axes = (PROCESS, *INSIDE)
    grid = process_grid(mesh) or (1, members, 1, 1)
    return Mesh(
        devices.reshape(-1, *grid), axes, axis_types=(AxisType.Auto,) * len(axes)
    )


def process_grid(mesh: Mesh) -> tuple[int, ...] | None:
    """Tell how many processes of a region stand along each of the axes inside it.

    Args:
      mesh: the inner mesh, whose regions lie in one process or in several alike.

    Returns:
      A number for each of `INSIDE`, 1 where regions are one process; None where
      processes do not hold equally many devices that stand together in the mesh's order
      and make up a block of it.
    """
    sizes = mesh.devices.shape[1:]
    num = len(_processes(mesh.devices[0]))
    each, rest = divmod(math.prod(sizes), num)
    for shard in mesh.devices:
        ids = [d.process_index for d in shard.flat]
        if rest or ids != list(np.repeat(_processes(shard), each)):
            return None
    grid = []
    for size in reversed(sizes):  # The last axes are of one process first.
        own = math.gcd(each, size)
        each //= own
        grid.append(size // own)
        if own < size and each > 1:
            return None
    return tuple(reversed(grid))


def over_processes(
    axes: Sequence[tuple[str, ...]], mesh: Mesh, outer: Mesh
) -> tuple[tuple[str, ...], ...]:
    """Tell which axes divide an array over the processes of a region.

    Args:
      axes: those that divide it over the region's devices, for each dimension, the
        major one first.
      mesh: the inner mesh.
      outer: the outer mesh, as `process_grid` has it.

    Returns:
      For each dimension those of its axes along which there are several processes; none
      of them where the blocks of a process are no neighbours.
    """

    def kept(names: tuple[str, ...]) -> tuple[str, ...]:
        found, is_inside = [], False
        for name in names:
            if outer.shape[name] > 1:
                if is_inside:
                    return ()
                found.append(name)
            is_inside |= mesh.shape[name] > outer.shape[name]
        return tuple(found)

    return tuple(map(kept, axes))


def _processes(devices: np.ndarray) -> list[int]:
    """List of which processes `devices` are, in their order."""
    return list(dict.fromkeys(d.process_index for d in devices.flat))
