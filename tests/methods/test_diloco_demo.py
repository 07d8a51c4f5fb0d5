"""DiLoCo with decoupled momentum."""

import pytest

from cocodc_jax import methods
from cocodc_jax.methods.diloco_demo import decoupled_momentum
from cocodc_jax.transforms.sparsify import top_k
from tests.methods.regional_steps import assert_is, one, send


def test_decoupled_momentum():
    """g = (4, 1), top 1: q = (4, 0), r = (0, 1); Q = (2, 0): d = (2, 1).

    theta = 0 - 0.5 (g + 0.5 d) = (-2.5, -0.75). Then d <- 0.5 d + g = (2, 2.5) with
    g = (1, 2): q = (0, 2.5), r = (2, 0).
    """
    outer, compressor = decoupled_momentum(0.5, 0.5), top_k(0.5)
    params, state = one(0.0, 0.0), outer.init(one(0.0, 0.0), compressor)
    sent, state = send(outer, params, state, one(-4.0, -1.0), compressor)
    assert_is(sent, 4, 0)
    params, state = outer.receive(params, state, one(2.0, 0.0), 2)
    assert_is(params, -2.5, -0.75)
    sent, state = send(outer, params, state, one(-3.5, -2.75), compressor)
    assert_is(sent, 0, 2.5)
    params, state = outer.receive(params, state, one(0.0, 0.0), 2)
    assert_is(params, -2.5 - 0.5 * (1 + 0.5 * 2), -0.75 - 0.5 * 2)


def test_errors():
    with pytest.raises(ValueError, match="outer_momentum=1.0 must be at least 0"):
        decoupled_momentum(0.7, 1.0)
    with pytest.raises(ValueError, match="outer_momentum=1.0 must be at least 0"):
        methods.get("diloco_demo", outer_momentum=1.0)
