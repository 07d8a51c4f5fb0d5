"""Messages in one flat buffer: what goes in comes out, at its true size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax.exchange import flat_buffer
from cocodc_jax.transforms import compression
from cocodc_jax.transforms.compressor import message_bytes

RNG = np.random.default_rng(0)


def one_kind():
    return {
        "a": RNG.normal(size=(3, 2, 5)).astype(np.float32),
        "b": np.ones((3, 4), "f"),
    }


def many_kinds():
    return {
        "codes": RNG.integers(0, 255, (3, 7)).astype(np.uint8),
        "scales": RNG.normal(size=(3, 2, 1)).astype(np.float32),
        "half": jnp.asarray(RNG.normal(size=(3, 5)), jnp.bfloat16),
        "places": RNG.integers(-9, 9, (3, 3)).astype(np.int32),
        "signs": RNG.integers(0, 2, (3, 6)).astype(bool),
        "number": np.arange(3, dtype=np.int8),
    }


def shapes_of_one(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)


@pytest.mark.parametrize("make", [one_kind, many_kinds])
def test_a_flat_buffer_holds_the_bytes_of_its_arrays_and_gives_them_back(make):
    tree = make()
    packed = jax.jit(flat_buffer.pack)(tree)
    assert packed.shape[0] == 3
    assert packed.nbytes == sum(np.asarray(x).nbytes for x in jax.tree.leaves(tree))
    back = jax.jit(lambda b: flat_buffer.unpack(b, shapes_of_one(tree)))(packed)
    assert jax.tree.map(lambda x: x.dtype, back) == jax.tree.map(
        lambda x: x.dtype, tree
    )
    jax.tree.map(np.testing.assert_array_equal, back, tree)


def test_arrays_of_one_kind_can_be_summed_in_the_flat_buffer():
    tree = one_kind()
    total = flat_buffer.unpack(flat_buffer.pack(tree).sum(0), shapes_of_one(tree))
    jax.tree.map(
        lambda t, x: np.testing.assert_allclose(t, x.sum(0), rtol=1e-6), total, tree
    )


@pytest.mark.parametrize("name", ["int8", "fp4", "ef+topk:0.2", "lowrank:2+int4"])
def test_real_messages_survive(name):
    compressor = compression.parse(name)
    tree = {"w": jnp.asarray(RNG.normal(size=(16, 12)), jnp.float32)}
    message, _ = compressor.encode(tree, compressor.init(tree))
    rows = flat_buffer.pack(jax.tree.map(lambda x: x[None], message))
    assert rows.nbytes == message_bytes(message)
    back = flat_buffer.unpack(rows[0], jax.eval_shape(lambda m: m, message))
    jax.tree.map(np.testing.assert_array_equal, back, message)
