"""Exchanges at every step, by hand: two regions, stacked as a gather gives them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax.sync import every_step
from cocodc_jax.transforms import compression
from cocodc_jax.transforms.compressor import identity
from cocodc_jax.transforms.sparsify import top_k


def exchange(made, compressor, *rounds):
    """What regions make of their gradients, `[M, n]` a round."""
    first = jnp.array(rounds[0], jnp.float32)
    state = jax.vmap(lambda g: made.init(g, compressor))(first)
    out = []
    for gradients in rounds:
        message, state = jax.vmap(lambda g, s: made.send(g, s, compressor, None))(
            jnp.array(gradients, jnp.float32), state
        )
        out.append(np.asarray(made.receive(message, compressor)).tolist())
    return out


def test_mean_gradients_need_no_gathering():
    made = every_step.mean_gradients()
    assert made.receive is None
    assert made.init(jnp.ones(2), None) == ()
    assert made.send(3.0, (), None, None) == (3.0, ())


def test_compressed_gradients_with_memory():
    """What was too small at first, 3, comes with the 1 of the second step."""
    compressor = compression.error_feedback(top_k(0.5))
    made = every_step.compressed_gradients()
    gradients = [[4.0, 3.0], [0.0, 2.0]], [[0.0, 1.0], [0.0, 2.0]]
    assert exchange(made, compressor, *gradients) == [[2.0, 1.0], [0.0, 3.0]]


def test_decoupled_momentum_takes_the_sign_and_keeps_what_was_not_sent():
    """Top 1: (4, 0) and (0, -3). Left: (0, 2) and (1, 0), of which half stays.

    Then (0, -2) and (0.5, 0). That a mean is over the senders alone shows in no sign
    here, but after a cosine transform: `test_family_reference.py`.
    """
    made = every_step.decoupled_momentum(0.5)
    gradients = [[4.0, 2.0], [1.0, -3.0]], [[0.0, -3.0], [0.0, 0.0]]
    assert exchange(made, top_k(0.5), *gradients) == [[1.0, -1.0], [1.0, -1.0]]


def test_decoupled_momentum_with_a_compressor_that_tells_no_places():
    made = every_step.decoupled_momentum(0.5)
    gradients = [[4.0, 1.0, 2.0], [-2.0, 1.0, -5.0]]
    assert exchange(made, identity(), gradients) == [[1.0, 1.0, -1.0]]


@pytest.mark.parametrize("vote", ["majority", "average"])
def test_signs(vote):
    """In the second step the momentum, 0.01 g, times b1 is weaker than the gradient."""
    made = every_step.signs(0.9, 0.99, vote)
    out = exchange(made, None, [[4.0, 1.0], [2.0, -3.0]], [[-1.0, -1.0], [-1.0, 1.0]])
    assert out == [[1.0, 0.0], [-1.0, 0.0]]


def test_votes_of_three_differ():
    gradients = [[1.0], [1.0], [-1.0]]
    made = [every_step.signs(0.9, 0.99, vote) for vote in ("majority", "average")]
    (majority,), (average,) = (exchange(m, None, gradients) for m in made)
    assert majority == [1]
    np.testing.assert_allclose(average, [1 / 3], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_decoded_messages(dtype):
    """In float32, and cast back: 1/3 of 1, 2 and 3 each, or 1/4, 1/4 and 1/2."""
    tree = {"w": jnp.array([[1.0, 0.0], [2.0, 0.0], [3.0, 4.0]], dtype)}
    messages, _ = jax.vmap(lambda x: identity().encode(x, ()))(tree)
    mean = jax.jit(lambda m: every_step.mean_of_decoded(m, identity()))(messages)
    assert mean["w"].dtype == dtype
    assert mean["w"].tolist() == pytest.approx([2, float(jnp.array(4 / 3, dtype))])
    weights = jnp.array([0.25, 0.25, 0.5])
    weighted = every_step.weighted_sum_of_decoded(messages, weights, identity())
    assert weighted["w"].tolist() == [2.25, 2.0]


def test_errors():
    with pytest.raises(ValueError, match="momentum_decay=1 must be at least 0"):
        every_step.decoupled_momentum(1)
    with pytest.raises(ValueError, match="lion_beta1=1 must be at least 0"):
        every_step.signs(1, 0.9, "majority")
    with pytest.raises(ValueError, match="lion_beta2=2 must be at least 0"):
        every_step.signs(0.9, 2, "majority")
    with pytest.raises(ValueError, match="lion_vote='veto' is unknown; use one of"):
        every_step.signs(0.9, 0.9, "veto")
