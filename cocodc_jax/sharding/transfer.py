"""Moving values between devices, in one process or in several.

With several processes an array may lie on devices of all of them, and JAX moves
nothing between two such arrays' devices. But every process has what it needs at hand:
a value that is the same for all regions is whole on each process's own devices, and a
regional value's rows are where the regions are. So each process moves its own, shard by
shard (`shards.py`), and what results is declared to be one array again. Nothing here
waits, or crosses regions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.sharding import shards

PyTree = Any
# The memory of an accelerator's host that the accelerator reaches by itself.
PINNED = "pinned_host"


def put(tree: PyTree, shardings: Any) -> PyTree:
    """Place host values, the same in every process, where `shardings` say.

    Args:
      tree: arrays, or anything NumPy takes.
      shardings: one for all leaves, or a tree of them.
    """

    def one(x, sharding):
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)

    return _map(one, tree, shardings)


def put_own(x: np.ndarray, sharding: Sharding, num_rows: int, axis: int) -> jax.Array:
    """Place host values of which every process has its own regions' rows.

    Args:
      x: this process's rows along `axis`, in order, whole; the processes of one region
        have the same.
      sharding: rows over shards, of which each has equally many; the rest in any way.
      num_rows: of all processes.
      axis: the region axis.
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
    """Move device arrays that are the same for all regions to other devices.

    All at once, as every call costs as much as ten arrays do. What lies there already
    is handed on as it is, and not copied.

    Args:
      tree: arrays of which every process has what its devices shall have, or which can
        be made whole on all devices first.
      shardings: one for all leaves, or a tree of them.
    """
    leaves, treedef = jax.tree.flatten(tree)
    where = [shardings] * len(leaves)
    if not isinstance(shardings, Sharding):
        where = treedef.flatten_up_to(shardings)
    pairs = list(zip(leaves, where, strict=True))
    if all(x.sharding == sharding for x, sharding in pairs):
        return tree
    if all(x.is_fully_addressable and y.is_fully_addressable for x, y in pairs):
        return treedef.unflatten(jax.device_put(leaves, where))

    def one(x, sharding):
        if x.is_fully_addressable and sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        if not shards.are_at_hand(x.sharding, sharding, x.shape):
            x = _replicated(x)
        return shards.moved(x, sharding)

    return treedef.unflatten([one(*pair) for pair in pairs])


def declare(tree: PyTree, sharding: Sharding) -> PyTree:
    """Declare what every process has alike on a device of its own to be one array.

    Args:
      tree: arrays of one device.
      sharding: whole on such a device of every process.
    """
    if sharding.is_fully_addressable:
        return tree
    return jax.tree.map(
        lambda x: jax.make_array_from_single_device_arrays(x.shape, sharding, [x]), tree
    )


def whole(x: jax.Array) -> np.ndarray:
    """Read an array; all processes that hold a part of it have to."""
    return np.asarray(x if x.is_fully_addressable else _replicated(x))


def out_of_host_memory(tree: PyTree) -> PyTree:
    """Take arrays that lie in the memory of accelerators' hosts onto the accelerators.

    Each device takes what its host keeps for it; other arrays stay where they are.
    """

    def one(x):
        if x.sharding.memory_kind != PINNED:
            return x
        return jax.device_put(x, x.sharding.with_memory_kind("device"))

    return jax.tree.map(one, tree)


def gather_rows(tree: PyTree, sharding: Sharding) -> PyTree:
    """Move regional arrays `[R, ...]` to one device a process, rows side by side.

    Args:
      tree: arrays with their leading axis over regions, whole inside each region; or
        `[R, n]` with columns over the devices of a region, of which each process moves
        its own devices' from these one by one.
      sharding: of the result: all rows on a device; or of arrays `[R, n]` the rows over
        one device of each process, in the order of the processes, and where a region
        has several an equal share of the columns on each, the last ones padded.
    """

    def one(x):
        if _has_divided_columns(x):
            return shards.moved(x, sharding)
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        num_shares = _num_shares(sharding)
        width = -(-x.shape[1] // num_shares)
        shape = (x.shape[0], width * num_shares)
        ((device, index),) = _own_indices(sharding, shape).items()
        first = index[1].start or 0
        rows = [
            jax.device_put(_columns(part, first, width), device)
            for part in _own_rows(x)
        ]
        mine = rows[0] if len(rows) == 1 else jnp.concatenate(rows)
        return jax.make_array_from_single_device_arrays(shape, sharding, [mine])

    return jax.tree.map(one, tree)


def local_rows(x: jax.Array, axis: int = 0) -> np.ndarray:
    """Read what this process holds of an array over regions; waits for it.

    Args:
      x: whole inside each region.
      axis: the region axis.
    """
    if x.is_fully_addressable:
        return np.asarray(x)
    return np.concatenate([np.asarray(part) for part in _own_rows(x, axis)], axis)


def first_local_row(x: jax.Array, axis: int = 0) -> int:
    """Find the first region that this process holds of such an array."""
    if x.is_fully_addressable:
        return 0
    return min(_starts(x, axis))


def _own_rows(x: jax.Array, axis: int = 0) -> list[jax.Array]:
    """List this process's shards along `axis`, in order."""
    found = {_start(shard, axis): shard.data for shard in x.addressable_shards}
    return [found[start] for start in sorted(found)]


def _starts(x: jax.Array, axis: int) -> list[int]:
    return [_start(shard, axis) for shard in x.addressable_shards]


def _start(shard: Any, axis: int) -> int:
    return shard.index[axis].start or 0


def _own_indices(sharding: Sharding, shape: tuple[int, ...]) -> dict[Any, Any]:
    """Which part of an array each device of this process has."""
    return dict(sharding.addressable_devices_indices_map(shape))


def _num_shares(sharding: Sharding) -> int:
    """Into how many parts `sharding` divides the columns of an array `[R, n]`."""
    assert isinstance(sharding, NamedSharding)
    over = sharding.spec[1] if len(sharding.spec) > 1 else ()
    return math.prod(sharding.mesh.shape[axis] for axis in over or ())


def _has_divided_columns(x: jax.Array) -> bool:
    if x.is_fully_replicated or not isinstance(x.sharding, NamedSharding):
        return False
    return len(x.sharding.spec) > 1 and x.sharding.spec[1] is not None


def _columns(x: jax.Array, first: int, width: int) -> jax.Array:
    """Columns of `[r, n]` from `first` on, with zeros after the last, `[r, width]`."""
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
    """One program for every mesh: a new one each time would compile at every sync."""
    return jax.jit(lambda x: x, out_shardings=sharding)


def _map(fn, tree: PyTree, shardings: Any) -> PyTree:
    if isinstance(shardings, Sharding):
        return jax.tree.map(lambda x: fn(x, shardings), tree)
    return jax.tree.map(fn, tree, shardings)
