"""Move an array between devices shard by shard; each process moves its own shards.

A device cuts its new shard out of a shard that its process holds, or joins it from
several of them. No device materializes the full array.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

# Start and end of a part in each dimension.
Box = tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=4096)
def are_at_hand(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> bool:
    """Return whether every process holds the shards that its devices will need.

    Args:
      source: current sharding of an array.
      target: new sharding.
      shape: of the array.
    """
    there: dict[int, set[Box]] = {}
    for device, index in source.devices_indices_map(shape).items():
        there.setdefault(device.process_index, set()).add(_box(index, shape))
    return all(
        _is_covered(_box(index, shape), there.get(device.process_index, set()))
        for device, index in target.devices_indices_map(shape).items()
    )


def moved(x: jax.Array, target: Sharding) -> jax.Array:
    """Move an array whose needed shards are addressable; waits for nothing."""
    shape, source = x.shape, {}
    for shard in x.addressable_shards:
        source.setdefault(_box(shard.index, shape), shard.data)
    parts = [
        _made(
            _box(index, shape),
            source,
            SingleDeviceSharding(device, memory_kind=target.memory_kind),
        )
        for device, index in target.addressable_devices_indices_map(shape).items()
    ]
    return jax.make_array_from_single_device_arrays(shape, target, parts)


def _made(box: Box, source: dict[Box, jax.Array], where: Sharding) -> jax.Array:
    """Cut or join a part on its new device."""
    for other, data in source.items():
        if _is_inside(box, other):
            return jax.device_put(_cut(data, box, other), where)
    inside = sorted(other for other in source if _is_inside(other, box))
    parts = {
        tuple(first for first, _ in other): jax.device_put(source[other], where)
        for other in inside
    }
    for dimension in reversed(range(len(box))):
        rows: dict[tuple[int, ...], list[jax.Array]] = {}
        for starts, part in parts.items():
            rows.setdefault(starts[:dimension], []).append(part)
        parts = {
            starts: each[0] if len(each) == 1 else jnp.concatenate(each, dimension)
            for starts, each in rows.items()
        }
    return parts[()]


def _cut(x: jax.Array, box: Box, of: Box) -> jax.Array:
    """Cut `box` out of the shard that is `of`."""
    if box == of:
        return x
    return x[
        tuple(
            slice(a - first, b - first)
            for (a, b), (first, _) in zip(box, of, strict=True)
        )
    ]


def _is_covered(box: Box, there: set[Box]) -> bool:
    if any(_is_inside(box, other) for other in there):
        return True
    # Shards of one array are equal or disjoint.
    return sum(_size(x) for x in there if _is_inside(x, box)) == _size(box)


def _is_inside(box: Box, other: Box) -> bool:
    return all(
        first <= a and b <= last
        for (a, b), (first, last) in zip(box, other, strict=True)
    )


def _size(box: Box) -> int:
    return math.prod(b - a for a, b in box)


def _box(index: Any, shape: tuple[int, ...]) -> Box:
    return tuple(
        part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
    )
