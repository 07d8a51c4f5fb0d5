"""The codec of messages between pipeline stages, from `--stage_compress`."""

import math

import jax
import jax.numpy as jnp

from cocodc_jax.models import StageCodec
from cocodc_jax.transforms.compression import parse
from cocodc_jax.transforms.compressor import Packed, message_bytes
from cocodc_jax.transforms.packing import index_bits


def build_codec(text: str) -> StageCodec:
    """Return the codec of `stage_compress`.

    `threshold:0.1` is DCT, dynamic communication thresholding (arXiv 2010.08899), of
    activations and of their gradients: for each microbatch, entries of at least a
    threshold are sent, and the threshold is recomputed after `every` messages. The
    paper recomputes it after thousands of steps; here after at most a step's messages,
    because the loss has no state. With `ef+threshold:0.1`, the entries that one
    microbatch's message leaves out are added to the next one's, of other sequences.

    Parameters are evaluated with the plain model, without a codec; losses and bytes
    measured here are in docs/results/archive/methods.md.
    """
    try:
        compressor = parse(text)
        probe = jax.ShapeDtypeStruct((2, 8, 8), jnp.float32)
        jax.eval_shape(
            lambda x: compressor.decode(compressor.encode(x, compressor.init(x))[0]),
            probe,
        )
    except ValueError as error:
        why = str(error).removeprefix(f"compress={text!r}: ")
        raise ValueError(f"stage_compress={text!r}: {why}") from error

    has_room = compressor.name.endswith(("threshold", "(threshold)"))
    return StageCodec(
        compressor.init,
        compressor.encode,
        compressor.decode,
        _entry_bytes if has_room else lambda x: jnp.float32(message_bytes(x)),
    )


def _entry_bytes(message: Packed) -> jax.Array:
    """Return the bytes of the entries that reach the threshold, with their indices.

    The message is padded with zeros, which never reach it.
    """
    # Uncompressed; thresholds with another encoding have it in their name.
    values = message.arrays["values"].arrays
    bits = 8 * values.dtype.itemsize + index_bits(math.prod(message.shape) + 1)
    return jnp.count_nonzero(values) * jnp.float32(bits / 8)
