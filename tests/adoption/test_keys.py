"""Runs on PRNG keys of another implementation than JAX comes with."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cocodc_jax as cc

PARAMS = {"w": jnp.ones((4, 2))}
BATCHES = np.ones((4, 4, 2, 4), np.float32)


def loss_fn(params, batch, key):
    kept = jax.random.bernoulli(key, 0.5, batch.shape)
    return jnp.mean((kept * batch @ params["w"]) ** 2), {"kept": kept.sum()}


def make(data=1):
    # Messages are drawn too: rounded at random.
    method = cc.methods.get("diloco", sync_interval=2, compress="int8(stochastic=True)")
    mesh = cc.make_mesh(4, data=data)
    return cc.RegionProgram(loss_fn, optax.sgd(0.1), method, PARAMS, 4, mesh=mesh)


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_are_of_jaxs_default(impl, data):
    with jax.default_prng_impl(impl):
        program = make(data)
        assert program.abstract().region.key.shape == (4, 4)
        state = program.init(PARAMS, jax.random.key(0))
        state, output = program.advance(state, BATCHES[:2])
        assert jax.random.key_data(state.region.key).shape == (4, 4)
    # Regions and steps differ in what they draw.
    assert len(np.unique(np.asarray(output.aux["kept"]))) > 2
    assert len(np.unique(np.asarray(state.region.params["w"]))) > 1
    assert len(output.syncs) == 1


def test_keys_of_another_implementation_are_refused():
    message = "implementation 'rbg', but .* for 'threefry2x32', .*'rbg'\\) before"
    with pytest.raises(ValueError, match=message):
        make().init(PARAMS, jax.random.key(0, impl="rbg"))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (0, r"key=0 must be a PRNG key: jax.random.key\(seed\)"),
        (None, "key=None must be a PRNG key"),
        (jax.random.split(jax.random.key(0), 4), r"key has the shape \(4,\), but must"),
        (jax.random.split(jax.random.PRNGKey(0)), r"key has the shape \(2, 2\), but"),
    ],
)
def test_what_is_no_key_is_refused(key, message):
    with pytest.raises(ValueError, match=message):
        make().init(PARAMS, key)


def test_keys_as_jax_had_them_are_taken():
    state = make().init(PARAMS, jax.random.PRNGKey(0))
    new = make().init(PARAMS, jax.random.key(0))
    np.testing.assert_array_equal(state.region.key, new.region.key)
