"""Move values between devices, in one process or in several.

With several processes an array may be sharded over devices of all of them, and JAX
cannot move such an array to other devices. But each process holds what it needs: the
full value if it is equal in all regions, else its regions' rows. So each device cuts
its new shard out of one that its process holds, or joins it from several, and the
results are declared to be one global array. Nothing here waits or communicates between
regions except `gather`, a collective of small values of all processes.
"""

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

PyTree = Any
# Host memory that an accelerator accesses directly.
PINNED = "pinned_host"
# Start and end of a part in each dimension.
Box = tuple[tuple[int, int], ...]


def put(tree: PyTree, shardings: Any) -> PyTree:
    """Place values, equal in every process, by one sharding or a tree of them.

    The values are on hosts, or on devices of this process or of all processes.
    """

    def place(x: Any, sharding: Sharding) -> jax.Array:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return move(x, sharding)
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)

    if isinstance(shardings, Sharding):
        return jax.tree.map(lambda x: place(x, shardings), tree)
    return jax.tree.map(place, tree, shardings)


def put_own(x: np.ndarray, sharding: Sharding, num_rows: int, axis: int) -> jax.Array:
    """Place host values of which every process has its own regions' rows, in order.

    The processes of one region pass the same rows. `sharding` divides the `num_rows`
    rows along `axis` evenly, and other axes in any way.
    """
    shape = (*x.shape[:axis], num_rows, *x.shape[axis + 1 :])
    indices = _own_indices(sharding, shape).values()
    starts = sorted({index[axis].start or 0 for index in indices})
    size = x.shape[axis] // len(starts)

    def part(index: Any) -> np.ndarray:
        first = starts.index(index[axis].start or 0) * size
        rows = slice(first, first + size)
        return x[(*index[:axis], rows, *index[axis + 1 :])]

    return jax.make_array_from_callback(shape, sharding, part)


def move(tree: PyTree, shardings: Any) -> PyTree:
    """Move device arrays that are equal in all regions to other devices.

    All leaves move in one call, as a call costs as much as ten arrays. Arrays that are
    already there are returned without a copy. Arrays whose new shards are not
    addressable in every process are replicated on all devices first.
    """
    leaves, treedef = jax.tree.flatten(tree)
    if isinstance(shardings, Sharding):
        targets = [shardings] * len(leaves)
    else:
        targets = treedef.flatten_up_to(shardings)

    pairs = list(zip(leaves, targets, strict=True))
    if all(x.sharding == target for x, target in pairs):
        return tree
    if all(x.is_fully_addressable and y.is_fully_addressable for x, y in pairs):
        return treedef.unflatten(jax.device_put(leaves, targets))

    def move_leaf(x: jax.Array, target: Sharding) -> jax.Array:
        if x.is_fully_addressable and target.is_fully_addressable:
            return jax.device_put(x, target)
        if not _are_at_hand(x.sharding, target, x.shape):
            x = _replicated(x)
        return _moved(x, target)

    return treedef.unflatten([move_leaf(x, target) for x, target in pairs])


def borrow(tree: PyTree, shardings: PyTree) -> PyTree:
    """Move arrays for programs that do not donate them.

    If a replicated array is on the target device already, the result shares its memory.
    """
    leaves, treedef = jax.tree.flatten(tree)
    pairs = zip(leaves, treedef.flatten_up_to(shardings), strict=True)
    copies = [_copy_on(x, target) for x, target in pairs]
    if any(copy is None for copy in copies):
        return move(tree, shardings)
    return treedef.unflatten(copies)


def _copy_on(x: jax.Array, target: Sharding) -> jax.Array | None:
    """Return the first copy of a replicated array; None if it is elsewhere."""
    if not x.is_fully_replicated or not x.is_fully_addressable:
        return None
    copy = x.addressable_data(0)
    return copy if copy.sharding == target else None


def declare(tree: PyTree, sharding: Sharding) -> PyTree:
    """Make one global array of equal arrays, one on a device of every process."""
    if sharding.is_fully_addressable:
        return tree
    return jax.tree.map(
        lambda x: jax.make_array_from_single_device_arrays(x.shape, sharding, [x]), tree
    )


def whole(x: jax.Array) -> np.ndarray:
    """Read a full array; all processes that hold a part of it must call this."""
    return np.asarray(x if x.is_fully_addressable else _replicated(x))


def to_device_memory(tree: PyTree) -> PyTree:
    """Copy arrays from host to device memory, each device its own shard."""

    def load(x: jax.Array) -> jax.Array:
        if x.sharding.memory_kind != PINNED:
            return x
        return jax.device_put(x, x.sharding.with_memory_kind("device"))

    return jax.tree.map(load, tree)


def gather_rows(tree: PyTree, sharding: Sharding) -> PyTree:
    """Move regional arrays `[R, ...]` to one device per process, rows concatenated.

    Arrays are replicated inside each region, or `[R, n]` with columns sharded over the
    devices of a region, of which each process moves its own devices' columns.
    `sharding` has all rows on one device. For arrays `[R, n]` it may have the rows over
    one device of each process, in the order of the processes; the processes of a region
    then have equal shares of the columns, padded at the end.
    """

    def move_rows(x: jax.Array) -> jax.Array:
        if _has_divided_columns(x):
            return _moved(x, sharding)
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)

        assert isinstance(sharding, NamedSharding)
        axes = sharding.spec[1] if len(sharding.spec) > 1 else ()
        num_shares = math.prod(sharding.mesh.shape[axis] for axis in axes or ())
        width = -(-x.shape[1] // num_shares)
        shape = (x.shape[0], width * num_shares)

        ((device, index),) = _own_indices(sharding, shape).items()
        first = index[1].start or 0
        rows = [
            jax.device_put(_columns(part, first, width), device)
            for part in _own_rows(x)
        ]
        shard = rows[0] if len(rows) == 1 else jnp.concatenate(rows)
        return jax.make_array_from_single_device_arrays(shape, sharding, [shard])

    return jax.tree.map(move_rows, tree)


def local_rows(x: jax.Array, axis: int = 0) -> np.ndarray:
    """Read this process's rows of an array over regions; waits for it."""
    if x.is_fully_addressable:
        return np.asarray(x)
    return np.concatenate([np.asarray(part) for part in _own_rows(x, axis)], axis)


def first_local_row(x: jax.Array, axis: int = 0) -> int:
    """Return the index of this process's first region in such an array."""
    return min(_start(shard, axis) for shard in x.addressable_shards)


def _own_rows(x: jax.Array, axis: int = 0) -> list[jax.Array]:
    """List this process's shards along `axis`, in order."""
    by_start = {_start(shard, axis): shard.data for shard in x.addressable_shards}
    return [by_start[start] for start in sorted(by_start)]


def _start(shard: Any, axis: int) -> int:
    return shard.index[axis].start or 0


def _own_indices(sharding: Sharding, shape: tuple[int, ...]) -> dict[Any, Any]:
    return dict(sharding.addressable_devices_indices_map(shape))


def _has_divided_columns(x: jax.Array) -> bool:
    if x.is_fully_replicated or not isinstance(x.sharding, NamedSharding):
        return False
    return len(x.sharding.spec) > 1 and x.sharding.spec[1] is not None


def _columns(x: jax.Array, first: int, width: int) -> jax.Array:
    """Return columns of `[r, n]` from `first` on, zero-padded to `[r, width]`."""
    if first == 0 and width == x.shape[1]:
        return x
    part = x[:, first : first + width]
    return jnp.pad(part, ((0, 0), (0, width - part.shape[1])))


def _replicated(x: jax.Array) -> jax.Array:
    if x.is_fully_replicated:
        return x
    assert isinstance(x.sharding, NamedSharding)
    return _replicate(NamedSharding(x.sharding.mesh, P()))(x)


@functools.cache
def _replicate(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Cache the program by sharding: a new one would compile at every sync."""
    return jax.jit(lambda x: x, out_shardings=sharding)


@functools.lru_cache(maxsize=4096)
def _are_at_hand(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> bool:
    """Return whether every process holds the shards that its devices will need."""
    there: dict[int, set[Box]] = {}
    for device, index in source.devices_indices_map(shape).items():
        there.setdefault(device.process_index, set()).add(_box(index, shape))
    return all(
        _is_covered(_box(index, shape), there.get(device.process_index, set()))
        for device, index in target.devices_indices_map(shape).items()
    )


def _moved(x: jax.Array, target: Sharding) -> jax.Array:
    """Move an array whose needed shards are addressable; waits for nothing."""
    shape = x.shape
    source: dict[Box, jax.Array] = {}
    for shard in x.addressable_shards:
        source.setdefault(_box(shard.index, shape), shard.data)

    parts = []
    for device, index in target.addressable_devices_indices_map(shape).items():
        on_device = SingleDeviceSharding(device, memory_kind=target.memory_kind)
        parts.append(_made(_box(index, shape), source, on_device))
    return jax.make_array_from_single_device_arrays(shape, target, parts)


def _made(box: Box, source: dict[Box, jax.Array], on_device: Sharding) -> jax.Array:
    """Cut or join a part on its new device."""
    for other, data in source.items():
        if box == other:
            return jax.device_put(data, on_device)
        if _is_inside(box, other):
            cut = tuple(
                slice(start - first, end - first)
                for (start, end), (first, _) in zip(box, other, strict=True)
            )
            return jax.device_put(data[cut], on_device)

    parts = {
        tuple(first for first, _ in other): jax.device_put(source[other], on_device)
        for other in sorted(source)
        if _is_inside(other, box)
    }
    # Join along one dimension after the other, the last first.
    for dimension in reversed(range(len(box))):
        rows: dict[tuple[int, ...], list[jax.Array]] = {}
        for starts, part in parts.items():
            rows.setdefault(starts[:dimension], []).append(part)
        parts = {
            starts: row[0] if len(row) == 1 else jnp.concatenate(row, dimension)
            for starts, row in rows.items()
        }
    return parts[()]


def _is_covered(box: Box, there: set[Box]) -> bool:
    if any(_is_inside(box, other) for other in there):
        return True
    # Shards of one array are equal or disjoint.
    return sum(_size(x) for x in there if _is_inside(x, box)) == _size(box)


def _is_inside(box: Box, other: Box) -> bool:
    pairs = zip(box, other, strict=True)
    return all(first <= a and b <= last for (a, b), (first, last) in pairs)


def _size(box: Box) -> int:
    return math.prod(b - a for a, b in box)


def _box(index: Any, shape: tuple[int, ...]) -> Box:
    pairs = zip(index, shape, strict=True)
    return tuple(part.indices(size)[:2] for part, size in pairs)


def gather(value: Any) -> list[Any]:
    """Return every process's value, in the order of their ids; wait for all."""
    if jax.process_count() == 1:
        return [value]

    # Later collectives use all devices, including the outer mesh. Two concurrent ones
    # between the same devices could start in different orders in different processes.
    jax.block_until_ready(jax.live_arrays())

    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    longest = int(np.max(multihost_utils.process_allgather(np.array(len(mine)))))
    padded = np.full(longest, ord(" "), np.uint8)
    padded[: len(mine)] = mine
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(np.asarray(row).tobytes()) for row in rows]
