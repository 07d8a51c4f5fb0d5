"""Small integers as a little-endian stream of bits.

Code i occupies bits `i * bits` to `(i + 1) * bits - 1` of the stream, least significant
first; the stream is cut into bytes the same way. n codes take ceil(n * bits / 8) bytes.
"""

import jax
import jax.numpy as jnp
import numpy as np


def index_bits(size: int) -> int:
    """Return the bits of an index below `size`."""
    return max(1, (size - 1).bit_length())


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Pack n integers below 2**bits, bits 1 to 32, as uint8 [ceil(n * bits / 8)].

    >>> import jax.numpy as jnp
    >>> pack(jnp.array([1, 2, 3]), 4)
    Array([33,  3], dtype=uint8)
    """
    if 8 % bits == 0:
        per_byte = 8 // bits
        codes = codes.astype(jnp.uint8)
        rows = jnp.pad(codes, (0, -codes.size % per_byte)).reshape(-1, per_byte)
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[None]
        return jnp.sum(rows << shifts, axis=1, dtype=jnp.uint8)
    shifts = np.arange(bits, dtype=np.uint32)[None]
    stream = (codes.astype(jnp.uint32)[:, None] >> shifts) & np.uint32(1)
    return jnp.packbits(stream.astype(jnp.uint8).reshape(-1), bitorder="little")


def unpack(packed: jax.Array, bits: int, num_codes: int) -> jax.Array:
    """Undo `pack`: return [num_codes], uint8 if `bits` divides 8, else int32."""
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[None]
        codes = (packed[:, None] >> shifts) & np.uint8(2**bits - 1)
        return codes.reshape(-1)[:num_codes]
    stream = jnp.unpackbits(packed, bitorder="little")[: num_codes * bits]
    weights = np.uint32(1) << np.arange(bits, dtype=np.uint32)[None]
    rows = stream.reshape(num_codes, bits).astype(jnp.uint32)
    return jnp.sum(rows * weights, axis=1, dtype=jnp.uint32).astype(jnp.int32)
