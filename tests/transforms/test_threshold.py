"""Thresholding against a loop in NumPy: messages, overflow, and times of sorting."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax.transforms.packing import index_bits, unpack
from cocodc_jax.transforms.threshold import threshold
from tests.program import family_reference as reference

pytestmark = pytest.mark.usefixtures("float64")


def run(compressor, calls):
    """Return the decoded message and the state after every call."""

    @jax.jit
    def step(x, state):
        message, state = compressor.encode(x, state)
        return compressor.decode(message), state

    state = compressor.init(calls[0])
    decoded = []
    states = []
    for x in calls:
        back, state = step(x, state)
        decoded.append(jax.tree.map(np.asarray, back))
        states.append(state)
    return decoded, states


def test_thresholding_equals_the_numpy_reference():
    rng = np.random.default_rng(0)
    # Lengths that change make some calls overflow and others leave room.
    calls = [s * rng.normal(size=44) for s in [1, 1, 5, 0.3, 2, 0.1, 3]]
    compressor = threshold(density=0.1, every=3, slack=1.5)
    decoded, states = run(compressor, list(map(reference.split, calls)))
    oracle = reference.Threshold(0.1, 3, 1.5)
    num_sent = []

    for i, x in enumerate(calls):
        wanted = oracle(x)
        np.testing.assert_allclose(reference.join(decoded[i]), wanted, rtol=1e-10)
        np.testing.assert_allclose(states[i].thresholds, oracle.levels, rtol=1e-6)
        assert states[i].num_calls == oracle.calls % 3
        num_sent.append(np.count_nonzero(wanted[:32]))

    assert num_sent[0] == 3
    assert {0, 5} < set(num_sent)


def test_state_and_message_dtypes_and_shapes():
    x = {"a": np.ones((4, 4), jnp.bfloat16), "b": np.float64(2)}
    compressor = threshold(density=0.25)
    message, state = jax.jit(lambda x: compressor.encode(x, compressor.init(x)))(x)
    assert state.num_calls.dtype == jnp.int32
    assert [t.dtype for t in state.thresholds] == [jnp.float32] * 2
    assert message["a"].arrays["values"].shape == (6,)
    assert message["b"].arrays["values"].shape == (1,)

    back = jax.jit(compressor.decode)(message)
    assert back["a"].dtype == jnp.bfloat16
    assert back["b"] == 2


def test_the_kth_value_reaches_its_own_threshold_in_float64():
    # float32 rounds the threshold up, above the value it was taken from.
    x = np.array([0.1, 1 / 3 - 1e-9])
    decoded, _ = run(threshold(density=0.5), [x])
    np.testing.assert_array_equal(decoded[0], [0, x[1]])


def test_values_that_are_not_zero_are_sent_before_zeros():
    x = np.zeros(20)
    x[-1] = 3.0
    decoded, states = run(threshold(density=0.1), [x])
    assert states[0].thresholds[0] == 0
    np.testing.assert_array_equal(decoded[0], x)


def test_a_nan_is_not_hidden():
    x = np.array([5.0, 1.0, np.nan, 1.0])
    for i, back in enumerate(run(threshold(density=0.5), [np.ones(4), x])[0]):
        assert np.any(np.isnan(back)) == (i == 1)


@functools.cache
def positions(size):
    """Return a program that gives the positions sent, and their largest number."""
    compressor = threshold(density=0.3, slack=2.0)
    capacity = max(1, round(0.6 * size))

    @jax.jit
    def of(x):
        state = compressor.init(x)._replace(
            num_calls=jnp.int32(1), thresholds=(jnp.float32(0.5),)
        )
        message, _ = compressor.encode(x, state)
        return unpack(message.arrays["indices"], index_bits(size + 1), capacity)

    return of, capacity


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_positions_come_in_order_and_then_padding(size, share):
    x = np.where(np.random.default_rng(size).random(size) < share, 1.0, 0.1)
    of, capacity = positions(size)
    wanted = np.flatnonzero(x > 0.5)[:capacity]
    places = of(x)
    np.testing.assert_array_equal(places[: len(wanted)], wanted)
    np.testing.assert_array_equal(places[len(wanted) :], size)


def test_steps_between_refreshes_sort_nothing():
    compressor = threshold()
    x = np.ones(1000)
    program = str(jax.make_jaxpr(compressor.encode)(x, compressor.init(x)))
    before, _, inside = program.partition("cond[")
    assert "top_k" in inside
    assert "top_k" not in before
    assert " sort" not in program
