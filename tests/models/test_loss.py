"""The loss over a vocabulary in chunks, and a batch in parts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax.models import get, init_params, make_accumulated_loss_fn, make_loss_fn
from cocodc_jax.models.loss import cross_entropy
from tests.jaxprs import equations
from tests.numerics import assert_all_close

_WIDTH = 8
_VOCAB = 50
_compiled = jax.jit(cross_entropy, static_argnums=3)


def _example(batch, length, seed=0):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(batch, length, _WIDTH)).astype(np.float32)
    head = rng.normal(size=(_WIDTH, _VOCAB)).astype(np.float32)
    targets = rng.integers(0, _VOCAB, (batch, length)).astype(np.int32)
    return hidden, head, targets


def _oracle(hidden, head, targets):
    logits = hidden.astype(np.float64) @ head.astype(np.float64)
    loss = []
    correct = []
    for row, target in zip(logits.reshape(-1, _VOCAB), targets.ravel(), strict=True):
        loss.append(np.log(np.exp(row - row.max()).sum()) + row.max() - row[target])
        correct.append(np.argmax(row) == target)
    return np.mean(loss), np.mean(correct)


def _grad_jaxpr(chunk_tokens, batch, length):
    hidden, head, targets = _example(batch, length)
    loss = functools.partial(cross_entropy, targets_BL=targets)
    grad = jax.value_and_grad(
        functools.partial(loss, chunk_tokens=chunk_tokens), argnums=(0, 1), has_aux=True
    )
    return jax.make_jaxpr(grad)(hidden, head).jaxpr


def _largest_float32(jaxpr):
    return max(
        out.aval.size
        for equation in equations(jaxpr)
        for out in equation.outvars
        if out.aval.dtype == np.float32
    )


@pytest.mark.parametrize(
    ("batch", "length", "chunk_tokens"),
    [(2, 12, 8), (3, 7, 6), (1, 13, 4), (4, 5, 3), (2, 9, 18)],
)
def test_every_chunking_equals_the_numpy_oracle(batch, length, chunk_tokens):
    hidden, head, targets = _example(batch, length)
    targets[0, 0] = np.argmax(hidden[0, 0] @ head)
    loss, accuracy = _compiled(hidden, head, targets, chunk_tokens)
    expected_loss, expected_accuracy = _oracle(hidden, head, targets)
    # Float32 sums of some dozen terms.
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    np.testing.assert_allclose(accuracy, expected_accuracy, rtol=1e-6)


@pytest.mark.parametrize(
    ("batch", "length", "chunk_tokens"),
    [(3, 7, 6), (1, 13, 4), (2, 5, 4), (2, 5, 10_000)],
)
def test_gradient_is_softmax_minus_one_hot(batch, length, chunk_tokens):
    hidden, head, targets = _example(batch, length)
    loss = lambda h, w: cross_entropy(h, w, targets, chunk_tokens)[0]  # noqa: E731
    of_hidden, of_head = jax.jit(jax.grad(loss, (0, 1)))(hidden, head)

    logits = hidden.astype(np.float64) @ head
    softmax = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    of_logits = (softmax - np.eye(_VOCAB)[targets]) / targets.size

    np.testing.assert_allclose(of_hidden, of_logits @ head.T, rtol=1e-4, atol=1e-6)
    expected = np.einsum("bld,blv->dv", hidden, of_logits)
    np.testing.assert_allclose(of_head, expected, rtol=1e-4, atol=1e-6)


def test_whole_logits_never_exist_when_chunked():
    batch = 2
    length = 64
    num_logits = batch * length * _VOCAB
    assert _largest_float32(_grad_jaxpr(10_000, batch, length)) >= num_logits
    assert _largest_float32(_grad_jaxpr(16, batch, length)) < num_logits / 4


def test_one_chunk_has_no_scan():
    def has_scan(chunk_tokens):
        steps = equations(_grad_jaxpr(chunk_tokens, 2, 8))
        return any(equation.primitive.name == "scan" for equation in steps)

    assert not has_scan(16)
    assert has_scan(15)


def test_large_logits_stay_finite():
    hidden, head, targets = _example(1, 4)
    loss, _ = _compiled(hidden * 1e4, head, targets, 100)
    expected, _ = _oracle(hidden * 1e4, head, targets)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_bfloat16_hidden_states_give_float32_logits_and_head_gradient(chunk_tokens):
    hidden, head, targets = _example(2, 6)
    hidden = jnp.asarray(hidden, jnp.bfloat16)
    head = np.asarray(jnp.asarray(head, jnp.bfloat16), np.float32)
    loss_fn = functools.partial(
        cross_entropy, hidden, targets_BL=targets, chunk_tokens=chunk_tokens
    )
    (loss, _), grad = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(head)

    assert loss.dtype == grad.dtype == jnp.float32
    expected, _ = _oracle(np.asarray(hidden, np.float32), head, targets)
    # Inputs are exact in bfloat16, so only float32 sums differ; logits rounded to
    # bfloat16 would be off by about 1e-3.
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


# --- A batch in parts ---

CONFIG = dataclasses.replace(get("smoke"), num_layers=1, loss_chunk_tokens=16)


def result(params, tokens, num_parts):
    loss_fn = make_accumulated_loss_fn(make_loss_fn(CONFIG), num_parts)
    gradient = jax.value_and_grad(loss_fn, has_aux=True)
    return jax.jit(gradient)(params, tokens, jax.random.key(0))


@pytest.mark.parametrize("num_parts", [2, 6])
def test_losses_and_gradients_of_parts_add_up_to_those_of_the_batch(num_parts):
    params = init_params(CONFIG, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 256, (6, 17)).astype(np.int32)
    whole, parts = (result(params, tokens, num) for num in (1, num_parts))
    assert whole[0][1]["num_tokens"] == 6 * 16
    # Float32 sums in another order; gradients here are below 1.
    assert_all_close(parts, whole, rtol=1e-6, atol=1e-6)


def test_parts_of_a_batch_are_scanned():
    params = init_params(CONFIG, jax.random.key(0))
    tokens = np.zeros((4, 9), np.int32)
    text = str(
        jax.make_jaxpr(
            jax.grad(make_accumulated_loss_fn(make_loss_fn(CONFIG), 4), has_aux=True)
        )(params, tokens, jax.random.key(0))
    )

    assert "length=4" in text
    loss_fn = make_loss_fn(CONFIG)
    assert make_accumulated_loss_fn(loss_fn, 1) is loss_fn
