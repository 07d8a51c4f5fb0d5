"""Outer optimizers: Nesterov by hand, and what an outer model cannot be part of."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax.methods.diloco_demo import decoupled_momentum
from cocodc_jax.methods.noloco import noisy_pairs
from cocodc_jax.sync import merge
from cocodc_jax.sync.messages import Compressed
from cocodc_jax.sync.method import Sync
from cocodc_jax.sync.outer import (
    RegionalOuter,
    SharedOuter,
    nesterov,
    nesterov_sgd,
    pseudo_gradient,
)
from cocodc_jax.sync.schedules import asynchronous, staggered
from cocodc_jax.sync.summed import ByRings
from cocodc_jax.transforms import compression

PAIRS = noisy_pairs(0.7, 0.5, 0.7, 0)
SHARED = nesterov(0.7, 0.9)


def synced(**parts):
    whole = {"schedule": staggered(4), "outer": PAIRS, "merge": merge.replace()}
    return Sync(**(whole | parts))


@pytest.mark.parametrize(
    ("momentum", "expected"), [(0.5, [-0.75, -1.625]), (0.0, [-0.5, -1.0])]
)
def test_nesterov_by_hand(momentum, expected):
    """m <- mu m + D; x <- x - eta (D + mu m): with D = 1, 1, eta 0.5, mu 0.5.

    First m = 1, x = -0.75; then m = 1.5, x = -0.75 - 0.5 * 1.75.
    """
    optimizer = nesterov(0.5, momentum).optimizer
    x, state, found = jnp.float32(0), optimizer.init(jnp.float32(0)), []
    for _ in range(2):
        step, state = optimizer.update(jnp.float32(1), state, x)
        x = optax.apply_updates(x, step)
        found.append(float(x))
    assert found == expected


def test_a_pseudo_gradient_is_old_minus_new_in_the_outer_dtype():
    """1 + 1 / 512 is no bfloat16: the difference from 1 is kept."""
    params = {"w": jnp.array([1 + 1 / 512, 3.0], jnp.float32)}
    local = {"w": jnp.array([1.0, 5.0], jnp.bfloat16)}
    found = pseudo_gradient(params, local)
    assert found["w"].dtype == jnp.float32
    np.testing.assert_array_equal(found["w"], [1 / 512, -2.0])


def test_places():
    assert SHARED.placed("divided") == dataclasses.replace(SHARED, placement="divided")
    assert SHARED.only_in_program is None
    assert "divided over the inner mesh" in SHARED.placed("divided").only_in_program
    assert PAIRS.placed("host") is PAIRS
    assert PAIRS.only_in_program == "each region has outer parameters of its own"


@pytest.mark.parametrize(
    "parts",
    [
        {"outer": SHARED, "schedule": asynchronous(4)},
        {"outer": SHARED, "weigh": lambda steps, tokens: tokens},
        {"outer": SHARED, "message": ByRings(2)},
        {
            "outer": decoupled_momentum(0.7, 0.9),
            "message": Compressed(compression.parse("int8")),
        },
    ],
)
def test_parts_that_go_together(parts):
    assert synced(**parts).outer is parts["outer"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        *(
            (part, "it has outer parameters in every region, and can neither weigh")
            for part in (
                {"schedule": asynchronous(4)},
                {"weigh": lambda steps, tokens: tokens},
            )
        ),
        (
            {"message": ByRings(2)},
            "ByRings sums pseudo-gradients on their way, for one outer model, but it",
        ),
    ],
)
def test_parts_that_take_one_outer_model(parts, message):
    with pytest.raises(ValueError, match=message):
        synced(**parts)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SharedOuter(optax.sgd(1.0), "attic"),
         r"outer_placement='attic' is unknown; use one of \('host', 'divided'\)"),
        (lambda: SHARED.placed("attic"), "outer_placement='attic' is unknown"),
        (lambda: PAIRS.placed("divided"), "it has no one outer model to divide"),
        (lambda: dataclasses.replace(PAIRS, group="trios"),
         r"group='trios' is unknown; use one of \('all', 'pairs', 'ring'\)"),
        (lambda: nesterov(0.0, 0.9), "outer_lr=0.0 must be positive"),
        (lambda: nesterov(-1.0, 0.9), "outer_lr=-1.0 must be positive"),
        (lambda: nesterov(math.nan, 0.9), "outer_lr=nan must be positive and finite"),
        (lambda: nesterov(math.inf, 0.9), "outer_lr=inf must be positive and finite"),
        (lambda: nesterov_sgd(1.0, 1.0), r"outer_momentum=1.0 must be in \[0, 1\)"),
        (lambda: nesterov_sgd(1.0, -0.1), r"outer_momentum=-0.1 must be in \[0, 1\)"),
    ],
)  # fmt: skip
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    assert isinstance(PAIRS, RegionalOuter)
