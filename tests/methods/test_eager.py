"""Eager updates: a region's own part of the mean is fresh."""

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.methods.contrib.eager import eager_outer
from cocodc_jax.transforms.sparsify import top_k


def test_eager_counts_what_its_message_decodes_to():
    """Top 1 of (4, 1) is (4, 0): the 1 is in nobody's mean, so not in its share."""
    outer, compressor, zero = eager_outer(optax.sgd(1.0)), top_k(0.5), jnp.zeros(2)
    local, key = jnp.array([-4.0, -1.0]), jax.random.key(0)
    _, state = outer.send(zero, outer.init(zero, compressor), local, compressor, key)
    params, _ = outer.receive(zero, state, zero, 2)
    assert params.tolist() == [-2, 0]
