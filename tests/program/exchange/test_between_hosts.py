"""Messages and moments that cross on the outer mesh, with the numbers of one program.

Also with channels: each fragment has an outer mesh of its own.
"""

import functools

import jax
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.engine.mesh import make_mesh, outer_device
from cocodc_jax.engine.transport import Transport
from tests.numerics import assert_all_close
from tests.program import tiny


def final(method, exchange):
    program = tiny.program_of(method, transport=Transport(exchange))
    state, _ = tiny.finish(program, tiny.start(program), 12)
    return state, tiny.host((state.region, state.sync.outer, state.sync.compressors))


FRAGMENTS = {"num_fragments": 2}
FEEDBACK = {"merge_feedback": True}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("streaming_diloco", FRAGMENTS),
        ("streaming_diloco", FRAGMENTS | {"compress": "ef+topk:0.1", **FEEDBACK}),
        pytest.param(
            "decoupled_diloco", FRAGMENTS | {"compress": "int8"}, marks=pytest.mark.slow
        ),
        ("loscar", {}),
    ],
)
def test_either_exchange_gives_the_same_run(name, options):
    # Events are 2 steps apart, so that one length of a scan is compiled.
    method = methods.get(name, sync_interval=4, delay_steps=2, **options)
    (plain, inside), (state, outside) = (final(method, x) for x in ("program", "outer"))
    # Relative to each tensor: the outer mesh may sum in another order.
    assert_all_close(inside, outside, rtol=1e-5, atol=1e-6)
    assert plain.bytes_sent == state.bytes_sent

    # Fragments in flight are not on the inner mesh.
    inner = set(jax.tree.leaves(state.region.params)[0].devices())
    for flight in state.sync.in_flight.values():
        for x in jax.tree.leaves(flight.mean):
            assert not inner & set(x.devices())


# --- Averaged moments ---

DES_LOC = methods.get("des_loc", sync_interval=2, sync_moments="2,3")


def make_des_loc(exchange, optimizer=None):
    optimizer = optimizer or optax.adam(0.02)
    transport = Transport(exchange)
    return tiny.program_of(DES_LOC, optimizer=optimizer, transport=transport)


def test_either_exchange_averages_moments_and_goes_on_bit_for_bit(tmp_path):
    inside = make_des_loc("program")
    outside = make_des_loc("outer")
    expected, _ = tiny.finish(inside, tiny.start(inside), 12)
    expected = tiny.host(expected.region), expected.bytes_sent
    state, _ = tiny.finish(outside, tiny.start(outside), 7)
    state, again = tiny.saved_and_restored(outside, state, tmp_path)
    state, _ = tiny.finish(outside, state, 5)
    ended = tiny.host(state.region), state.bytes_sent

    assert_all_close(expected, ended, rtol=1e-5, atol=1e-6)
    # At a sync that carries all, every region has the same.
    adam = state.region.opt_state[0]
    for x in jax.tree.leaves((adam.mu, adam.nu)):
        assert np.ptp(np.asarray(x), axis=0).max() == 0

    again, _ = tiny.finish(outside, again, 5)
    tiny.assert_same(tiny.numbers(again), tiny.numbers(state))


def test_an_optimizer_without_moments_is_refused():
    with pytest.raises(ValueError, match="sync_moments finds no moments .* use adamw"):
        make_des_loc("program", optax.sgd(0.1, 0.9))


# --- Outer meshes side by side ---

STEPS = 10  # Both fragments are in flight from step 4 on.


@functools.cache
def program(outer_channels, mesh=None, **numbers):
    """Compiled once for all tests."""
    numbers = {"sync_interval": 4, "num_fragments": 2, "delay_steps": 4} | numbers
    method = methods.get("streaming_diloco", **numbers)
    transport = Transport("outer", outer_channels=outer_channels)
    return tiny.program_of(method, mesh, transport=transport)


def devices(tree):
    return set().union(*(x.devices() for x in jax.tree.leaves(tree)))


@pytest.mark.parametrize("compress", [None, "int8"])
def test_two_channels_train_what_one_does_bit_for_bit(compress):
    ends = []
    for outer_channels in (1, 2):
        made = program(outer_channels, compress=compress)
        state, outputs = tiny.finish(made, tiny.start(made), STEPS)
        losses = [tiny.host((output.losses, output.syncs)) for output in outputs]
        ends.append((tiny.numbers(state), losses, tiny.host(made.outer_params(state))))
    tiny.assert_same(*ends)


def test_measured_times_arrive_on_either_channel():
    heard = []
    for outer_channels in (1, 2):
        made = program(outer_channels, sync_interval=8, delay_steps="auto")
        state = tiny.start(made)
        for step in range(12):
            batch = jax.tree.map(lambda x: x[None], tiny.make_batch(step))
            state, _ = made.advance(state, batch, (1.0, 1.5))
        heard.append(tiny.numbers(made.synchronize(state)))

    tiny.assert_same(*heard)
    assert heard[0][1]["sync_times"]


def test_fragments_in_flight_have_no_device_in_common():
    made = program(2)
    state, _ = tiny.finish(made, tiny.start(made), STEPS)
    outer = state.sync.outer
    in_flight = state.sync.in_flight
    assert {k for k, _ in in_flight} == {0, 1}

    for (k, _), flight in in_flight.items():
        channel = outer_device(made.mesh, channel=k)
        assert devices((flight.mean, outer.params[k], outer.opt_states[k])) == {channel}
        assert channel not in made.mesh.devices
    assert devices(outer.params[0]) != devices(outer.params[1])


def test_outer_parameters_are_put_together_on_the_mesh():
    made = program(2)
    state = tiny.start(made)
    tiny.assert_same(tiny.host(made.outer_params(state)), tiny.make_params())
    assert devices(made.outer_params(state)) == set(made.mesh.devices.flat)


def test_a_restored_run_goes_on_bit_for_bit_on_its_channels(tmp_path):
    made = program(2)
    state, _ = tiny.finish(made, tiny.start(made), 7)
    assert {k for k, _ in state.sync.in_flight} == {0, 1}

    state, restored = tiny.saved_and_restored(made, state, tmp_path)
    where = jax.tree.map(lambda x: x.sharding, (state.sync.outer, state.sync.in_flight))
    whole, _ = tiny.finish(made, state, 5)
    placed = (restored.sync.outer, restored.sync.in_flight)
    assert jax.tree.map(lambda x: x.sharding, placed) == where

    # A run may resume with another number of channels.
    _, by_one = tiny.saved_and_restored(made, restored, tmp_path / "one", program(1))
    for again, begun in ((made, restored), (program(1), by_one)):
        ended, _ = tiny.finish(again, begun, 5)
        tiny.assert_same(tiny.numbers(ended), tiny.numbers(whole))


def test_channels_need_one_spare_device_each():
    mesh = make_mesh(4, data=2)  # Of the nine devices one is left.
    why = "outer_channels=2 .* process 0 has 1; use fewer"
    with pytest.raises(ValueError, match=why):
        program(2, mesh)
    program(1, mesh)
