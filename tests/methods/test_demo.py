"""DeMo: the top of the momentum, every step, and a step by the sign."""

import pytest

from cocodc_jax import methods
from cocodc_jax.methods.demo import decoupled_momentum
from cocodc_jax.transforms.compressor import identity
from cocodc_jax.transforms.sparsify import top_k
from tests.sync.exchanges import exchange


def test_its_parts():
    method = methods.get("demo")
    assert method.per_step.name == "decoupled_momentum"
    assert method.inner.optimizer == "sgd"
    assert method.inner.steps_by_sign
    assert methods.get("demo", compress="int4").per_step.name == "decoupled_momentum"


def test_decoupled_momentum_takes_the_sign_and_keeps_what_was_not_sent():
    """Top 1: (4, 0) and (0, -3). Left: (0, 2) and (1, 0), of which half stays.

    Then (0, -2) and (0.5, 0). That a mean is over the senders alone shows in no sign
    here, but after a cosine transform: `test_family_reference.py`.
    """
    made = decoupled_momentum(0.5, top_k(0.5))
    gradients = [[4.0, 2.0], [1.0, -3.0]], [[0.0, -3.0], [0.0, 0.0]]
    assert exchange(made, *gradients) == [[1.0, -1.0], [1.0, -1.0]]


def test_decoupled_momentum_with_a_compressor_that_tells_no_places():
    made = decoupled_momentum(0.5, identity())
    gradients = [[4.0, 1.0, 2.0], [-2.0, 1.0, -5.0]]
    assert exchange(made, gradients) == [[1.0, 1.0, -1.0]]


def test_a_compressor_is_replaced_and_the_decay_stays():
    made = decoupled_momentum(0.5, top_k(0.5)).compressed(identity())
    gradients = [[4.0, 2.0], [-1.0, -3.0]], [[-3.0, 0.0], [0.0, 1.0]]
    assert exchange(made, *gradients) == [[1.0, -1.0], [-1.0, 1.0]]


def test_errors():
    with pytest.raises(ValueError, match="momentum_decay=1 must be at least 0"):
        decoupled_momentum(1, identity())
    with pytest.raises(ValueError, match="momentum_decay=1.0 must be at least 0"):
        methods.get("demo", momentum_decay=1.0)
