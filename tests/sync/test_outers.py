"""Regional outer optimizers, one region's fragment by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax.sync import outers
from cocodc_jax.transforms.compressor import identity
from cocodc_jax.transforms.sparsify import top_k


def one(*values):
    return {"w": jnp.array(values, jnp.float32)}


def send(outer, params, state, local, compressor):
    message, state = jax.jit(
        lambda p, s, x: outer.send(p, s, x, compressor, jax.random.key(0))
    )(params, state, local)
    return compressor.decode(message), state


def assert_is(tree, *values):
    np.testing.assert_allclose(tree["w"], values, rtol=1e-6)


def test_noisy_pairs():
    """phi 2, theta 1; partner phi 4, theta 0: g (1 + 4) / 2, phi 3.

    v = 0.5 * 0 + 0.4 * 2.5 + 0.2 * (2 - 3) = 0.8; phi = 1.2; again with the same:
    v = 0.4 + 1 + 0.2 * (1.2 - 3) = 1.04.
    """
    outer, plain = outers.noisy_pairs(0.4, 0.5, 0.2, 0), identity()
    params, state = one(2.0), outer.init(one(2.0), plain)
    sent, state = send(outer, params, state, one(1.0), plain)
    assert_is(sent["params"], 2)
    assert_is(sent["pseudo_gradient"], 1)
    arrived = {"params": one(3.0), "pseudo_gradient": one(2.5)}
    params, state = outer.receive(params, state, arrived, 4)
    assert_is(params, 1.2)
    params, state = outer.receive(params, state, arrived, 4)
    assert_is(params, 1.2 - 1.04)


def test_decoupled_momentum():
    """g = (4, 1), top 1: q = (4, 0), r = (0, 1); Q = (2, 0): d = (2, 1).

    theta = 0 - 0.5 (g + 0.5 d) = (-2.5, -0.75). Then d <- 0.5 d + g = (2, 2.5) with
    g = (1, 2): q = (0, 2.5), r = (2, 0).
    """
    outer, compressor = outers.decoupled_momentum(0.5, 0.5), top_k(0.5)
    params, state = one(0.0, 0.0), outer.init(one(0.0, 0.0), compressor)
    sent, state = send(outer, params, state, one(-4.0, -1.0), compressor)
    assert_is(sent, 4, 0)
    params, state = outer.receive(params, state, one(2.0, 0.0), 2)
    assert_is(params, -2.5, -0.75)
    sent, state = send(outer, params, state, one(-3.5, -2.75), compressor)
    assert_is(sent, 0, 2.5)
    params, state = outer.receive(params, state, one(0.0, 0.0), 2)
    assert_is(params, -2.5 - 0.5 * (1 + 0.5 * 2), -0.75 - 0.5 * 2)


def test_eager_takes_its_stale_share_for_a_fresh_one():
    """M = 2. First nothing arrives: Delta / 2. Then mean 3, own 8 instead of 4."""
    outer, plain = outers.eager(optax.sgd(1.0)), identity()
    params, state = one(0.0), outer.init(one(0.0), plain)
    sent, state = send(outer, params, state, one(-4.0), plain)
    assert_is(sent, 4)
    params, state = outer.receive(params, state, one(0.0), 2)
    assert_is(params, -2)
    _, state = send(outer, params, state, one(-10.0), plain)
    params, state = outer.receive(params, state, one(3.0), 2)
    assert_is(params, -2 - (3 + (8 - 4) / 2))


def test_eager_counts_what_its_message_decodes_to():
    """Top 1 of (4, 1) is (4, 0): the 1 is in nobody's mean, so not in its share."""
    outer, compressor = outers.eager(optax.sgd(1.0)), top_k(0.5)
    params, state = one(0.0, 0.0), outer.init(one(0.0, 0.0), compressor)
    _, state = send(outer, params, state, one(-4.0, -1.0), compressor)
    params, _ = outer.receive(params, state, one(0.0, 0.0), 2)
    assert_is(params, -2, 0)


def test_a_pseudo_gradient_has_the_outer_dtype():
    """1 + 1 / 512 is no bfloat16: the difference from 1 is kept."""
    outer, plain = outers.eager(optax.sgd(1.0)), identity()
    params = one(1 + 1 / 512)
    local = {"w": jnp.ones(1, jnp.bfloat16)}
    sent, _ = send(outer, params, outer.init(params, plain), local, plain)
    assert sent["w"].dtype == jnp.float32
    assert_is(sent, 1 / 512)


def test_error():
    with pytest.raises(ValueError, match="outer_momentum=1.0 must be at least 0"):
        outers.decoupled_momentum(0.7, 1.0)
