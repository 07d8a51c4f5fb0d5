"""Cross-entropy in chunks of tokens, and losses that compute their gradient.

With logits z = h W of hidden states h and a head W, targets y and p = softmax(z):

    loss = sum over tokens of  logsumexp(z) - z[y],     dz = p - onehot(y)
    dh = dz W^T,                                        dW = h^T dz

All logits would take `B L V` float32 values, twice with their cotangent, which for
vocabularies of 32,000 is most of a step's memory. Here the logits of only one chunk
exist at a time. Chunks cut only the length axis, so the sharding of the batch axis does
not change.

`cross_entropy` computes each chunk again in the backward pass. In
`divided_cross_entropy`, with sequences sharded over "data" and the vocabulary over
"model", a chunk's logits give its loss and its gradient at once, and only dh is kept.
The head is gathered once; dW is summed in float32, then reduce-scattered.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cocodc_jax.models.backward import PLAIN, product
from cocodc_jax.models.layout import Layout, gather, scatter, sum_over

PyTree = Any
# `(loss, aux), gradient` of `(params, batch)`.
GradientFn = Callable[[PyTree, PyTree], tuple[tuple[jax.Array, PyTree], PyTree]]


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

    A token counts as predicted if its logit equals the largest one.
    """

    def one(chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden_BCD, targets_BC = chunk
        logits_BCV = logits_from_hidden(hidden_BCD, head_DV, backward)
        sums, _ = _sums(logits_BCV, targets_BC)
        return sums

    loss, num_correct = _over_chunks(one, hidden_BLD, targets_BL, chunk_tokens)
    return loss / targets_BL.size, num_correct / targets_BL.size


def _over_chunks(
    one: Callable, hidden_BLD: jax.Array, targets_BL: jax.Array, chunk_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Return the sums of `one(chunk)`, which the backward pass computes again."""
    chunks = _split(hidden_BLD, targets_BL, chunk_tokens)
    if chunks is None:
        return one((hidden_BLD, targets_BL))
    # The sums leave the loop as stacked outputs: a carry begun from a constant would
    # not vary over a manual mesh axis as they do.
    return jax.tree.map(jnp.sum, jax.lax.map(jax.checkpoint(one), chunks))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def divided_cross_entropy(
    hidden_BLD: jax.Array,
    head_DV: jax.Array,
    targets_BL: jax.Array,
    chunk_tokens: int,
    layout: Layout,
) -> tuple[jax.Array, jax.Array]:
    """Return the sums of losses and of correct predictions over a device's tokens.

    They are equal along the model axis.
    """
    whole_DV = gather(head_DV, hidden_BLD.dtype, 0, layout)

    def one(chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden_BCD, targets_BC = chunk
        logits_BCV = logits_from_hidden(hidden_BCD, whole_DV)
        sums, _ = _sums(logits_BCV, targets_BC, layout)
        return sums

    return _over_chunks(one, hidden_BLD, targets_BL, chunk_tokens)


def _forward(
    hidden_BLD: jax.Array,
    head_DV: jax.Array,
    targets_BL: jax.Array,
    chunk_tokens: int,
    layout: Layout,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Return the sums, and the gradients of the sum of losses."""
    whole_DV = gather(head_DV, hidden_BLD.dtype, 0, layout)

    def one(
        grad_DV: jax.Array, chunk: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, Any]:
        hidden_BCD, targets_BC = chunk
        logits_BCV = logits_from_hidden(hidden_BCD, whole_DV)
        sums, (exp_BCV, total_BC, is_target_BCV) = _sums(logits_BCV, targets_BC, layout)
        dz_BCV = exp_BCV / total_BC[..., None] - is_target_BCV
        dz_BCV = jnp.where((targets_BC >= 0)[..., None], dz_BCV, 0.0)
        dz_BCV = dz_BCV.astype(hidden_BCD.dtype)
        grad_DV += jnp.einsum(
            "bcd,bcv->dv", hidden_BCD, dz_BCV, preferred_element_type=jnp.float32
        )

        return grad_DV, (sums, dz_BCV @ whole_DV.T)

    grad_DV = jnp.zeros(whole_DV.shape, jnp.float32)
    chunks = _split(hidden_BLD, targets_BL, chunk_tokens)
    if chunks is None:
        grad_DV, (sums, grad_BLD) = one(grad_DV, (hidden_BLD, targets_BL))
    else:
        grad_DV, (sums, grads_BCD) = jax.lax.scan(one, grad_DV, chunks)
        sums = jax.tree.map(jnp.sum, sums)
        batch, length, width = hidden_BLD.shape
        grad_BLD = jnp.moveaxis(grads_BCD, 0, 1).reshape(batch, -1, width)[:, :length]

    return sums, (sum_over(grad_BLD, layout.model), scatter(grad_DV, 0, layout))


def _backward(
    chunk_tokens: int,
    layout: Layout,
    grads: tuple[jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, None]:
    grad_BLD, grad_DV = grads
    # In float32: 1 / count is off by up to 0.4% in bfloat16 if the count is no power of
    # two, for all tokens equally, and so would be every gradient but the head's.
    scale = cotangents[0]
    return (grad_BLD * scale).astype(grad_BLD.dtype), grad_DV * scale, None


divided_cross_entropy.defvjp(_forward, _backward)


def _sums(
    logits_BLV: jax.Array, targets_BL: jax.Array, layout: Layout | None = None
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
    """Return a chunk's sums, exp(z - max z), its sum, and which logits are targets.

    A padded target, -1, does not count.
    """
    axis = layout.model if layout else None
    axis = axis if axis and jax.lax.axis_size(axis) > 1 else None

    ids_V = jax.lax.broadcasted_iota(jnp.int32, logits_BLV.shape, 2)
    if axis:
        ids_V += logits_BLV.shape[2] * jax.lax.axis_index(axis)
    # A masked sum in place of a gather: it fuses with the passes over the logits and
    # needs no exchange when the vocabulary is sharded.
    is_target_BLV = ids_V == targets_BL[..., None]
    target_BL = jnp.sum(logits_BLV, axis=-1, where=is_target_BLV)

    # It cancels, and so do its derivatives.
    max_BL = jax.lax.stop_gradient(logits_BLV.max(axis=-1))
    if axis:
        max_BL = jax.lax.pmax(max_BL, axis)
    exp_BLV = jnp.exp(logits_BLV - max_BL[..., None])

    total_BL = exp_BLV.sum(axis=-1)
    if axis:
        total_BL = jax.lax.psum(total_BL, axis)
        target_BL = jax.lax.psum(target_BL, axis)

    loss_BL = jnp.log(total_BL) + max_BL - target_BL
    is_token_BL = targets_BL >= 0
    is_correct_BL = is_token_BL & (target_BL >= max_BL)
    sums = (loss_BL.sum(where=is_token_BL), is_correct_BL.sum(dtype=jnp.float32))
    return sums, (exp_BLV, total_BL, is_target_BLV)


def _split(
    hidden_BLD: jax.Array, targets_BL: jax.Array, chunk_tokens: int
) -> tuple[jax.Array, jax.Array] | None:
    """Cut both along their length into equal chunks, on a new leading axis.

    Padded at the end; None if one chunk holds all of the `[B, L]` tokens.
    """
    batch, length = targets_BL.shape
    num_chunks = -(-length // max(1, chunk_tokens // batch))
    if num_chunks == 1:
        return None

    def cut(x_BL: jax.Array, padding: int) -> jax.Array:
        chunk = -(-length // num_chunks)
        pad = [(0, 0), (0, num_chunks * chunk - length)] + [(0, 0)] * (x_BL.ndim - 2)
        padded = jnp.pad(x_BL, pad, constant_values=padding)
        parts = padded.reshape(batch, num_chunks, chunk, *x_BL.shape[2:])
        return jnp.moveaxis(parts, 1, 0)

    return cut(hidden_BLD, 0), cut(targets_BL, -1)


def accumulated(gradient: GradientFn, num_parts: int) -> GradientFn:
    """Return the same function of a batch, computed in parts of it."""
    if num_parts == 1:
        return gradient

    def mean(params: PyTree, batch: PyTree):
        parts = jax.tree.map(lambda x: x.reshape(num_parts, -1, *x.shape[1:]), batch)

        def add(total: PyTree, part: PyTree) -> tuple[PyTree, Any]:
            out, grads = gradient(params, part)
            return jax.tree.map(jnp.add, total, grads), out

        zeros = jax.tree.map(jnp.zeros_like, params)
        total, outs = jax.lax.scan(add, zeros, parts)
        grads = jax.tree.map(lambda x: x / num_parts, total)
        return jax.tree.map(lambda x: x.mean(axis=0), outs), grads

    return mean


def make_accumulated_loss_fn(loss_fn: Callable, num_parts: int) -> Callable:
    """Make a loss whose gradient is the mean over equal parts of a batch, in turn.

    `loss_fn(params, batch, key) -> (loss, aux)` gives means over the batch but for
    aux's `num_tokens`, a sum. All parts get the same key.
    """
    if num_parts == 1:
        return loss_fn

    def loss_and_grad(
        params: PyTree, batch: PyTree, key: jax.Array
    ) -> tuple[tuple[jax.Array, PyTree], PyTree]:
        def gradient(params: PyTree, part: PyTree) -> Any:
            return jax.value_and_grad(loss_fn, has_aux=True)(params, part, key)

        (value, aux), grads = accumulated(gradient, num_parts)(params, batch)
        if "num_tokens" in aux:
            aux["num_tokens"] *= num_parts
        return (value, aux), grads

    return with_gradient(loss_fn, loss_and_grad)


def with_gradient(loss_fn: Callable, loss_and_grad: Callable) -> Callable:
    """Return `loss_fn(params, batch, key) -> (loss, aux)` with a given gradient.

    `loss_and_grad` returns `((loss, aux), gradient)`. First derivatives are in reverse
    mode, and in forward mode over these.
    """

    def backward(grads: PyTree, cotangents: Any) -> tuple[PyTree, None, None]:
        return jax.tree.map(lambda g: g * cotangents[0], grads), None, None

    loss = jax.custom_vjp(loss_fn)
    loss.defvjp(loss_and_grad, backward)
    return loss
