"""Cross-entropy of one device's sequences, with its gradient in the same pass.

The loss of `loss.py`, with sequences sharded over "data", the vocabulary over "model".
With logits z = h W, targets y and p = softmax(z),

    loss = sum over tokens of  logsumexp(z) - z[y],     dz = p - onehot(y)
    dh = dz W^T,                                        dW = h^T dz

so that a chunk's logits give its loss and its gradient at once: nothing is computed
twice, and nothing of a chunk is kept but dh. The head is gathered once for all chunks,
and dW summed over them in float32, then reduce-scattered.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from cocodc_jax.models.layout import Layout, gather, scatter, sum_over
from cocodc_jax.models.loss import TokenSums, num_chunks, split_length


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def divided_cross_entropy(
    hidden_BLD: jax.Array,
    head_DV: jax.Array,
    targets_BL: jax.Array,
    chunk_tokens: int,
    layout: Layout,
) -> TokenSums:
    """Return the sums over one device's tokens, equal along the model axis."""
    whole_DV = gather(head_DV, hidden_BLD.dtype, 0, layout)

    def one(hidden_BCD, targets_BC):
        return _sums(hidden_BCD, whole_DV, targets_BC, layout)[0]

    cut = num_chunks(targets_BL.shape, chunk_tokens)
    if cut == 1:
        return one(hidden_BLD, targets_BL)
    sums = jax.lax.map(lambda chunk: one(*chunk), _split(hidden_BLD, targets_BL, cut))
    return jax.tree.map(jnp.sum, sums)


def _forward(hidden_BLD, head_DV, targets_BL, chunk_tokens, layout):
    whole_DV = gather(head_DV, hidden_BLD.dtype, 0, layout)

    def one(grad_DV, chunk):
        hidden_BCD, targets_BC = chunk
        sums, dz_BCV = _sums(hidden_BCD, whole_DV, targets_BC, layout)
        dz_BCV = dz_BCV.astype(hidden_BCD.dtype)
        grad_DV += jnp.einsum(
            "bcd,bcv->dv", hidden_BCD, dz_BCV, preferred_element_type=jnp.float32
        )
        return grad_DV, (sums, dz_BCV @ whole_DV.T)

    grad_DV = jnp.zeros(whole_DV.shape, jnp.float32)
    cut = num_chunks(targets_BL.shape, chunk_tokens)
    if cut == 1:
        grad_DV, (sums, grad_BLD) = one(grad_DV, (hidden_BLD, targets_BL))
    else:
        chunks = _split(hidden_BLD, targets_BL, cut)
        grad_DV, (sums, grads_BCD) = jax.lax.scan(one, grad_DV, chunks)
        sums = jax.tree.map(jnp.sum, sums)
        batch, length, width = hidden_BLD.shape
        grad_BLD = jnp.moveaxis(grads_BCD, 0, 1).reshape(batch, -1, width)[:, :length]
    return sums, (sum_over(grad_BLD, layout.model), scatter(grad_DV, 0, layout))


def _backward(chunk_tokens, layout, grads, cotangents):
    grad_BLD, grad_DV = grads
    # In float32: one over a count that is no power of two is off by up to 0.4% in
    # bfloat16, for all tokens alike, and every gradient but the head's would be.
    scale = cotangents.loss
    return (grad_BLD * scale).astype(grad_BLD.dtype), grad_DV * scale, None


divided_cross_entropy.defvjp(_forward, _backward)


def _split(hidden_BLD, targets_BL, cut: int):
    return split_length(hidden_BLD, cut, 0), split_length(targets_BL, cut, -1)


def _sums(hidden_BLD, head_DV, targets_BL, layout: Layout):
    """Return the sums of a chunk, and the loss's derivative by the logits, float32."""
    logits_BLV = jnp.matmul(hidden_BLD, head_DV, preferred_element_type=jnp.float32)
    num_own = head_DV.shape[1]
    ids_V = jax.lax.broadcasted_iota(jnp.int32, logits_BLV.shape, 2)
    # It cancels, and so do its derivatives.
    max_BL = jax.lax.stop_gradient(logits_BLV.max(axis=-1))
    if jax.lax.axis_size(layout.model) > 1:
        ids_V += num_own * jax.lax.axis_index(layout.model)
        max_BL = jax.lax.pmax(max_BL, layout.model)
    is_target_BLV = ids_V == targets_BL[..., None]
    exp_BLV = jnp.exp(logits_BLV - max_BL[..., None])
    total_BL = sum_over(exp_BLV.sum(axis=-1), layout.model)
    target_BL = sum_over(
        jnp.sum(logits_BLV, axis=-1, where=is_target_BLV), layout.model
    )
    # A padded target is -1.
    is_token_BL = targets_BL >= 0
    loss_BL = jnp.log(total_BL) + max_BL - target_BL
    is_correct_BL = is_token_BL & (target_BL >= max_BL)
    sums = TokenSums(
        loss_BL.sum(where=is_token_BL), is_correct_BL.sum(dtype=jnp.float32)
    )
    dz_BLV = exp_BLV / total_BL[..., None] - is_target_BLV
    return sums, jnp.where(is_token_BL[..., None], dz_BLV, 0.0)
