"""Messages and moments that cross on the outer mesh: the numbers of one program."""

import functools

import jax
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.exchange.transport import Transport
from tests.numerics import assert_all_close
from tests.program import tiny


def final(method, exchange):
    program = tiny.program_of(method, transport=Transport(exchange))
    state, _ = tiny.finish(program, tiny.start(program), 12)
    arrays = tiny.host((state.region, state.sync.outer, state.sync.compressors))
    return arrays, state.bytes_sent, state


FRAGMENTS = {"num_fragments": 2}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("streaming_diloco", FRAGMENTS),
        slow("streaming_diloco", FRAGMENTS | {"compress": "int8"}),
        slow("streaming_diloco", FRAGMENTS | {"compress": "ef+topk:0.1"}),
        (
            "streaming_diloco",
            FRAGMENTS | {"compress": "ef+topk:0.1", "merge_feedback": True},
        ),
        slow("decoupled_diloco", FRAGMENTS | {"compress": "int8"}),
        ("loscar", {}),
    ],
)
def test_either_exchange_gives_the_same_run(name, options):
    # Events are 2 steps apart, so that one length of a scan is compiled.
    method = methods.get(name, sync_interval=4, delay_steps=2, **options)
    inside, sent, _ = final(method, "program")
    outside, sent_outside, state = final(method, "outer")
    # Relative to each tensor: the outer mesh may sum in another order.
    assert_all_close(inside, outside, rtol=1e-5, atol=1e-6)
    assert sent == sent_outside
    # What is on its way is nowhere on the inner mesh.
    inner = set(jax.tree.leaves(state.region.params)[0].devices())
    for flight in state.sync.in_flight.values():
        for x in jax.tree.leaves(flight.mean):
            assert not inner & set(x.devices())


# --- Averaged moments ---

DES_LOC = methods.get("des_loc", sync_interval=2, sync_moments="2,3")


def make_des_loc(exchange, optimizer=None):
    optimizer, transport = optimizer or optax.adam(0.02), Transport(exchange)
    return tiny.program_of(DES_LOC, optimizer=optimizer, transport=transport)


def test_either_exchange_averages_moments_and_goes_on_bit_for_bit(tmp_path):
    inside, outside = make_des_loc("program"), make_des_loc("outer")
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
        make_des_loc("program", optax.sgd(0.1, 0.9))
