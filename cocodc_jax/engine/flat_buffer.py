"""Pack many small arrays into one flat buffer, so that a message is one transfer.

A collective takes several network round trips; ten arrays take ten times as many.

If a region has several devices, its parameters and messages are sharded over them. In a
`ShardBuffer` each device packs its own shard of each array. If several devices hold the
same shard, each packs an equal part of it, padded with zeros at the end. So nothing
moves inside a region, no device materializes the full message, as it would by `pack`,
and a byte leaves a region once.

    column of the buffer = (device of the region, array, index in the device's part)

The arrays are reassembled from the columns on the outer devices: in full on a single
outer device; on several (a region's processes), each its own block. Parts of a shard
that several processes hold are gathered between them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.engine.mesh import INSIDE, REGION, over_processes, spec_axes

PyTree = Any


def pack(tree: PyTree) -> jax.Array:
    """Concatenate regional arrays, `[R, n]`: in their one dtype, or as bytes, uint8."""
    leaves = [x.reshape(x.shape[0], -1) for x in jax.tree.leaves(tree)]
    if len({x.dtype for x in leaves}) > 1:
        leaves = [x.view(jnp.uint8) for x in leaves]
    return jnp.concatenate(leaves, axis=1)


def unpack(buffer: jax.Array, shapes: PyTree) -> PyTree:
    """Invert `pack`: `[..., n]` to a tree like one region's, with leading axes."""
    leaves, structure = jax.tree.flatten(shapes)
    is_bytes = len({x.dtype for x in leaves}) > 1
    lead = buffer.shape[:-1]

    arrays = []
    start = 0
    for like in leaves:
        width = like.dtype.itemsize if is_bytes else 1
        size = math.prod(like.shape) * width
        part = buffer[..., start : start + size]
        if is_bytes:
            part = part.view(like.dtype)
        arrays.append(part.reshape(*lead, *like.shape))
        start += size
    return jax.tree.unflatten(structure, arrays)


Sizes = Mapping[str, int]


class Piece(NamedTuple):
    """Placement of one array of a message in the buffer."""

    # For each dimension the mesh axes that shard it, major first.
    axes: tuple[tuple[str, ...], ...]
    free: tuple[str, ...]  # Axes along which devices hold the same shard.
    shard: tuple[int, ...]  # Shape of a shard.
    dtype: Any  # Of the array.
    width: int  # Columns per number: 1, or its bytes.
    share: int  # Columns of a device.
    start: int  # The first of them.


@dataclasses.dataclass(frozen=True)
class ShardBuffer:
    """Layout of the messages of regions of several devices."""

    mesh: Mesh  # The inner mesh.
    pieces: tuple[Piece, ...]  # Of the arrays, in the tree's order.
    structure: Any  # Of the tree.

    @classmethod
    def of(cls, mesh: Mesh, shapes: PyTree, specs: PyTree) -> ShardBuffer:
        """Compute the layout of one region's message.

        `specs` has for each array a `PartitionSpec` over the axes inside a region; an
        array that it does not divide evenly is replicated.
        """
        leaves, structure = jax.tree.flatten(shapes)
        is_bytes = len({x.dtype for x in leaves}) > 1

        pieces = []
        start = 0
        for x, spec in zip(leaves, structure.flatten_up_to(specs), strict=True):
            axes, shard = _divided(x.shape, spec, mesh.shape)
            free = tuple(axis for axis in INSIDE if axis not in sum(axes, ()))
            width = x.dtype.itemsize if is_bytes else 1
            share = -(-math.prod(shard) * width // _length(mesh.shape, free))
            piece = Piece(
                axes=axes,
                free=free,
                shard=shard,
                dtype=x.dtype,
                width=width,
                share=share,
                start=start,
            )
            pieces.append(piece)
            start += share
        return cls(mesh, tuple(pieces), structure)

    @property
    def width(self) -> int:
        """Columns per device."""
        return self.pieces[-1].start + self.pieces[-1].share

    @property
    def sharding(self) -> NamedSharding:
        """Sharding of the buffer `[R, n]` on the inner mesh."""
        return NamedSharding(self.mesh, P(REGION, INSIDE))

    def pack(self, tree: PyTree) -> jax.Array:
        """Pack regional arrays `[R, ...]` into `[R, n]`, each device its own shards."""

        def of_device(leaves: list[jax.Array]) -> jax.Array:
            parts = [
                self._part(piece, x)
                for piece, x in zip(self.pieces, leaves, strict=True)
            ]
            return jnp.concatenate(parts, axis=1)

        specs = [
            P(REGION, *(axes or None for axes in piece.axes)) for piece in self.pieces
        ]
        pack = jax.shard_map(
            of_device,
            mesh=self.mesh,
            in_specs=(specs,),
            out_specs=P(REGION, INSIDE),
        )
        return pack(jax.tree.leaves(tree))

    def _part(self, piece: Piece, x: jax.Array) -> jax.Array:
        """Return a device's part of its shard `[r, ...]`, inside the mesh."""
        rows = x.reshape(len(x), -1)
        if self._is_bytes:
            rows = rows.view(jnp.uint8)

        num_parts = _length(self.mesh.shape, piece.free)
        padding = num_parts * piece.share - rows.shape[1]
        rows = jnp.pad(rows, ((0, 0), (0, padding)))
        if num_parts == 1:
            return rows

        first = jax.lax.axis_index(piece.free) * piece.share
        return jax.lax.dynamic_slice_in_dim(rows, first, piece.share, axis=1)

    @property
    def _is_bytes(self) -> bool:
        return len({piece.dtype for piece in self.pieces}) > 1

    def unpack(self, buffer: jax.Array, everywhere: Sharding) -> PyTree:
        """Reassemble the arrays `[..., *shape]` from the columns of all devices.

        The buffer `[..., n]` is over the outer mesh if there is one, else on a device.
        Each process gets its block. `everywhere` replicates to every outer device.
        """
        if not isinstance(everywhere, NamedSharding):
            leaves = [self._whole(piece, buffer, {}) for piece in self.pieces]
            return self.structure.unflatten(leaves)

        mesh = cast(Mesh, everywhere.mesh)
        axes_of_pieces = [
            over_processes(piece.axes, self.mesh, mesh) for piece in self.pieces
        ]

        def of_process(rows: jax.Array) -> list[jax.Array]:
            return [
                self._whole(piece, rows, mesh.shape, frozenset(sum(axes, ())))
                for piece, axes in zip(self.pieces, axes_of_pieces, strict=True)
            ]

        lead = (None,) * (buffer.ndim - 1)
        unpack = jax.shard_map(
            of_process,
            mesh=mesh,
            in_specs=P(*lead, INSIDE),
            out_specs=[
                P(*lead, *(names or None for names in axes)) for axes in axes_of_pieces
            ],
            check_vma=False,  # It cannot see that regions have equal values.
        )
        return self.structure.unflatten(unpack(buffer))

    def _whole(
        self,
        piece: Piece,
        rows: jax.Array,
        processes: Sizes,
        kept: Iterable[str] = frozenset(),
    ) -> jax.Array:
        """Join an array from the columns `[..., n]` that an outer device has."""
        lead = rows.shape[:-1]
        num_lead = len(lead)
        sizes = {
            axis: self.mesh.shape[axis] // processes.get(axis, 1) for axis in INSIDE
        }
        x = rows.reshape(*lead, *sizes.values(), self.width)
        x = x[..., piece.start : piece.start + piece.share]

        # The parts of several processes, unless each keeps its own block.
        for i, axis in enumerate(INSIDE):
            if processes.get(axis, 1) > 1 and axis not in kept:
                x = jax.lax.all_gather(x, axis, axis=num_lead + i, tiled=True)
                sizes[axis] = self.mesh.shape[axis]

        # From the mesh's order of axes to (blocks, shard), without the padding.
        used = sum(piece.axes, ())
        order = [num_lead + INSIDE.index(axis) for axis in (*used, *piece.free)]
        x = x.transpose(*range(num_lead), *order, x.ndim - 1)
        counts = [sizes[axis] for axis in used]
        x = x.reshape(*lead, *counts, -1)
        x = x[..., : math.prod(piece.shard) * piece.width]
        if self._is_bytes:
            x = x.view(piece.dtype)
        x = x.reshape(*lead, *counts, *piece.shard)

        # From (blocks of all dimensions, shard) to (blocks, shard) per dimension.
        order = list(range(num_lead))
        shape = list(lead)
        first = num_lead
        for i, axes in enumerate(piece.axes):
            order += [*range(first, first + len(axes)), num_lead + len(counts) + i]
            shape.append(_length(sizes, axes) * piece.shard[i])
            first += len(axes)
        return x.transpose(order).reshape(shape)


def _divided(
    shape: tuple[int, ...], spec: P, sizes: Sizes
) -> tuple[tuple[tuple[str, ...], ...], tuple[int, ...]]:
    """Return the axes of each dimension, and the shape of a shard."""
    num_missing = max(len(shape) - len(spec), 0)
    entries = (*spec, *(None,) * num_missing)[: len(shape)]
    axes = tuple(spec_axes(entries))
    counts = [_length(sizes, names) for names in axes]

    is_even = all(size % count == 0 for size, count in zip(shape, counts, strict=True))
    if len(spec) > len(shape) or not is_even:
        return ((),) * len(shape), shape
    shard = tuple(size // count for size, count in zip(shape, counts, strict=True))
    return axes, shard


def _length(sizes: Sizes, axes: Iterable[str]) -> int:
    return math.prod(sizes[axis] for axis in axes)
