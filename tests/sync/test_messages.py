"""Messages: what they are made of, how many bytes they have, what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax.sync.messages import (
    AsIs,
    Compressed,
    Message,
    Ranked,
    mean_of_decoded,
    weighted_sum_of_decoded,
)
from cocodc_jax.sync.summed import ByRings
from cocodc_jax.transforms import compression
from cocodc_jax.transforms.compressor import identity
from cocodc_jax.transforms.error_feedback import error_feedback
from cocodc_jax.transforms.low_rank import low_rank, resize

PART = {"w": jax.ShapeDtypeStruct((64, 32), np.float32)}


def ranked():
    return Ranked(
        lambda rank: error_feedback(low_rank(rank)),
        lambda state, tree, rank: state._replace(inner=resize(state.inner, tree, rank)),
        8,
    )


def test_as_it_is():
    message = AsIs()
    assert message.compressor() is None
    assert message.init(PART) == ()
    assert message.encoded(PART) == PART
    assert message.num_bytes(PART, 4) == 4 * 64 * 32
    assert message.only_in_program is None
    assert not message.is_ranked


def test_compressed():
    message = AsIs().compressed(compression.parse("ef+int8"))
    assert isinstance(message, Compressed)
    assert message.compressor(7) is message.by
    (codes, *_) = jax.tree.leaves(message.encoded(PART))
    assert codes.dtype in (jnp.int8, jnp.uint8)
    assert 64 * 32 < message.num_bytes(PART, 4) < 1.1 * 64 * 32
    other = message.compressed(compression.parse("bfloat16"))
    assert other.num_bytes(PART, 4) == 2 * 64 * 32


def test_a_compressor_remembers_from_zero():
    part = {"w": jnp.ones((4, 2))}
    state = Compressed(compression.parse("ef+int8")).init(part)
    np.testing.assert_array_equal(state.residual["w"], jnp.zeros((4, 2)))


@pytest.mark.parametrize("rank", [2, 8])
def test_of_a_rank_the_factors_are_sent(rank):
    message = ranked()
    assert message.is_ranked
    assert message.num_bytes(PART, 4, rank) == 4 * rank * (64 + 32)


def test_before_a_schedule_has_set_a_rank_it_is_the_first():
    message = ranked()
    assert message.num_bytes(PART, 4) == message.num_bytes(PART, 4, 8)


def test_a_state_follows_the_rank():
    message, part = ranked(), {"w": jnp.ones((64, 32))}
    small = message.resize(message.init(part, 8), part, 2)
    like = message.init(part, 2)
    assert jax.tree.map(jnp.shape, small) == jax.tree.map(jnp.shape, like)


def test_ranked_messages_keep_their_compressor():
    with pytest.raises(
        ValueError, match="its rank follows .* pass adaptive_rank=False"
    ):
        ranked().compressed(compression.parse("int8"))


def test_messages_are_values():
    assert AsIs() == AsIs()
    assert ByRings(2) == ByRings(2) != ByRings(3)
    by = compression.parse("int8")
    assert hash(Compressed(by)) == hash(Compressed(by))
    assert all(issubclass(kind, Message) for kind in (AsIs, Compressed, ByRings))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_decoded_messages(dtype):
    """In float32, and cast back: 1/3 of 1, 2 and 3 each, or 1/4, 1/4 and 1/2."""
    tree = {"w": jnp.array([[1.0, 0.0], [2.0, 0.0], [3.0, 4.0]], dtype)}
    messages, _ = jax.vmap(lambda x: identity().encode(x, ()))(tree)
    mean = jax.jit(lambda m: mean_of_decoded(m, identity()))(messages)
    assert mean["w"].dtype == dtype
    assert mean["w"].tolist() == pytest.approx([2, float(jnp.array(4 / 3, dtype))])
    weights = jnp.array([0.25, 0.25, 0.5])
    weighted = weighted_sum_of_decoded(messages, weights, identity())
    assert weighted["w"].tolist() == [2.25, 2.0]
