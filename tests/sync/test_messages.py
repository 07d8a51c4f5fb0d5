"""Messages at a sync and at every step: their parts, bytes and errors."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax.methods.demo import decoupled_momentum
from cocodc_jax.sync import per_step
from cocodc_jax.sync.averages import SharedMask
from cocodc_jax.sync.messages import (
    AsIs,
    Compressed,
    Message,
    Ranked,
    mean_of_decoded,
    weighted_sum_of_decoded,
)
from cocodc_jax.sync.regions import matchings
from cocodc_jax.sync.summed import ByRings
from cocodc_jax.transforms import compression
from cocodc_jax.transforms.compressor import identity
from cocodc_jax.transforms.error_feedback import error_feedback
from cocodc_jax.transforms.low_rank import low_rank, resize
from cocodc_jax.transforms.sparsify import top_k

PART = {"w": jax.ShapeDtypeStruct((64, 32), np.float32)}


def ranked():
    return Ranked(
        lambda rank: error_feedback(low_rank(rank)),
        lambda state, tree, rank: state._replace(inner=resize(state.inner, tree, rank)),
        8,
    )


def test_an_unchanged_message_has_no_state():
    message = AsIs()
    assert message.compressor() is None
    assert message.init(PART) == ()
    assert message.encoded(PART) == PART
    assert message.num_bytes(PART, 4) == 4 * 64 * 32
    assert message.only_in_program is None
    assert not message.is_ranked


def test_a_compressed_message_has_the_bytes_and_memory_of_its_codec():
    message = AsIs().compressed(compression.parse("ef+int8"))
    assert isinstance(message, Compressed)
    assert message.at(7).compressor() is message.by
    (codes, *_) = jax.tree.leaves(message.encoded(PART))
    assert codes.dtype in (jnp.int8, jnp.uint8)
    assert 64 * 32 < message.num_bytes(PART, 4) < 1.1 * 64 * 32

    other = message.compressed(compression.parse("bfloat16"))
    assert other.num_bytes(PART, 4) == 2 * 64 * 32

    state = message.init({"w": jnp.ones((4, 2))})  # A compressor remembers from zero.
    np.testing.assert_array_equal(state.residual["w"], jnp.zeros((4, 2)))


@pytest.mark.parametrize(("rank", "sent"), [(2, 2), (8, 8), (0, 8)])
def test_a_ranked_message_sends_factors_of_its_rank(rank, sent):
    """The rank is the first one, 8, until a schedule sets another."""
    assert ranked().at(rank).num_bytes(PART, 4) == 4 * sent * (64 + 32)


def test_a_memory_is_resized_to_another_rank():
    message = ranked()
    part = {"w": jnp.ones((64, 32))}
    assert message.is_ranked

    small = message.at(2).resized(message.at(8).init(part), part)
    like = message.at(2).init(part)
    assert jax.tree.map(jnp.shape, small) == jax.tree.map(jnp.shape, like)


def test_messages_are_values():
    assert AsIs() == AsIs()
    assert ByRings(2) == ByRings(2) != ByRings(3)
    by = compression.parse("int8")
    assert hash(Compressed(by)) == hash(Compressed(by))
    assert ByRings(2).only_in_program == "its rings use the inner mesh"
    assert ByRings(2).compressor() is None
    assert all(issubclass(kind, Message) for kind in (AsIs, Compressed, ByRings))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_means_and_sums_of_decoded_messages_by_hand(dtype):
    """In float32, and cast back: 1/3 of 1, 2 and 3 each, or 1/4, 1/4 and 1/2."""
    tree = {"w": jnp.array([[1.0, 0.0], [2.0, 0.0], [3.0, 4.0]], dtype)}
    messages, _ = jax.vmap(lambda x: identity().encode(x, ()))(tree)
    mean = jax.jit(lambda m: mean_of_decoded(m, identity()))(messages)
    assert mean["w"].dtype == dtype
    assert mean["w"].tolist() == pytest.approx([2, float(jnp.array(4 / 3, dtype))])
    weights = jnp.array([0.25, 0.25, 0.5])
    weighted = weighted_sum_of_decoded(messages, weights, identity())
    assert weighted["w"].tolist() == [2.25, 2.0]


# --- Exchanges at every step: two regions, stacked as a gather gives them ---


def exchange(made, *rounds):
    """Return the updates that regions compute from gradients, `[M, n]` a round."""

    @jax.jit
    def one_round(gradients, state):
        send = jax.vmap(lambda g, s: made.send(g, s, None))
        message, state = send(gradients, state)
        return made.receive(message), state

    state = jax.vmap(made.init)(np.float32(rounds[0]))
    received = []
    for gradients in rounds:
        mean, state = one_round(np.float32(gradients), state)
        received.append(np.asarray(mean).tolist())
    return received


def test_mean_gradients_need_no_gathering():
    made = per_step.mean_gradients()
    assert made.receive is None
    assert made.init(jnp.ones(2)) == ()
    assert made.send(3.0, (), None) == (3.0, ())
    assert made.num_bytes(jnp.zeros(3, jnp.bfloat16)) == 12  # Summed in float32.


def test_compressed_gradients_have_an_error_feedback():
    """The residual 3 of the first step is sent with the 1 of the second."""
    compressor = compression.error_feedback(top_k(0.5))
    made = per_step.compressed_gradients(compressor)
    gradients = [[4.0, 3.0], [0.0, 2.0]], [[0.0, 1.0], [0.0, 2.0]]
    assert exchange(made, *gradients) == [[2.0, 1.0], [0.0, 3.0]]


def test_compressing_replaces_an_earlier_compressor():
    plain = per_step.mean_gradients()
    once = plain.compressed(compression.parse("int8"))
    assert once.name == "compressed_gradients"
    twice = once.compressed(compression.parse("float16"))
    shapes = {"w": jax.ShapeDtypeStruct((1024,), np.float32)}
    assert plain.num_bytes(shapes) == 4096
    assert 1024 < once.num_bytes(shapes) < 1100
    assert twice.num_bytes(shapes) == 2048


def test_a_decoupled_momentum_may_be_sent_in_full():
    made = decoupled_momentum(0.5, identity())
    gradients = [[4.0, 1.0, 2.0], [-2.0, 1.0, -5.0]]
    assert exchange(made, gradients) == [[1.0, 1.0, -1.0]]


def test_the_compressor_of_a_momentum_is_replaced_and_its_decay_stays():
    made = decoupled_momentum(0.5, top_k(0.5)).compressed(identity())
    gradients = [[4.0, 2.0], [-1.0, -3.0]], [[-3.0, 0.0], [0.0, 1.0]]
    assert exchange(made, *gradients) == [[1.0, -1.0], [-1.0, 1.0]]


# --- Rings: the order of regions, and the bytes sent ---


@pytest.mark.parametrize("num_places", range(1, 13))
def test_each_order_visits_every_place(num_places):
    for stride in ByRings(8).strides(num_places):
        assert len({q * stride % num_places for q in range(num_places)}) == num_places


def test_strides_differ_as_long_as_there_are_some():
    assert ByRings(4).strides(5) == (1, 4, 2, 3)
    assert ByRings(3).strides(4) == (1, 3, 1)
    assert ByRings(2).strides(2) == (1, 1)
    assert ByRings(2).strides(1) == (0, 0)


def test_a_ring_sends_twice_all_shares_but_one():
    shapes = {"w": jax.ShapeDtypeStruct((60, 20), np.float32)}
    assert ByRings(2).num_bytes(shapes, 4) == 4 * 1200 * 2 * 3 / 4
    assert ByRings(2).num_bytes(shapes, 1) == 0
    tenth = ByRings(2, average=SharedMask(0.1))
    assert tenth.num_bytes(shapes, 4) == ByRings(2).num_bytes(shapes, 4) / 10
    # 1201 numbers do not divide by 8: each chunk has 151.
    assert ByRings(2).num_sent(1201, 4) == 2 * 2 * 3 * 151


ODD = per_step.PerStep("odd", lambda params: (), lambda g, state, key: (g, state))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ODD.compressed(identity()), "its messages cannot be encoded further"),
        (lambda: ByRings(0), "num_rings=0 must be at least 1"),
        (lambda: matchings(0), "num_regions=0 must be at least 1"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- Pairs ---


@pytest.mark.parametrize("num_regions", range(1, 14))
def test_every_pair_meets_once(num_regions):
    """In as few rounds as there are, so of an odd number each is alone once."""
    partners = matchings(num_regions)
    assert partners.shape == (max(1, num_regions - 1 + num_regions % 2), num_regions)
    everyone = np.arange(num_regions)
    met = []
    for row in partners:
        np.testing.assert_array_equal(row[row], everyone)
        met += [(i, j) for i, j in enumerate(row) if i < j]
    assert sorted(met) == list(itertools.combinations(range(num_regions), 2))
