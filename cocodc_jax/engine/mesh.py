"""The inner mesh of regions, the outer mesh of their hosts, and context meshes.

The inner mesh has the axes `(region, stage, data, expert, sequence, model)`. Programs
are manual over `region` only. Data and tensor parallelism inside a region are left to
the compiler, or to the loss function (`models/divided.py`, and `models/pipeline.py` for
pipeline stages); expert and sequence parallelism are always the loss function's.

With fewer devices than regions, each shard of the region axis holds a block of regions.
With several processes, each holds full regions, or each region spans several full
processes.

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

The caller's context mesh is hidden from our code, and ours from the user's model if it
cannot be traced under it.
"""

import collections
import contextlib
import ctypes
import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from jax.sharding import PartitionSpec as P

Class = TypeVar("Class", bound=type)

REGION = "region"
STAGE = "stage"
DATA = "data"
EXPERT = "expert"
SEQUENCE = "sequence"
MODEL = "model"
# The axes inside a region, in the mesh's order.
INSIDE = (STAGE, DATA, EXPERT, SEQUENCE, MODEL)

# glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_KEPT_BYTES = 2**31 - 1  # INT_MAX; glibc returns a larger free tail.


def use_cpu_devices(num_devices: int) -> None:
    """Request virtual CPU devices: call before the first JAX computation.

    One device per region and one for the outer state is the fast layout on a CPU: the
    same regions mapped over a single device are about 1.6 times slower. Afterwards the
    process keeps memory that it frees, see `keep_freed_memory`.

    Args:
      num_devices: number of virtual CPU devices.

    Raises:
      RuntimeError: if JAX has already started with another number.
    """
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:
        raise RuntimeError(
            f"use_cpu_devices({num_devices}) comes after JAX has started: call it "
            "before the first JAX call (in a notebook restart the kernel, and run it "
            f"first), or set JAX_NUM_CPU_DEVICES={num_devices} in the environment"
        ) from error
    keep_freed_memory()


def keep_freed_memory() -> bool:
    """Keep memory that this process frees; call before JAX starts.

    XLA's CPU backend allocates a program's temporaries at every call. glibc maps such
    large blocks and returns them to the kernel, which must find and clear new pages for
    the next call: a third of a second for every scan of a small transformer in four
    regions. Keeping them takes about three times the memory, since blocks of many sizes
    come and go.

    Only glibc's first arena can hold blocks of any size, and a thread stays with the
    arena that it started in. So all threads that start after this call share one arena.

    Returns whether memory is kept: only by glibc, and only if the environment does not
    configure it (`GLIBC_TUNABLES`, `MALLOC_...`).
    """
    if any(x == "GLIBC_TUNABLES" or x.startswith("MALLOC_") for x in os.environ):
        return False

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # Another C library, or none.
        return False

    options = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _KEPT_BYTES))
    are_set = [mallopt(name, value) for name, value in options]
    return all(are_set)


def make_mesh(
    num_regions: int,
    data: int = 1,
    model: int = 1,
    devices: Sequence[Any] | None = None,
    *,
    stage: int = 1,
    expert: int = 1,
    sequence: int = 1,
) -> Mesh:
    """Make the inner mesh, with a region axis as long as devices and regions allow.

    Args:
      num_regions: regions to train, M.
      data: devices along each region's data axis.
      model: devices along each region's model axis.
      devices: `jax.Device`s to use, in this order. By default all of them. With several
        processes, the first ones of each process, equally many, so that each has its
        own regions and can keep a device for the outer state.
      stage: devices along each region's stage axis (pipeline stages).
      expert: devices along each region's expert axis, which share batch and experts.
      sequence: devices along each region's sequence axis, which share positions.

    Returns:
      A mesh of shape `(d, stage, data, expert, sequence, model)`, d the largest divisor
      of `num_regions` for which there are devices. It uses the first devices.

    Raises:
      ValueError: if a size is below 1, one region does not fit the devices, or several
        processes cannot share the regions evenly.
    """
    sizes = {
        STAGE: stage,
        DATA: data,
        EXPERT: expert,
        SEQUENCE: sequence,
        MODEL: model,
    }
    for name, size in {"regions": num_regions, **sizes}.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")

    per_region = math.prod(sizes.values())
    num_devices = len(jax.devices() if devices is None else devices)
    if per_region > num_devices:
        raise ValueError(
            f"one region needs {' * '.join(sizes)} = "
            f"{' * '.join(map(str, sizes.values()))} = {per_region} devices, but there "
            f"are {num_devices}; lower stages, data_axis, expert_axis, sequence_axis "
            "or model_axis"
        )

    if devices is None:
        devices = _shared_devices(num_regions, per_region)
    length = next(d for d in _divisors(num_regions) if d * per_region <= len(devices))
    grid = np.array(devices[: length * per_region]).reshape(length, *sizes.values())
    axes = (REGION, *INSIDE)
    return Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))


def _divisors(num: int) -> list[int]:
    """List the divisors of `num`, largest first."""
    return [d for d in range(num, 0, -1) if num % d == 0]


def _shared_devices(num_regions: int, per_region: int) -> list[Any]:
    """List the devices of the longest region axis that processes share evenly."""
    of_process = collections.Counter(d.process_index for d in jax.devices())
    num_processes = len(of_process)
    least = min(of_process.values())
    for length in _divisors(num_regions):
        per_process, rest = divmod(length * per_region, num_processes)
        if rest or not 0 < per_process <= least:
            continue
        if per_process % per_region == 0 or per_region % per_process == 0:
            return inner_devices(per_process)

    raise ValueError(
        f"regions={num_regions}, each of {per_region} devices ({' * '.join(INSIDE)}), "
        f"cannot be shared evenly by {num_processes} processes with {least} devices "
        "each: make the regions a multiple of the processes, or data, model or stage "
        "so large that each region is so many whole processes; or pass devices"
    )


def inner_devices(per_process: int) -> list[Any]:
    """List the first devices of every process, leaving CPU processes a spare one.

    Devices of a process are adjacent, whatever their ids, so that neighbours share a
    region before processes do.
    """
    by_process: dict[int, list[Any]] = {}
    for device in jax.devices():
        by_process.setdefault(device.process_index, []).append(device)

    first_devices = []
    for _, devices in sorted(by_process.items()):
        first_devices += devices[:per_process]
    return first_devices


def is_cpu(mesh: Mesh) -> bool:
    """Return whether the devices are CPUs."""
    return mesh.devices.flat[0].platform == "cpu"


def is_one_cpu(mesh: Mesh) -> bool:
    """Return whether one CPU device computes all regions."""
    return mesh.size == 1 and is_cpu(mesh)


def batch_axes(mesh: Mesh) -> str | tuple[str, str]:
    """Return the axes over which a region's batch is sharded."""
    return (DATA, EXPERT) if mesh.shape.get(EXPERT, 1) > 1 else DATA


def wants_flat_buffer(mesh: Mesh) -> bool:
    """Return whether messages should cross regions as one flat buffer.

    Between CPU processes gloo sends one array after another, and each waits for the
    network's delay. Elsewhere the compiler schedules better by itself; and if a
    region's arrays are sharded over its devices, packing would move them.
    """
    is_whole = mesh.size == mesh.shape[REGION]
    return jax.process_count() > 1 and is_cpu(mesh) and is_whole


def spec_axes(spec: Iterable[Any]) -> list[tuple[str, ...]]:
    """Return the axes of each entry of a `PartitionSpec`, the major one first.

    >>> spec_axes(PartitionSpec("data", None, ("model", "stage")))
    [('data',), (), ('model', 'stage')]
    """
    return [
        (entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec
    ]


def regional(mesh: Mesh, inside: Iterable[Any] = ()) -> NamedSharding:
    """Shard an array `[R, ...]`: regions over the mesh, the rest as `inside`."""
    return NamedSharding(mesh, PartitionSpec(REGION, *inside))


@contextlib.contextmanager
def in_own_context() -> Iterator[None]:
    """Run as if no mesh were set; a context, or a decorator of a function."""
    hidden: contextlib.AbstractContextManager = contextlib.nullcontext()
    with contextlib.suppress(ValueError):  # Inside a trace, whose mesh must stay.
        hidden = jax.set_mesh(None)  # pyright: ignore[reportArgumentType]
    with hidden:
        yield


def methods_in_own_context(cls: Class) -> Class:
    """Decorate a class to run `__init__` and public methods `in_own_context`."""
    for name, value in list(vars(cls).items()):
        is_public = not name.startswith("_") or name == "__init__"
        if is_public and inspect.isfunction(value):
            setattr(cls, name, in_own_context()(value))
    return cls


def trace_without_mesh_if_needed(function: Callable) -> Callable:
    """Decorate a user's function: if it fails under our mesh, trace it without it.

    Flax Linen constrains boxed parameters when a mesh is in context, also by axes that
    this mesh lacks, and in shapes that `nn.DenseGeneral` makes only later. A function
    that can be traced under the mesh is, so that it can name the axes inside a region.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            try:
                with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                    return function(*args, **kwargs)
            except Exception:
                raise error from None

    return call


@contextlib.contextmanager
def explained_if_of_another_mesh() -> Iterator[None]:
    """Explain the error of a user's loss that needs its own mesh.

    Its gradient may fail too, if only the loss can be traced without our mesh.
    """
    try:
        yield
    except ValueError as error:
        if "mesh" not in str(error):
            raise
        (reason, *_) = str(error).splitlines()
        raise ValueError(
            f"loss_fn cannot be traced over the mesh of a RegionProgram: {reason}. If "
            "it enters a mesh of its own, use RegionSync after a step of your own, or "
            "synchronized as its optimizer"
        ) from error


PROCESS = "process"


def outer_device(mesh: Mesh, process: int | None = None, channel: int = 0) -> Any:
    """Return a process's device of the outer state: a CPU outside `mesh`, if any."""
    if process is None:
        process = jax.process_index()

    spare = _spare_devices(mesh, process)
    if spare:
        return spare[-1 - channel]
    return next(d for d in mesh.devices.flat if d.process_index == process)


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
        num_spare = len(_spare_devices(mesh, process))
        if outer_channels > max(num_spare, 1):
            raise ValueError(
                f"outer_channels={outer_channels} needs as many CPU devices outside "
                f"the inner mesh, but process {process} has {num_spare}; use fewer, or "
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
    they are placed along the data axis. Raises ValueError for processes that neither
    hold full regions nor form full ones.
    """
    shards = [_processes(shard) for shard in mesh.devices]
    processes = _processes(mesh.devices)
    per_shard = len(shards[0])
    is_even = {len(shard) for shard in shards} == {per_shard}
    if not is_even or (per_shard > 1 and len(processes) != per_shard * len(shards)):
        raise ValueError(
            f"the shards of the mesh's region axis are in the processes {shards}: "
            "each process must have full shards, or each shard equally many processes "
            "of its own"
        )

    devices = np.array([outer_device(mesh, p, channel) for p in processes])
    grid = process_grid(mesh) or (1, per_shard, 1, 1, 1)
    axes = (PROCESS, *INSIDE)
    return Mesh(
        devices.reshape(-1, *grid), axes, axis_types=(AxisType.Auto,) * len(axes)
    )


def process_grid(mesh: Mesh) -> tuple[int, ...] | None:
    """Return the number of a region's processes along each axis of `INSIDE`.

    None if processes do not hold equally many adjacent devices that form a block.
    """
    sizes = mesh.devices.shape[1:]
    num_processes = len(_processes(mesh.devices[0]))
    per_process, rest = divmod(math.prod(sizes), num_processes)
    for shard in mesh.devices:
        ids = [d.process_index for d in shard.flat]
        if rest or ids != list(np.repeat(_processes(shard), per_process)):
            return None

    grid = []
    remaining = per_process
    for size in reversed(sizes):  # The last axes stay within a process.
        within = math.gcd(remaining, size)
        remaining //= within
        grid.append(size // within)
        if within < size and remaining > 1:
            return None
    return tuple(reversed(grid))


def over_processes(
    axes: Sequence[tuple[str, ...]], mesh: Mesh, outer: Mesh
) -> tuple[tuple[str, ...], ...]:
    """Return which of the `axes` of each dimension span several processes of a region.

    A dimension has none if the blocks of a process are not adjacent in it. `axes` shard
    an array over the region's devices, the major axis first.
    """

    def spanning(names: tuple[str, ...]) -> tuple[str, ...]:
        over = []
        is_within = False  # Whether an axis so far divides a process's own devices.
        for name in names:
            if outer.shape[name] > 1:
                if is_within:
                    return ()
                over.append(name)
            is_within |= mesh.shape[name] > outer.shape[name]
        return tuple(over)

    return tuple(spanning(names) for names in axes)


def _processes(devices: np.ndarray) -> list[int]:
    """List the processes of `devices`, in their order."""
    return list(dict.fromkeys(d.process_index for d in devices.flat))
