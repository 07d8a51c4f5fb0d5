"""Averaged moments by either exchange: the same run, its bytes, and resumed bitwise."""

import jax
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.exchange.transport import Transport
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.train.checkpoint import Checkpoints

METHOD = methods.get("des_loc", sync_interval=2, sync_moments="2,3")


def make(tiny, exchange, optimizer=None):
    return RegionProgram(
        tiny.loss_fn, optimizer or optax.adam(0.02), METHOD, tiny.make_params(), 4,
        transport=Transport(exchange),
    )  # fmt: skip


def test_either_exchange_gives_the_same_run_and_goes_on_bit_for_bit(tiny, tmp_path):
    inside, outside = make(tiny, "program"), make(tiny, "outer")
    expected, _ = tiny.finish(inside, tiny.start(inside), 12)
    expected = tiny.host(expected.region), expected.bytes_sent
    state, _ = tiny.finish(outside, tiny.start(outside), 7)
    with Checkpoints(tmp_path) as checkpoints:
        state = checkpoints.save(outside, state, {})
    state, _ = tiny.finish(outside, state, 5)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        expected,
        (tiny.host(state.region), state.bytes_sent),
    )
    # At a sync that carries all, every region has the same.
    adam = state.region.opt_state[0]
    for x in jax.tree.leaves((adam.mu, adam.nu)):
        assert np.ptp(np.asarray(x), axis=0).max() == 0
    with Checkpoints(tmp_path) as checkpoints:
        again, _ = checkpoints.restore(outside)
    again, _ = tiny.finish(outside, again, 5)
    tiny.assert_same(tiny.numbers(again), tiny.numbers(state))


def test_an_optimizer_without_moments_is_refused(tiny):
    with pytest.raises(ValueError, match="sync_moments finds no moments .* use adamw"):
        make(tiny, "program", optax.sgd(0.1, 0.9))
