import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from cocodc_jax.models import (
    TransformerConfig,
    apply,
    flops_per_token,
    init_params,
    make_loss_fn,
)
from cocodc_jax.models.block import RMSNorm
from tests.models import oracle
from tests.numerics import assert_all_close, assert_within_ulps
from tests.program.mixture import drawn_params

_SMALL = TransformerConfig(
    vocab_size=29, num_layers=2, width=16, mlp_width=24, num_heads=4, num_kv_heads=4
)
_UNTIED = dataclasses.replace(
    _SMALL, num_kv_heads=2, qk_norm=True, tie_embeddings=False, scan_layers=False
)
_MIXTURE = dataclasses.replace(
    _SMALL, num_experts=4, expert_width=12, experts_per_token=2, norm_epsilon=1e-3
)
_KEY = jax.random.key(0)


def _tokens(batch, length, seed=0, vocab_size=_SMALL.vocab_size):
    shape = (batch, length)
    return np.random.default_rng(seed).integers(0, vocab_size, shape).astype(np.int32)


_init = jax.jit(init_params, static_argnums=0)
_logits = jax.jit(apply, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def _grad(config, params, tokens):
    return jax.grad(make_loss_fn(config), has_aux=True)(params, tokens, _KEY)[0]


@pytest.mark.parametrize(
    "config", [_SMALL, _UNTIED, _MIXTURE], ids=["tied", "untied", "mixture"]
)
def test_forward_equals_the_numpy_oracle(config):
    tokens = _tokens(2, 9)
    logits = _logits(config, drawn_params(config), tokens)
    expected = oracle.logits(config, drawn_params(config), tokens)
    # Float32 rounding through three blocks.
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("config", [_SMALL, _UNTIED], ids=["tied", "untied"])
def test_a_token_changes_no_logits_before_it(config):
    tokens = _tokens(2, 9)
    before = _logits(config, drawn_params(config), tokens)

    for at in (1, 5, 8):
        changed = tokens.copy()
        changed[:, at] = (changed[:, at] + 1) % config.vocab_size
        after = _logits(config, drawn_params(config), changed)

        np.testing.assert_array_equal(after[:, :at], before[:, :at])
        assert np.all(np.abs(after[:, at:] - before[:, at:]).max(-1) > 0)


def test_loss_predicts_the_next_token():
    tokens = _tokens(2, 8)
    loss, aux = jax.jit(make_loss_fn(_SMALL))(drawn_params(_SMALL), tokens, _KEY)
    logits = oracle.logits(_SMALL, drawn_params(_SMALL), tokens[:, :-1])
    picked = np.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    expected = np.mean(np.log(np.exp(logits).sum(-1)) - picked)

    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert aux["num_tokens"] == 14
    np.testing.assert_allclose(
        aux["accuracy"], np.mean(logits.argmax(-1) == tokens[:, 1:]), rtol=1e-6
    )


def test_scanned_and_unscanned_models_are_one():
    scanned = dataclasses.replace(_UNTIED, scan_layers=True)
    tokens = _tokens(2, 9)
    params = drawn_params(scanned)
    unstacked = oracle.unstacked(scanned, params)

    np.testing.assert_allclose(
        _logits(scanned, params, tokens),
        _logits(_UNTIED, unstacked, tokens),
        rtol=1e-5,
        atol=1e-6,
    )

    assert_all_close(
        oracle.unstacked(scanned, _grad(scanned, params, tokens)),
        _grad(_UNTIED, unstacked, tokens),
        rtol=1e-4,
        atol=1e-6,
    )


def test_scanned_and_unscanned_models_start_equal():
    scanned = _init(_SMALL, _KEY)
    unscanned = _init(dataclasses.replace(_SMALL, scan_layers=False), _KEY)
    assert_within_ulps(oracle.unstacked(_SMALL, scanned), unscanned)


def _num_products(config, params, tokens):
    """Counts matrix products in forward and backward, scans by their length."""

    def count(jaxpr, times):
        total = 0
        for equation in jaxpr.eqns:
            total += times * (equation.primitive.name == "dot_general")
            length = equation.params.get("length", 1)
            for inner in jaxprs_in_params(equation.params):
                total += count(inner, times * length)
        return total

    grad = jax.grad(make_loss_fn(config), has_aux=True)
    return count(jax.make_jaxpr(grad)(params, tokens, _KEY).jaxpr, 1)


@pytest.mark.parametrize("base", [_SMALL, _UNTIED], ids=["scanned", "unscanned"])
def test_rematerialisation_repeats_products(base):
    tokens = _tokens(2, 9)
    params = drawn_params(base)
    plain, dots, full = (
        _num_products(dataclasses.replace(base, remat=remat), params, tokens)
        for remat in ("none", "dots", "full")
    )

    # "dots" repeats the two products of attention, "full" those with weights too,
    # but for the block's last, whose result backward does not need.
    assert dots == plain + 2 * base.num_layers
    assert full == plain + 8 * base.num_layers


@pytest.mark.parametrize(
    ("base", "remat"), [(_SMALL, "dots"), (_SMALL, "full"), (_UNTIED, "full")]
)
def test_rematerialisation_keeps_gradients(base, remat):
    tokens = _tokens(2, 9)
    params = drawn_params(base)
    again = _grad(dataclasses.replace(base, remat=remat), params, tokens)
    assert_all_close(again, _grad(base, params, tokens), rtol=1e-4, atol=1e-6)


def test_activations_in_host_memory_change_no_gradient():
    """JAX's CPU has that kind of memory too; products are those of remat=attention."""
    tokens = _tokens(2, 9)
    params = drawn_params(_SMALL)
    near, far = (
        dataclasses.replace(_SMALL, remat=remat) for remat in ("attention", "offload")
    )
    grads = (_grad(config, params, tokens) for config in (near, far))

    assert_within_ulps(*grads)
    repeated = [_num_products(config, params, tokens) for config in (near, far)]
    assert repeated[0] == repeated[1]

    grad = jax.grad(make_loss_fn(far), has_aux=True)
    assert "<host>" in str(jax.make_jaxpr(grad)(params, tokens, _KEY))


def test_rms_norm_against_numpy():
    x = np.random.default_rng(0).normal(3, 2, (2, 5, 48)).astype(np.float32)
    x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
    norm = RMSNorm(_SMALL, 48)
    norm.scale[...] = jnp.linspace(0.5, 2, 48)
    expected = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6)
    expected = expected * np.linspace(0.5, 2, 48)

    np.testing.assert_allclose(norm(x), expected, rtol=1e-6)
    half = norm(jnp.asarray(x, jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    # With float32 statistics only the result is rounded, by half of 2^-7 at most.
    np.testing.assert_allclose(np.asarray(half, np.float32), expected, rtol=2**-8)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_parameters():
    config = dataclasses.replace(_SMALL, compute_dtype="bfloat16", vocab_size=31)
    params = drawn_params(config)
    tokens = _tokens(2, 9)
    grad = jax.eval_shape(functools.partial(_grad, config), params, tokens)
    assert {leaf.dtype for leaf in jax.tree.leaves(grad)} == {np.dtype(np.float32)}

    logits = _logits(config, params, tokens)
    assert logits.dtype == jnp.float32
    # Accumulated in float32: not all representable in bfloat16.
    assert np.any(logits != logits.astype(jnp.bfloat16).astype(jnp.float32))

    exact = oracle.logits(config, params, tokens)
    error = np.abs(logits - exact).max() / np.abs(exact).max()
    # Bfloat16 keeps 8 bits; the lower bound shows that it was used at all.
    assert 1e-4 < error < 0.05


def test_init_deviations_follow_fan_in_and_depth():
    config = dataclasses.replace(_SMALL, width=128, mlp_width=256, num_layers=8)
    params = _init(config, _KEY)
    residual = 1 / np.sqrt(2 * 8)
    expected = {"query": 128**-0.5, "value": 128**-0.5, "output": 128**-0.5 * residual}
    for name, deviation in expected.items():
        kernel = params["blocks"]["attention"][name]
        np.testing.assert_allclose(np.std(kernel), deviation, rtol=0.02)

    down = np.std(params["blocks"]["mlp"]["down"])
    np.testing.assert_allclose(down, 256**-0.5 * residual, rtol=0.02)
    assert np.all(params["norm"]["scale"] == 1)


def test_forward_over_reverse_gives_the_same_with_chunks_and_repeated_products():
    plain = dataclasses.replace(_UNTIED, num_layers=1)
    params = drawn_params(plain)
    tokens = _tokens(2, 8)
    along = jax.tree.map(lambda x: np.cos(10 * x), params)

    def product(config):
        grad = jax.grad(make_loss_fn(config), has_aux=True)
        return jax.jit(
            lambda p, v: jax.jvp(lambda p: grad(p, tokens, _KEY)[0], (p,), (v,))[1]
        )(params, along)

    chunked = dataclasses.replace(plain, loss_chunk_tokens=6, remat="full")
    assert_all_close(product(chunked), product(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [_SMALL, _UNTIED], ids=["tied", "untied"])
def test_flops_per_token_are_those_of_the_compiled_step(config):
    config = dataclasses.replace(
        config,
        num_layers=1,
        width=64,
        mlp_width=160,
        vocab_size=256,
        scan_layers=False,
        num_kv_heads=4,
    )
    shapes = jax.eval_shape(functools.partial(init_params, config), _KEY)
    tokens = jax.ShapeDtypeStruct((2, 65), np.int32)
    grad = jax.value_and_grad(make_loss_fn(config), has_aux=True)
    compiled = jax.jit(grad).lower(shapes, tokens, _KEY).compile()

    # XLA counts element-wise work as well.
    counted = compiled.cost_analysis()["flops"] / (2 * 64)
    assert 1 < counted / flops_per_token(config, 64) < 1.15
