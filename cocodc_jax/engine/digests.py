r"""Digests of outer fragments: a few bytes by which regions compare their outer models.

The values of a leaf are distributed to lanes, a row at a time. With b the bits of a
lane's next value x, t a random sign of the row, and a, p, q = 0 at first,

    a <- (a ^ b) C mod 2^32,  a <- a ^ a >> 15,    p <- p + t x,    q <- q + x^2

and at the end, with h and h' hashes and s a random sign of the lane,

    first = sum a (h | 1),  second = sum (a ^ a >> 13) (h' | 1)    mod 2^32
    at    = sum s p / sqrt(n),   scale = sqrt(sum q / n)

Every step is a bijection of a and every multiplier is odd, so one changed value always
changes `first`. Sums of integers modulo 2^32 do not depend on their order, and those of
floats are short. (One pass at the speed of memory; XLA's sums of integers are not.)

A digest is one program on the outer device. It is read once it is ready, so nothing
waits for it.
"""

import collections
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.elastic.messages import Mark, SyncId
from cocodc_jax.sync.fragments import Fragment

_LANES = 1 << 14
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


class Marker:
    """Makes the marks of a region's outer fragments."""

    def __init__(self):
        # Arrays; the type that JAX declares has no `is_ready`.
        self._pending: collections.deque[tuple[SyncId, Any]] = collections.deque()

    def applied(self, sync: SyncId, part: Fragment) -> None:
        """Begin the digest of an outer fragment after a sync; does not wait."""
        self._pending.append((sync, digest(here(part))))

    def ready(self) -> Sequence[Mark]:
        """Return the marks whose digests are ready, in order; does not wait."""
        marks = []
        while self._pending and self._pending[0][1].is_ready():
            sync, value = self._pending.popleft()
            marks.append(mark(sync, np.asarray(value)))
        return marks


def here(part: Fragment) -> Fragment:
    """Return this process's copy of a fragment.

    Each process of a region has a copy, and computes its digest without the others.
    """
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), part)


def mark(sync: SyncId, value: np.ndarray) -> Mark:
    """Return the mark of a digest, uint32 `[4]`."""
    first = int(value[0])
    second = int(value[1])
    at, scale = (float(x) for x in value[2:].view(np.float32))
    if not (math.isfinite(at) and math.isfinite(scale)):
        # Values that are not finite are compared only by their bits.
        at = 0
        scale = 0
    return Mark(sync, first << 31 | second >> 1, at, scale)


@jax.jit
def digest(part: Fragment) -> jax.Array:
    """Return the digest of a fragment.

    Args:
      part: arrays of any shapes and dtypes.

    Returns:
      uint32 `[4]`: `first`, `second`, and the bits of `at` and `scale` as float32.
    """
    first = jnp.uint32(0)
    second = jnp.uint32(0)
    at = jnp.float32(0)
    square = jnp.float32(0)
    num = 0
    for number, leaf in enumerate(jax.tree.leaves(part)):
        if not leaf.size:
            continue
        if jnp.iscomplexobj(leaf):
            leaf = jnp.stack([leaf.real, leaf.imag])
        lanes = _over_rows(leaf.reshape(-1))

        hashed = _hash(jax.lax.iota(jnp.uint32, lanes.bits.size), number)
        first += jnp.sum(lanes.bits * (hashed | 1), dtype=jnp.uint32)
        again = hashed * jnp.uint32(0x27D4EB2F) + jnp.uint32(0x165667B1)
        mixed = lanes.bits ^ (lanes.bits >> 13)
        second += jnp.sum(mixed * (again | 1), dtype=jnp.uint32)

        at += jnp.sum(_signs(hashed) * lanes.at)
        square += jnp.sum(lanes.square)
        num += leaf.size

    num = max(num, 1)
    floats = jnp.stack([at / math.sqrt(num), jnp.sqrt(square / num)])
    words = jax.lax.bitcast_convert_type(floats, jnp.uint32)
    return jnp.concatenate([jnp.stack([first, second]), words])


class _Lanes(NamedTuple):
    """Running values of a leaf, one number a lane."""

    bits: jax.Array  # a, uint32.
    at: jax.Array  # p, float32.
    square: jax.Array  # q, float32.


def _over_rows(values: jax.Array) -> _Lanes:
    """Go over the values of a leaf, `[n]`."""
    num_lanes = min(values.size, _LANES)
    zeros = jnp.zeros(num_lanes, jnp.float32)
    lanes = _Lanes(zeros.astype(jnp.uint32), zeros, zeros)

    num_rows = values.size // num_lanes
    signs = _signs(_hash(jax.lax.iota(jnp.uint32, num_rows + 1), num_lanes))
    rows = values[: num_rows * num_lanes].reshape(num_rows, num_lanes)
    if num_rows == 1:
        lanes = _step(lanes, rows[0], signs[0])
    else:
        lanes, _ = jax.lax.scan(
            lambda lanes, row: (_step(lanes, *row), None), lanes, (rows, signs[:-1])
        )

    rest = values[num_rows * num_lanes :]
    if not rest.size:
        return lanes
    return _step(lanes, jnp.pad(rest, (0, num_lanes - rest.size)), signs[-1])


def _step(lanes: _Lanes, row: jax.Array, sign: jax.Array) -> _Lanes:
    value = row.astype(jnp.float32)
    mixed = (lanes.bits ^ _bits(row)) * jnp.uint32(0x85EBCA6B)
    return _Lanes(
        mixed ^ (mixed >> 15),
        lanes.at + sign * value,
        lanes.square + value * value,
    )


def _bits(row: jax.Array) -> jax.Array:
    """Return the bits of values `[n]`, uint32 `[n]`."""
    if row.dtype == jnp.bool_:
        return row.astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(row, _UNSIGNED[row.dtype.itemsize])
    if row.dtype.itemsize == 8:
        return bits[:, 0] ^ (bits[:, 1] * jnp.uint32(0x9E3779B1))
    return bits.astype(jnp.uint32)


def _hash(position: jax.Array, seed: int) -> jax.Array:
    """Mix positions, uint32; the finalizer of MurmurHash3."""
    mixed = position * jnp.uint32(0x9E3779B1) + jnp.uint32(seed)
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return mixed ^ (mixed >> 16)


def _signs(hashed: jax.Array) -> jax.Array:
    return 1 - 2 * (hashed >> 31).astype(jnp.float32)
