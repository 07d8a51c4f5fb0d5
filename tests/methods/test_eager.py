"""Eager updates: a region's own part of the mean is fresh."""

import optax

from cocodc_jax import methods
from cocodc_jax.methods.contrib.eager import eager_outer
from cocodc_jax.sync.schedules import one_step_stale
from cocodc_jax.transforms.compressor import identity
from cocodc_jax.transforms.sparsify import top_k
from tests.methods.regional_steps import assert_is, one, send


def test_its_parts():
    method = methods.get("eager", sync_interval=8)
    assert method.schedule == one_step_stale(8)
    assert method.sync.outer.group == "all"


def test_eager_takes_its_stale_share_for_a_fresh_one():
    """M = 2. First nothing arrives: Delta / 2. Then mean 3, own 8 instead of 4."""
    outer, plain = eager_outer(optax.sgd(1.0)), identity()
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
    outer, compressor = eager_outer(optax.sgd(1.0)), top_k(0.5)
    params, state = one(0.0, 0.0), outer.init(one(0.0, 0.0), compressor)
    _, state = send(outer, params, state, one(-4.0, -1.0), compressor)
    params, _ = outer.receive(params, state, one(0.0, 0.0), 2)
    assert_is(params, -2, 0)
