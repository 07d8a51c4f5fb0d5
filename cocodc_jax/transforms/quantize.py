"""Compressors with fewer bits a value: casts, integers, FP4 E3M0 and signs.

Values are cut into blocks of `block_size` in row-major order. Each block sends one
float32 scale s, and for each value a code of a few bits, a fraction of s:

| compressor | bits | fractions of s                     | s       | error at most     |
|------------|------|------------------------------------|---------|-------------------|
| `int8`     | 8    | -1, -126/127, ..., 0, ..., 1       | absmax  | s / 254           |
| `int4`     | 4    | -1, -6/7, ..., 0, ..., 1           | absmax  | s / 14            |
| `int2`     | 2    | -1, -1/3, 1/3, 1                   | absmax  | s / 3             |
| `fp4`      | 4    | 0, +-1/64, +-1/32, ..., +-1/2, +-1 | absmax  | x / 3, or s / 128 |
| `sign`     | 1    | -1, 1                              | mean    | not bounded by s  |

Values are rounded to the nearest code, or with `stochastic=True` to one of the two
neighbours at random such that the mean is the value (unbiased; at most twice the error,
for `fp4` at most x). FP4 is 1 sign, 3 exponent and 0 mantissa bits (code 0 is zero) as
in Streaming DiLoCo (arXiv 2501.18512), whose scale is not published: per-block absmax
is our choice. `sign` is scaled so that the squared error is least.

The 2-bit code of SparseLoCo and MuLoCo is another one, see `statistical.stat2`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.transforms.compressor import Compressor, per_leaf
from cocodc_jax.transforms.numerics import check_at_least, widen
from cocodc_jax.transforms.packing import pack, unpack


def float16() -> Compressor:
    """Send two bytes a value: 11 significant bits, from 6e-8 to at most 65504."""
    return _cast("float16", jnp.float16)


def bfloat16() -> Compressor:
    """Send two bytes a value: 8 significant bits, the range of float32."""
    return _cast("bfloat16", jnp.bfloat16)


def int8(block_size: int = 256, stochastic: bool = False) -> Compressor:
    """Send one byte a value and 4 bytes a block."""
    return _blockwise("int8", 8, *_uniform(255), block_size, stochastic)


def int4(block_size: int = 256, stochastic: bool = False) -> Compressor:
    """Send two values a byte and 4 bytes a block.

    >>> import jax.numpy as jnp
    >>> compressor = int4()
    >>> message, _ = compressor.encode({"w": jnp.array([7.0, 2.2, 0.0, -7.0])}, ())
    >>> message["w"].arrays["codes"].nbytes
    2
    >>> print(compressor.decode(message)["w"])
    [ 7.  2.  0. -7.]
    """
    return _blockwise("int4", 4, *_uniform(15), block_size, stochastic)


def int2(block_size: int = 256, stochastic: bool = False) -> Compressor:
    """Send four values a byte and 4 bytes a block; zero is not among the codes."""
    return _blockwise("int2", 2, *_uniform(4), block_size, stochastic)


def fp4(block_size: int = 256, stochastic: bool = False) -> Compressor:
    """Send two values a byte and 4 bytes a block: powers of two, finest near zero."""
    return _blockwise("fp4", 4, _fp4_encode, _fp4_decode, block_size, stochastic)


def sign(block_size: int = 256) -> Compressor:
    """Send eight values a byte and 4 bytes a block, the mean absolute value."""
    _, decode = _uniform(2)
    encode = lambda fraction, noise: fraction >= 0  # noqa: E731
    return _blockwise("sign", 1, encode, decode, block_size, False, _mean_abs)


def _cast(name: str, dtype: Any) -> Compressor:
    most = float(jnp.finfo(dtype).max)

    def encode_leaf(x, key):
        # An infinity of its own would stay in a residual for ever.
        inside = jnp.clip(widen(x), -most, most)
        return jnp.where(jnp.isfinite(x), inside, widen(x)).astype(dtype)

    return per_leaf(name, encode_leaf, lambda arrays, shape: arrays)


def _uniform(levels: int) -> tuple[Callable, Callable]:
    """Make `levels` equally spaced fractions from -1 to 1."""

    def encode(fraction, noise):
        place = (fraction + 1) / 2 * (levels - 1)
        place = jnp.round(place) if noise is None else jnp.floor(place + noise)
        return jnp.clip(place, 0, levels - 1)

    def decode(code):
        return (2 * code.astype(jnp.float32) - (levels - 1)) / (levels - 1)

    return encode, decode


def _fp4_encode(fraction, noise):
    """Put the sign in bit 3; magnitude 0 for zero, e = 1 .. 7 for 2**(e - 7)."""
    size = jnp.abs(fraction)
    if noise is None:
        # Midpoints between neighbours: 2**-7, then 1.5 * 2**(e - 7).
        bounds = [2.0**-7] + [1.5 * 2.0 ** (e - 7) for e in range(1, 7)]
        magnitude = _count_reached(size, bounds)
    else:
        low = _count_reached(size, [2.0 ** (e - 7) for e in range(1, 7)])
        below = _fp4_magnitude(low)
        above = _fp4_magnitude(low + 1)
        is_above = noise < (size - below) / (above - below)
        magnitude = low + is_above.astype(jnp.int32)

    return magnitude + 8 * (fraction < 0).astype(jnp.int32)


def _fp4_decode(code):
    size = _fp4_magnitude((code & 7).astype(jnp.int32))
    return jnp.where(code >= 8, -size, size)


def _fp4_magnitude(magnitude):
    return jnp.where(magnitude == 0, 0.0, jnp.ldexp(jnp.float32(1), magnitude - 7))


def _count_reached(size, bounds):
    # Unrolled: fuses into one pass over `size`.
    return sum((size >= bound).astype(jnp.int32) for bound in bounds)


def _absmax(blocks, _):
    # In wide rows XLA's CPU backend, as JAX 0.10.2 has it, leaves a NaN out of a max.
    has_nan = jnp.isnan(blocks).any(axis=1)
    return jnp.where(has_nan, jnp.nan, jnp.max(jnp.abs(blocks), axis=1))


def _mean_abs(blocks, counts):
    return jnp.sum(jnp.abs(blocks), axis=1) / counts


def _blockwise(
    name: str,
    bits: int,
    encode: Callable,
    decode: Callable,
    block_size: Any,  # Checked here.
    stochastic: bool,
    scale_of: Callable = _absmax,
) -> Compressor:
    """Build the compressor that sends a scale a block and a code a value.

    `encode` makes codes of fractions in [-1, 1], with uniform noise in [0, 1) or None;
    `decode` makes fractions of codes.
    """
    check_at_least("block_size", block_size, 1)

    def encode_leaf(x, key):
        if stochastic and key is None:
            raise ValueError(f"{name}(stochastic=True).encode needs a key")

        blocks, counts = _blocks(x.astype(jnp.float32).reshape(-1), block_size)
        scales = scale_of(blocks, counts)
        divisors = jnp.where(scales > 0, scales, 1.0)[:, None]
        noise = jax.random.uniform(key, blocks.shape) if stochastic else None
        codes = encode(blocks / divisors, noise).astype(jnp.uint8)

        return {"codes": pack(codes.reshape(-1)[: x.size], bits), "scales": scales}

    def decode_leaf(arrays, shape):
        size = math.prod(shape)
        codes = unpack(arrays["codes"], bits, size)
        fractions, _ = _blocks(decode(codes), block_size)
        return (fractions * arrays["scales"][:, None]).reshape(-1)[:size]

    return per_leaf(name, encode_leaf, decode_leaf)


def _blocks(flat, block_size):
    """Cut into rows of `block_size`, padded with zeros; count each row's own values."""
    num_blocks = max(1, -(-flat.size // block_size))
    width = min(block_size, max(1, flat.size))
    padded = jnp.pad(flat, (0, num_blocks * width - flat.size))
    counts = np.clip(flat.size - width * np.arange(num_blocks), 1, width)
    return padded.reshape(num_blocks, width), counts.astype(np.float32)
