"""Devices of the outer state: one copy in each process, or in each region.

The outer state is on a host device that no region computes on: the process's own CPU if
regions are on accelerators, a spare virtual device if regions are on the CPU. If all
regions share one CPU device and messages are averaged there, the outer state is on that
device too: nothing runs concurrently, and moving arrays would take more time than the
outer step.

With several processes these devices form the *outer mesh*, over which messages cross
while the inner mesh computes. Its axes are `PROCESS` and those of `INSIDE`. If a region
has several processes, each has the position of its block of the region's devices. So an
array that is sharded over the axes inside a region is sharded over its processes in the
same way, and each process handles its devices' share of the message. A device runs one
program after another. For several messages in flight at once there can be several outer
meshes of the same shape, the *channels*: each has another spare device of every
process, with its own connections.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.sharding.mesh import INSIDE

PROCESS = "process"


def outer_device(mesh: Mesh, process: int | None = None, channel: int = 0) -> Any:
    """Return a process's device of the outer state: a CPU outside `mesh`, if any."""
    process = jax.process_index() if process is None else process
    spare = _spare_devices(mesh, process)
    own = [d for d in mesh.devices.flat if d.process_index == process]
    return spare[-1 - channel] if spare else own[0]


def _spare_devices(mesh: Mesh, process: int) -> list[Any]:
    """List the CPU devices of a process outside of the inner mesh."""
    used = set(mesh.devices.flat)
    try:
        cpus = jax.devices("cpu")
    except RuntimeError:  # JAX_PLATFORMS excludes the CPU.
        return []
    return [d for d in cpus if d.process_index == process and d not in used]


def check_channels(mesh: Mesh, outer_channels: int) -> None:
    """Refuse more channels than there are devices for."""
    for process in _processes(mesh.devices):
        there = len(_spare_devices(mesh, process))
        if outer_channels > max(there, 1):
            raise ValueError(
                f"outer_channels={outer_channels} needs as many CPU devices outside "
                f"the inner mesh, but process {process} has {there}; use fewer, or "
                "ask for more devices (`use_cpu_devices`)"
            )


def outer_sharding(mesh: Mesh, channel: int = 0, spec: P | None = None) -> Sharding:
    """Return the sharding over the outer devices; it replicates by default."""
    if jax.process_count() == 1:
        return SingleDeviceSharding(outer_device(mesh, channel=channel))
    return NamedSharding(outer_mesh(mesh, channel), spec or P())


def outer_rows(mesh: Mesh, channel: int = 0) -> Sharding:
    """Shard messages `[R, n]` by rows over regions, by columns over their processes."""
    return outer_sharding(mesh, channel, P(PROCESS, INSIDE))


def outer_mesh(mesh: Mesh, channel: int = 0) -> Mesh:
    """Make a mesh of the outer devices of all processes, in the order of their regions.

    If the processes of a region do not hold blocks of its devices, see `process_grid`,
    they are placed along the data axis. Refuses processes that neither hold full
    regions nor make up full ones.
    """
    shards = [_processes(shard) for shard in mesh.devices]
    processes = _processes(mesh.devices)
    members = len(shards[0])
    is_even = {len(shard) for shard in shards} == {members}
    if not is_even or (members > 1 and len(processes) != members * len(shards)):
        raise ValueError(
            f"the shards of the mesh's region axis are in the processes {shards}: "
            "each process must have full shards, or each shard equally many processes "
            "of its own"
        )
    devices = np.array([outer_device(mesh, p, channel) for p in processes])
    devices = devices.reshape(-1, *(process_grid(mesh) or (1, members, 1, 1, 1)))
    axes = (PROCESS, *INSIDE)
    return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))


def process_grid(mesh: Mesh) -> tuple[int, ...] | None:
    """Return how many processes of a region there are along each axis of `INSIDE`.

    None if processes do not hold equally many adjacent devices that form a block.
    """
    sizes = mesh.devices.shape[1:]
    num = len(_processes(mesh.devices[0]))
    each, rest = divmod(math.prod(sizes), num)
    for shard in mesh.devices:
        ids = [d.process_index for d in shard.flat]
        if rest or ids != list(np.repeat(_processes(shard), each)):
            return None
    grid = []
    for size in reversed(sizes):  # The last axes stay within a process.
        own = math.gcd(each, size)
        each //= own
        grid.append(size // own)
        if own < size and each > 1:
            return None
    return tuple(reversed(grid))


def over_processes(
    axes: Sequence[tuple[str, ...]], mesh: Mesh, outer: Mesh
) -> tuple[tuple[str, ...], ...]:
    """Return which of the `axes` of each dimension span several processes of a region.

    No axis of a dimension if the blocks of a process are not adjacent there. `axes`
    shard an array over the region's devices, the major axis first.
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
    """List the processes of `devices`, in their order."""
    return list(dict.fromkeys(d.process_index for d in devices.flat))
