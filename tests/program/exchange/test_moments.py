"""Averaged moments by either exchange: the same run, its bytes, and resumed bitwise."""

import jax
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.exchange.transport import Transport
from tests.numerics import assert_all_close
from tests.program import tiny

METHOD = methods.get("des_loc", sync_interval=2, sync_moments="2,3")


def make(exchange, optimizer=None):
    optimizer, transport = optimizer or optax.adam(0.02), Transport(exchange)
    return tiny.program_of(METHOD, optimizer=optimizer, transport=transport)


def test_either_exchange_gives_the_same_run_and_goes_on_bit_for_bit(tmp_path):
    inside, outside = make("program"), make("outer")
    expected, _ = tiny.finish(inside, tiny.start(inside), 12)
    expected = tiny.host(expected.region), expected.bytes_sent
    state, _ = tiny.finish(outside, tiny.start(outside), 7)
    state, again = tiny.saved_and_restored(outside, state, tmp_path)
    state, _ = tiny.finish(outside, state, 5)
    found = tiny.host(state.region), state.bytes_sent
    assert_all_close(expected, found, rtol=1e-5, atol=1e-6)
    # At a sync that carries all, every region has the same.
    adam = state.region.opt_state[0]
    for x in jax.tree.leaves((adam.mu, adam.nu)):
        assert np.ptp(np.asarray(x), axis=0).max() == 0
    again, _ = tiny.finish(outside, again, 5)
    tiny.assert_same(tiny.numbers(again), tiny.numbers(state))


def test_an_optimizer_without_moments_is_refused():
    with pytest.raises(ValueError, match="sync_moments finds no moments .* use adamw"):
        make("program", optax.sgd(0.1, 0.9))
