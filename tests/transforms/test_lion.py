"""Distributed Lion: its bits, its signs, and with one region optax.lion."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax.transforms import lion
from cocodc_jax.transforms.compressor import message_bytes

B1, B2 = 0.9, 0.99


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_small_numbers_keep_their_sign(dtype):
    gradient = jnp.array([-1e-7, 1e-7], dtype)
    message, _ = lion.send(gradient, lion.init(gradient))
    direction = lion.combine(jax.tree.map(lambda x: x[None], message))
    assert direction.dtype == dtype
    assert direction.tolist() == [-1, 1]


@pytest.mark.parametrize("rule", lion.RULES)
def test_one_region_is_lion(rule):
    optimizer = optax.lion(0.1, b1=B1, b2=B2, weight_decay=0.2)
    decay = optax.chain(
        optax.add_decayed_weights(0.2), optax.scale_by_learning_rate(0.1)
    )
    params = wanted = jnp.ones(7)
    state, theirs, ours = lion.init(params), optimizer.init(params), decay.init(params)
    for g in np.random.default_rng(0).normal(size=(5, 7)):
        message, state = lion.send(jnp.asarray(g), state, B1, B2)
        direction = lion.combine(jax.tree.map(lambda x: x[None], message), rule)
        step, ours = decay.update(direction, ours, params)
        params = params + step
        step, theirs = optimizer.update(jnp.asarray(g), theirs, wanted)
        wanted = wanted + step
        np.testing.assert_allclose(params, wanted, rtol=1e-10)


def test_one_bit_a_value_exactly():
    params = {"w": jnp.ones((3, 8)), "b": [jnp.ones(9, jnp.bfloat16), None]}
    message, state = lion.send(params, lion.init(params))
    assert message_bytes(message) == 3 + 2
    assert state.momentum["b"][0].dtype == jnp.float32
    back = lion.sign_bits().decode(message)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    assert jax.tree.map(jnp.dtype, back) == jax.tree.map(jnp.dtype, params)


def test_zeros_are_sent_as_plus_one():
    zeros = jnp.array([0.0, -0.0])
    message, _ = lion.send(zeros, lion.init(zeros))
    np.testing.assert_array_equal(lion.sign_bits().decode(message), [1, 1])


def test_wrong_arguments_are_named():
    x = jnp.ones(2)
    with pytest.raises(ValueError, match=r"b1=1\.0 must be"):
        lion.send(x, lion.init(x), b1=1.0)
    with pytest.raises(ValueError, match="b2=-1 must be"):
        lion.send(x, lion.init(x), b2=-1)
    with pytest.raises(ValueError, match="rule='vote' is not one of"):
        lion.combine((), "vote")
