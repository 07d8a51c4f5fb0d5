"""Backward passes for CPUs against JAX's own, and the choice among them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax.models import TransformerConfig, init_params, make_loss_fn, make_outputs
from cocodc_jax.models.backward import choose, product, spread

_SMALL = TransformerConfig(
    vocab_size=29,
    num_layers=2,
    width=16,
    mlp_width=24,
    num_heads=4,
    num_kv_heads=2,
    backward="cpu",
)
_TOKENS = np.random.default_rng(0).integers(0, 29, (3, 2, 9)).astype(np.int32)


def _draw(shape, seed):
    x = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(x, jnp.float32)


def _gradients(config):
    """Return loss and gradients of three different regions, and the program."""
    keys = jax.random.split(jax.random.key(0), len(_TOKENS))
    params = jax.vmap(lambda key: init_params(config, key))(keys)
    loss_fn = make_loss_fn(config)

    def gradient(params, tokens):
        return jax.value_and_grad(loss_fn, has_aux=True)(params, tokens, keys[0])

    with jax.numpy_dtype_promotion("strict"):
        program = jax.jit(jax.vmap(gradient)).lower(params, _TOKENS)
    (loss, _), grads = program.compile()(params, _TOKENS)
    return loss, grads, program.as_text()


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        pytest.param({}, 2e-6, marks=pytest.mark.slow),
        ({"scan_layers": False, "qk_norm": True}, 2e-6),
        pytest.param(
            {"tie_embeddings": False, "loss_chunk_tokens": 4},
            2e-6,
            marks=pytest.mark.slow,
        ),
        pytest.param({"remat": "dots"}, 2e-6, marks=pytest.mark.slow),
        ({"compute_dtype": "bfloat16"}, 2e-2),
    ],
)
def test_gradients_are_those_of_jax_up_to_rounding(changes, tolerance):
    """Of every parameter, with regions in one batch, under strict promotion."""
    config = dataclasses.replace(_SMALL, **changes)
    plain = dataclasses.replace(config, backward="plain")
    (loss, grads, program), (loss_plain, grads_plain, program_plain) = map(
        _gradients, (config, plain)
    )

    assert program != program_plain
    np.testing.assert_allclose(loss, loss_plain, rtol=tolerance)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=0, atol=tolerance * np.abs(b).max()
        ),
        grads,
        grads_plain,
    )


def test_gradients_of_a_product_are_its_formula():
    """y = x W: gradients g W' and x' g, summed over sequences and positions."""
    x = _draw((2, 5, 3), 0)
    w = _draw((3, 4), 1)
    g = _draw((2, 5, 4), 2)
    y, pull = jax.vjp(lambda x, w: product(x, w, "cpu"), x, w)
    grad_x, grad_w = pull(g)

    np.testing.assert_allclose(y, np.asarray(x) @ np.asarray(w), rtol=1e-5)
    np.testing.assert_allclose(grad_x, np.asarray(g) @ np.asarray(w).T, rtol=1e-5)

    flat_x = np.asarray(x).reshape(-1, 3)
    flat_g = np.asarray(g).reshape(-1, 4)
    np.testing.assert_allclose(grad_w, flat_x.T @ flat_g, rtol=1e-4, atol=1e-6)


def test_a_weights_gradient_turns_the_tokens_and_not_the_gradient():
    """The program transposes x, once for two weights that read it."""
    x = _draw((4, 8, 16), 0)
    w = _draw((16, 64), 1)

    def turned(backward):
        def loss(w):
            a = product(x, w["a"], backward)
            b = product(x, w["b"], backward)
            return jnp.sum(jnp.sin(a) * jnp.cos(b))

        program = jax.jit(jax.grad(loss)).lower({"a": w, "b": w}).as_text()
        return program.count("stablehlo.transpose")

    # JAX's own transposes each product of gradient and tokens.
    assert turned("plain") == 2
    assert turned("cpu") == 0


@pytest.mark.parametrize("backward", ["plain", "cpu"])
def test_a_spread_number_scales_its_row(backward):
    x = _draw((2, 5, 1), 0)
    row = _draw((2, 5, 7), 1)

    def total(x):
        return jnp.sum(row * spread(x, 7, backward))

    value, gradient = jax.value_and_grad(total)(x)
    np.testing.assert_allclose(value, np.sum(np.asarray(row) * np.asarray(x)), 1e-5)
    expected = np.asarray(row).sum(-1, keepdims=True)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("backward", "platform", "is_shared", "needs_forward_mode", "expected"),
    [
        ("auto", "cpu", False, False, "cpu"),
        ("auto", "cpu", True, False, "plain"),
        ("auto", "cpu", False, True, "plain"),
        ("auto", "gpu", False, False, "plain"),
        ("auto", "tpu", False, False, "plain"),
        ("plain", "cpu", False, False, "plain"),
        ("cpu", "cpu", False, False, "cpu"),
    ],
)
def test_the_platform_chooses_the_backward_pass(
    backward, platform, is_shared, needs_forward_mode, expected
):
    assert choose(backward, platform, is_shared, needs_forward_mode) == expected


@pytest.mark.parametrize(
    ("platform", "is_shared", "needs_forward_mode", "message"),
    [
        ("tpu", False, False, "is for regions of one CPU device; use backward='auto'"),
        ("cpu", True, False, "is for regions of one CPU device; use"),
        ("cpu", False, True, "has no second derivatives, which the method takes; use"),
        ("gpu", True, True, "CPU device and has no second derivatives"),
    ],
)
def test_an_unsupported_backward_pass_is_refused(
    platform, is_shared, needs_forward_mode, message
):
    with pytest.raises(ValueError, match=f"backward='cpu' .*{message}"):
        choose("cpu", platform, is_shared, needs_forward_mode)


def test_outputs_can_be_differentiated_forward_whatever_is_configured():
    """Gauss-Newton products take the Jacobian of the logits."""
    model, loss = make_outputs(_SMALL)
    params = jax.jit(init_params, static_argnums=0)(_SMALL, jax.random.key(0))
    tokens = _TOKENS[0]

    @jax.jit
    def forward(params):
        return jax.jvp(lambda p: model(p, tokens), (params,), (params,))

    logits, tangent = forward(params)
    assert np.isfinite(tangent).all()
    loss_fn = jax.jit(make_loss_fn(_SMALL))
    expected, _ = loss_fn(params, tokens, jax.random.key(0))
    np.testing.assert_allclose(loss(logits, tokens), expected, rtol=1e-5)
