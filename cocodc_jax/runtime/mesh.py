"""Devices: the inner mesh of regions, and the device that keeps the outer state.

The inner mesh has the axes `(region, data, model)`. Programs are manual over
`region` alone; data and tensor parallelism inside a region stay with the compiler.
With fewer devices than regions each place along the region axis holds a block of
regions.

The outer state has one copy whatever the number of regions. It lives on a host
device that no region computes on: the process's own CPU where regions are on
accelerators, a spare virtual device where regions are on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

REGION, DATA, MODEL = "region", "data", "model"


def use_cpu_devices(num_devices: int) -> None:
    """Asks for virtual CPU devices: call before the first JAX computation.

    One device a region and one for the outer state is the fast layout on a CPU: the
    same regions mapped over a single device are about 1.6 times slower.

    Args:
      num_devices: how many virtual devices the CPU shall show.
    """
    jax.config.update("jax_num_cpu_devices", num_devices)


def make_mesh(
    num_regions: int,
    data: int = 1,
    model: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """The inner mesh, with a region axis as long as devices and regions allow.

    Args:
      num_regions: regions to train, M.
      data: devices along each region's data axis.
      model: devices along each region's model axis.
      devices: `jax.Device`s to build from; all of them by default.

    Returns:
      A mesh of shape `(d, data, model)`, d the largest divisor of `num_regions` for
      which there are devices. It takes the first devices.

    Raises:
      ValueError: if a size is below 1 or one region does not fit the devices.
    """
    for name, size in (("regions", num_regions), ("data", data), ("model", model)):
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    devices = jax.devices() if devices is None else devices
    inside = data * model
    if inside > len(devices):
        raise ValueError(
            f"one region needs data * model = {data} * {model} = {inside} devices, "
            f"but there are {len(devices)}; lower data_axis or model_axis"
        )
    most = len(devices) // inside
    length = max(
        d for d in range(1, num_regions + 1) if num_regions % d == 0 and d <= most
    )
    grid = np.array(devices[: length * inside]).reshape(length, data, model)
    return Mesh(grid, (REGION, DATA, MODEL), axis_types=(AxisType.Auto,) * 3)


def outer_device(mesh: Mesh) -> Any:
    """The device that keeps the outer state: a CPU device outside of `mesh` if any."""
    used = set(mesh.devices.flat)
    try:
        spare = [d for d in jax.local_devices(backend="cpu") if d not in used]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out.
        spare = []
    return spare[-1] if spare else next(iter(mesh.devices.flat))


def regional(mesh: Mesh, inside: Iterable[Any] = ()) -> NamedSharding:
    """Sharding of an array `[R, ...]`: regions over the mesh, the rest as `inside`."""
    return NamedSharding(mesh, PartitionSpec(REGION, *inside))
