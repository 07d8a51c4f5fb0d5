"""Cross-entropy computed some tokens at a time, so that logits are never whole.

For hidden states h, head W and targets y, with z = h W:

    loss = mean over tokens of  logsumexp(z) - z[y]

The logits z of all tokens would take `B L V` float32 values, twice with their
cotangent, which for vocabularies of 32,000 is most of a step's memory. Here the
sequence is cut into chunks under `lax.scan`, and each chunk is rematerialised in
the backward pass, so that one chunk's logits exist at a time. The chunks cut the
length axis and leave the batch axis whole: sharding over "data" stays as it was.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cocodc_jax.models.backward import PLAIN, product


class TokenSums(NamedTuple):
    """Sums over tokens, float32 scalars."""

    loss: jax.Array
    num_correct: jax.Array


def logits_from_hidden(
    hidden_BLD: jax.Array, head_DV: jax.Array, backward: str = PLAIN
) -> jax.Array:
    """Return float32 logits [B, L, V] of `hidden @ head`."""
    head_DV = head_DV.astype(hidden_BLD.dtype)
    return product(hidden_BLD, head_DV, backward, jnp.float32)


def cross_entropy(
    hidden_BLD: jax.Array,
    head_DV: jax.Array,
    targets_BL: jax.Array,
    chunk_tokens: int,
    backward: str = PLAIN,
) -> tuple[jax.Array, jax.Array]:
    """Return the mean cross-entropy and accuracy of next-token prediction.

    A token counts as predicted when its logit reaches the largest one.
    """
    batch, length = targets_BL.shape
    cut = num_chunks(targets_BL.shape, chunk_tokens)
    if cut == 1:
        sums = _token_sums(hidden_BLD, head_DV, targets_BL, backward)
    else:
        sums = _chunked_sums(hidden_BLD, head_DV, targets_BL, cut, backward)
    return sums.loss / (batch * length), sums.num_correct / (batch * length)


def num_chunks(shape: tuple[int, ...], chunk_tokens: int) -> int:
    """Return into how many chunks sequences `[B, L]` are cut, by `chunk_tokens`."""
    batch, length = shape
    return -(-length // max(1, chunk_tokens // batch))


def _token_sums(hidden_BLD, head_DV, targets_BL, backward) -> TokenSums:
    logits_BLV = logits_from_hidden(hidden_BLD, head_DV, backward)
    ids_V = jax.lax.broadcasted_iota(jnp.int32, logits_BLV.shape, 2)
    # A masked sum in place of a gather: it fuses with the passes over the logits
    # and needs no exchange when the vocabulary is sharded. A padded target, -1,
    # matches no id.
    target_BL = jnp.sum(logits_BLV, axis=-1, where=ids_V == targets_BL[..., None])
    max_BL = jax.lax.stop_gradient(logits_BLV.max(axis=-1))
    exp_BLV = jnp.exp(logits_BLV - max_BL[..., None])
    loss_BL = jnp.log(exp_BLV.sum(axis=-1)) + max_BL - target_BL
    is_token_BL = targets_BL >= 0
    is_correct_BL = is_token_BL & (target_BL >= max_BL)
    return TokenSums(
        loss_BL.sum(where=is_token_BL), is_correct_BL.sum(dtype=jnp.float32)
    )


def _chunked_sums(
    hidden_BLD, head_DV, targets_BL, cut: int, backward: str
) -> TokenSums:
    # The sums leave the scan as stacked outputs: a carry begun from a constant
    # would not vary over a manual mesh axis as the sums do.
    chunks = (
        split_length(hidden_BLD, cut, 0),
        split_length(targets_BL, cut, -1),
    )

    @jax.checkpoint
    def chunk_sums(hidden_BCD, targets_BC):
        return _token_sums(hidden_BCD, head_DV, targets_BC, backward)

    _, sums = jax.lax.scan(lambda _, chunk: (None, chunk_sums(*chunk)), None, chunks)
    return jax.tree.map(jnp.sum, sums)


def split_length(x_BL: jax.Array, cut: int, padding) -> jax.Array:
    """Cut axis 1 into equal chunks, a new leading axis, padded at the end."""
    batch, length, *rest = x_BL.shape
    chunk = -(-length // cut)
    pad = [(0, 0)] * x_BL.ndim
    pad[1] = (0, cut * chunk - length)
    padded = jnp.pad(x_BL, pad, constant_values=padding)
    return jnp.moveaxis(padded.reshape(batch, cut, chunk, *rest), 1, 0)
