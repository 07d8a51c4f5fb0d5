"""Distributed Lion: one bit a parameter, put to a vote."""

import numpy as np
import pytest

from cocodc_jax import methods
from cocodc_jax.methods.distributed_lion import signs
from tests.sync.exchanges import exchange


@pytest.mark.parametrize("vote", ["majority", "average"])
def test_signs(vote):
    """In the second step the momentum, 0.01 g, times b1 is weaker than the gradient."""
    made = signs(0.9, 0.99, vote)
    out = exchange(made, [[4.0, 1.0], [2.0, -3.0]], [[-1.0, -1.0], [-1.0, 1.0]])
    assert out == [[1.0, 0.0], [-1.0, 0.0]]


def test_votes_of_three_differ():
    gradients = [[1.0], [1.0], [-1.0]]
    made = [signs(0.9, 0.99, vote) for vote in ("majority", "average")]
    (majority,), (average,) = (exchange(m, gradients) for m in made)
    assert majority == [1]
    np.testing.assert_allclose(average, [1 / 3], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lion_beta1": 1}, "lion_beta1=1 must be at least 0"),
        ({"lion_beta2": 2}, "lion_beta2=2 must be at least 0"),
        ({"lion_beta2": -1.0}, "lion_beta2=-1.0 must be at least"),
        ({"lion_vote": "veto"}, "lion_vote='veto' is unknown; use one of"),
        ({"compress": "int8"}, "'distributed_lion': its messages are one bit a param"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        methods.get("distributed_lion", **options)
