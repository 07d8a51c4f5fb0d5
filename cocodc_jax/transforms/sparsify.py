"""Compressors that send only the largest values, and their positions.

Indices are packed with as few bits as the chunk (or tensor) needs. Other values are
lost: wrap these compressors in `error_feedback`.

A tensor is folded into a matrix (`matrix_shape`) and padded with zeros to full chunks
of `chunk_side` by `chunk_side` (smaller ones if the matrix is smaller; a vector's
chunks are 1 by `chunk_side`). The transform is orthonormal, so sending the largest
coefficients makes the squared error least.

Source: DeMo (arXiv 2411.19870) for the chunked transform, SparseLoCo (arXiv 2508.15706)
for chunks without it, both as read from the authors' code. SparseLoCo's k is that of a
full chunk, and smaller chunks send their share (otherwise a chunk of 64 entries would
be sent whole); DeMo's k is not scaled.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.transforms.compressor import (
    Compressor,
    matrix_shape,
    per_leaf,
    stateless,
)
from cocodc_jax.transforms.numerics import check_at_least, check_share, widen
from cocodc_jax.transforms.packing import index_bits, pack, unpack


@runtime_checkable
class ReadFn(Protocol):
    """The `read` of a `SparseCompressor`."""

    def __call__(
        self, arrays: Any, shape: tuple[int, ...], /
    ) -> tuple[jax.Array, jax.Array]:
        """Read which coefficients of a leaf a message has.

        Args:
          arrays: of one `Packed`.
          shape: of its leaf.

        Returns:
          Positions, int32 [rows, k], distinct in each row, and coefficients [rows, k].
        """
        ...


@runtime_checkable
class InvertFn(Protocol):
    """The `invert` of a `SparseCompressor`."""

    def __call__(self, coefficients: jax.Array, shape: tuple[int, ...], /) -> jax.Array:
        """Return the leaf of this shape that has these coefficients, [rows, size]."""
        ...


@dataclasses.dataclass(frozen=True)
class SparseCompressor(Compressor):
    """A compressor whose messages show which coefficients of a leaf they contain.

    The coefficients of a leaf are [rows, size]: a row is a chunk, or the whole leaf.

    Attributes:
      row_size: `row_size(shape) -> size` for a leaf of that shape.
      read: reads the coefficients of one leaf from its part of a message.
      invert: returns the leaf of all coefficients.
    """

    row_size: Callable[[tuple[int, ...]], int]
    read: ReadFn
    invert: InvertFn


def top_k(density: float = 0.01, values: Compressor | None = None) -> SparseCompressor:
    """Send the largest values of each tensor.

    Args:
      density: share of a tensor's values that is sent, in (0, 1]; at least one value.
      values: stateless compressor for the values, `identity()` if None.

    >>> import jax.numpy as jnp
    >>> compressor = top_k(density=0.5)
    >>> message, _ = compressor.encode(jnp.array([1.0, -3.0, 0.0, 2.0]), ())
    >>> print(compressor.decode(message))
    [ 0. -3.  0.  2.]
    """
    check_share("density", density)
    return _sparse(
        "top_k",
        values,
        count=lambda size: min(size, max(1, round(density * size))),
        split=lambda x: x.reshape(1, -1),
        join=lambda coefficients, shape: coefficients.reshape(shape),
        row_size=math.prod,
    )


def chunked_top_k(
    k: int = 32, chunk_side: int = 64, values: Compressor | None = None
) -> SparseCompressor:
    """Send the k largest values of each chunk.

    Args:
      k: values of a full chunk; a smaller one sends its share, at least one.
      chunk_side: rows and columns of a chunk.
      values: stateless compressor for the values, `identity()` if None. It sees
        [chunks, k] of a tensor at once.

    >>> import jax.numpy as jnp
    >>> compressor = chunked_top_k(k=128)
    >>> message, _ = compressor.encode({"w": jnp.ones((64, 64)), "b": jnp.ones(64)}, ())
    >>> print({name: packed.arrays["values"].arrays.size for name, packed in
    ...        message.items()})
    {'b': 2, 'w': 128}
    """
    count = lambda size: min(size, max(1, round(k * size / chunk_side**2)))  # noqa: E731
    as_is = lambda chunks, is_inverse: chunks  # noqa: E731
    return _chunked("chunked_top_k", k, chunk_side, values, as_is, count)


def dct_top_k(
    k: int = 32, chunk_side: int = 64, values: Compressor | None = None
) -> SparseCompressor:
    """Send the k largest coefficients of each chunk's 2-D cosine transform.

    Args:
      k: coefficients per chunk; a chunk with fewer sends all.
      chunk_side: rows and columns of a chunk.
      values: stateless compressor for the coefficients, `identity()` if None.
    """
    return _chunked(
        "dct_top_k", k, chunk_side, values, _cosine_transform, lambda size: min(k, size)
    )


def _chunked(name, k, chunk_side, values, transform, count):
    """Build a compressor of chunks; `transform(chunks, is_inverse)`, `count(size)`."""
    check_at_least("k", k, 1)
    check_at_least("chunk_side", chunk_side, 1)

    def split(x):
        chunks = _to_chunks(x.reshape(matrix_shape(x.shape)), chunk_side)
        size = math.prod(chunks.shape[1:])
        return transform(chunks, False).reshape(len(chunks), size)

    def sides(shape):
        return _sides(*matrix_shape(shape), chunk_side)

    def join(coefficients, shape):
        chunks = coefficients.reshape(len(coefficients), *sides(shape))
        chunks = transform(chunks, True)
        return _from_chunks(chunks, *matrix_shape(shape)).reshape(shape)

    row_size = lambda shape: math.prod(sides(shape))  # noqa: E731
    return _sparse(name, values, count, split, join, row_size)


def _sparse(name, values, count, split, join, row_size):
    """Build the compressor that sends the `count(size)` largest of each row.

    `split(leaf)` returns coefficients [rows, size], `join(coefficients, shape)` inverts
    it, and `row_size(shape)` is that size.
    """
    inner = stateless("values", values)
    name = name if values is None else f"{name}({inner.name})"

    def encode_leaf(x, key):
        coefficients = split(x)
        size = coefficients.shape[1]
        _, indices = jax.lax.top_k(jnp.abs(coefficients), count(size))
        chosen = jnp.take_along_axis(coefficients, indices, axis=1)
        message, _ = inner.encode(chosen, (), key)
        packed = pack(indices.reshape(-1), index_bits(size))
        return {"indices": packed, "values": message}

    def read(arrays, shape):
        chosen = inner.decode(arrays["values"])
        bits = index_bits(row_size(shape))
        places = unpack(arrays["indices"], bits, chosen.size)
        return places.reshape(chosen.shape).astype(jnp.int32), chosen

    def decode_leaf(arrays, shape):
        places, chosen = read(arrays, shape)
        zeros = jnp.zeros((len(chosen), row_size(shape)), chosen.dtype)
        rows = np.arange(len(chosen))[:, None]
        return join(zeros.at[rows, places].set(chosen), shape)

    plain = per_leaf(name, encode_leaf, decode_leaf)
    return SparseCompressor(
        name=plain.name,
        init=plain.init,
        encode=plain.encode,
        decode=plain.decode,
        is_sparse=True,
        row_size=row_size,
        read=read,
        invert=join,
    )


def _sides(rows, columns, side):
    """Return a chunk's height and width; a tensor without values has no chunk."""
    return max(1, min(side, rows)), max(1, min(side, columns))


def _to_chunks(matrix, side):
    """Cut [rows, columns] to [chunks, height, width], zeros at the far edges."""
    rows, columns = matrix.shape
    height, width = _sides(rows, columns, side)
    matrix = jnp.pad(matrix, ((0, -rows % height), (0, -columns % width)))
    grid = matrix.shape[0] // height, matrix.shape[1] // width
    matrix = matrix.reshape(grid[0], height, grid[1], width)
    return matrix.transpose(0, 2, 1, 3).reshape(math.prod(grid), height, width)


def _from_chunks(chunks, rows, columns):
    """Invert `_to_chunks`."""
    _, height, width = chunks.shape
    grid = -(-rows // height), -(-columns // width)
    matrix = chunks.reshape(*grid, height, width).transpose(0, 2, 1, 3)
    return matrix.reshape(grid[0] * height, grid[1] * width)[:rows, :columns]


def _cosine_transform(chunks, is_inverse):
    """Return C_h X C_w' per chunk, or its inverse C_h' X C_w, with orthonormal C."""
    wide = widen(chunks)  # In bfloat16 the matrices would not be orthonormal.
    _, height, width = chunks.shape
    left = _cosine_matrix(height).astype(wide.dtype)
    right = _cosine_matrix(width).astype(wide.dtype)
    rule = "ji,njk,kl->nil" if is_inverse else "ij,njk,lk->nil"
    # Accelerators would otherwise round the products to bfloat16 or TF32.
    precision = jax.lax.Precision.HIGHEST
    transformed = jnp.einsum(rule, left, wide, right, precision=precision)
    return transformed.astype(chunks.dtype)


@functools.cache
def _cosine_matrix(n):
    """Return the orthonormal DCT-II: row f is cos(pi (2 i + 1) f / (2 n)), scaled."""
    frequency = np.arange(n)[:, None]
    place = np.arange(n)[None]
    matrix = np.cos(np.pi * (2 * place + 1) * frequency / (2 * n)) * np.sqrt(2 / n)
    matrix[0] /= np.sqrt(2)
    return matrix
