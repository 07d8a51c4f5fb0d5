"""Exchanges at every step, by hand: two regions, stacked as a gather gives them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax.methods.demo import decoupled_momentum
from cocodc_jax.sync import per_step
from cocodc_jax.transforms import compression
from cocodc_jax.transforms.compressor import identity
from cocodc_jax.transforms.sparsify import top_k


def exchange(made, *rounds):
    """What regions make of their gradients, `[M, n]` a round."""
    first = jnp.array(rounds[0], jnp.float32)
    state = jax.vmap(made.init)(first)
    out = []
    for gradients in rounds:
        message, state = jax.vmap(lambda g, s: made.send(g, s, None))(
            jnp.array(gradients, jnp.float32), state
        )
        out.append(np.asarray(made.receive(message)).tolist())
    return out


def test_mean_gradients_need_no_gathering():
    made = per_step.mean_gradients()
    assert made.receive is None
    assert made.init(jnp.ones(2)) == ()
    assert made.send(3.0, (), None) == (3.0, ())


def test_compressed_gradients_with_memory():
    """What was too small at first, 3, comes with the 1 of the second step."""
    compressor = compression.error_feedback(top_k(0.5))
    made = per_step.compressed_gradients(compressor)
    gradients = [[4.0, 3.0], [0.0, 2.0]], [[0.0, 1.0], [0.0, 2.0]]
    assert exchange(made, *gradients) == [[2.0, 1.0], [0.0, 3.0]]


def test_compressing_replaces_what_compresses():
    plain = per_step.mean_gradients()
    once = plain.compressed(compression.parse("int8"))
    assert once.name == "compressed_gradients"
    twice = once.compressed(compression.parse("float16"))
    shapes = {"w": jax.ShapeDtypeStruct((1024,), np.float32)}
    assert plain.num_bytes(shapes) == 4096
    assert 1024 < once.num_bytes(shapes) < 1100
    assert twice.num_bytes(shapes) == 2048


def test_what_cannot_be_compressed_says_why():
    made = per_step.PerStep("odd", lambda params: (), lambda g, state, key: (g, state))
    with pytest.raises(ValueError, match="its messages cannot be encoded further"):
        made.compressed(compression.parse("int8"))


def test_momentum_with_a_compressor_that_tells_no_places():
    made = decoupled_momentum(0.5, identity())
    gradients = [[4.0, 1.0, 2.0], [-2.0, 1.0, -5.0]]
    assert exchange(made, gradients) == [[1.0, 1.0, -1.0]]


def test_the_compressor_of_a_momentum_is_replaced_and_its_decay_stays():
    made = decoupled_momentum(0.5, top_k(0.5)).compressed(identity())
    gradients = [[4.0, 2.0], [-1.0, -3.0]], [[-3.0, 0.0], [0.0, 1.0]]
    assert exchange(made, *gradients) == [[1.0, -1.0], [-1.0, 1.0]]
