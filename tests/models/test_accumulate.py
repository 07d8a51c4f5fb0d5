"""A batch in parts against the batch at once."""

import dataclasses

import jax
import numpy as np
import pytest

from cocodc_jax.models import get, init_params, make_accumulated_loss_fn, make_loss_fn
from tests.numerics import assert_all_close

CONFIG = dataclasses.replace(get("smoke"), num_layers=1, loss_chunk_tokens=16)


def result(params, tokens, num_parts):
    loss_fn = make_accumulated_loss_fn(make_loss_fn(CONFIG), num_parts)
    gradient = jax.value_and_grad(loss_fn, has_aux=True)
    return jax.jit(gradient)(params, tokens, jax.random.key(0))


@pytest.mark.parametrize("num_parts", [2, 6])
def test_parts_are_the_batch(num_parts):
    params = init_params(CONFIG, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 256, (6, 17)).astype(np.int32)
    whole, parts = (result(params, tokens, num) for num in (1, num_parts))
    assert whole[0][1]["num_tokens"] == 6 * 16
    # Float32 sums in another order; gradients here are below 1.
    assert_all_close(parts, whole, rtol=1e-6, atol=1e-6)


def test_what_is_not_one_part_is_scanned():
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
