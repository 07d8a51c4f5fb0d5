"""Outer meshes side by side: the same run, with each fragment on its own channel."""

import functools

import jax
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.exchange.transport import Transport
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sharding.mesh import make_mesh
from cocodc_jax.sharding.outer_mesh import outer_device
from cocodc_jax.train.checkpoint import Checkpoints

STEPS = 10  # Both fragments are in flight from step 4 on.


def make_method(**numbers):
    numbers = {"sync_interval": 4, "num_fragments": 2, "delay_steps": 4} | numbers
    return methods.get("streaming_diloco", **numbers)


def make_program(tiny, outer_channels, method=None, exchange="outer", **options):
    return RegionProgram(
        tiny.loss_fn, optax.sgd(0.05, 0.9), method or make_method(),
        tiny.make_params(), 4, **options,
        transport=Transport(exchange, outer_channels=outer_channels),
    )  # fmt: skip


@functools.cache
def shared_program(tiny_program, outer_channels, compress=None):
    return tiny_program(outer_channels, make_method(compress=compress))


@pytest.fixture(scope="module")
def program(tiny):
    """`program(outer_channels, compress)`, compiled once for all tests."""
    made = functools.partial(make_program, tiny)
    yield functools.partial(shared_program, made)
    shared_program.cache_clear()


def devices(tree):
    return set().union(*(x.devices() for x in jax.tree.leaves(tree)))


@pytest.mark.parametrize("compress", [None, "int8"])
def test_two_channels_give_the_run_of_one_bit_for_bit(tiny, program, compress):
    ends = []
    for outer_channels in (1, 2):
        made = program(outer_channels, compress)
        state, outputs = tiny.finish(made, tiny.start(made), STEPS)
        losses = [tiny.host((output.losses, output.syncs)) for output in outputs]
        ends.append((tiny.numbers(state), losses, tiny.host(made.outer_params(state))))
    tiny.assert_same(*ends)


def test_regions_that_measure_tell_their_times_on_either_channel(tiny):
    method = make_method(sync_interval=8, delay_steps="auto")
    heard = []
    for outer_channels in (1, 2):
        program = make_program(tiny, outer_channels, method)
        state, batches = tiny.start(program), tiny.stream()
        for _ in range(12):
            batch = jax.tree.map(lambda x: x[None], next(batches))
            state, _ = program.advance(state, batch, (1.0, 1.5))
        heard.append(tiny.numbers(program.synchronize(state)))
    tiny.assert_same(*heard)
    assert heard[0][1]["sync_times"]


def test_fragments_in_flight_have_no_device_in_common(tiny, program):
    made = program(2)
    state, _ = tiny.finish(made, tiny.start(made), STEPS)
    inner = set(made.mesh.devices.flat)
    outer, in_flight = state.sync.outer, state.sync.in_flight
    assert {k for k, _ in in_flight} == {0, 1}
    for (k, _), flight in in_flight.items():
        mean = flight.mean
        channel = {outer_device(made.mesh, channel=k)}
        assert devices((mean, outer.params[k], outer.opt_states[k])) == channel
        assert not channel & inner
    assert devices(state.sync.outer.params[0]) != devices(state.sync.outer.params[1])


def test_outer_parameters_are_put_together_on_the_mesh(tiny, program):
    made = program(2)
    state = tiny.start(made)
    tiny.assert_same(tiny.host(made.outer_params(state)), tiny.make_params())
    assert devices(made.outer_params(state)) == set(made.mesh.devices.flat)


def test_a_restored_run_goes_on_bit_for_bit_on_its_channels(tiny, program, tmp_path):
    made = program(2)
    state, _ = tiny.finish(made, tiny.start(made), 7)
    assert {k for k, _ in state.sync.in_flight} == {0, 1}
    with Checkpoints(tmp_path) as checkpoints:
        state = checkpoints.save(made, state, {})
    where = jax.tree.map(lambda x: x.sharding, (state.sync.outer, state.sync.in_flight))
    whole, _ = tiny.finish(made, state, 5)
    for outer_channels in (2, 1):  # Another number of channels may go on too.
        again = program(outer_channels)
        with Checkpoints(tmp_path) as checkpoints:
            restored, _ = checkpoints.restore(again)
        if outer_channels == 2:
            found = (restored.sync.outer, restored.sync.in_flight)
            assert jax.tree.map(lambda x: x.sharding, found) == where
        ended, _ = tiny.finish(again, restored, 5)
        tiny.assert_same(tiny.numbers(ended), tiny.numbers(whole))


@pytest.mark.parametrize(
    ("outer_channels", "method", "options", "message"),
    [
        (0, make_method(), {}, "outer_channels=0 must be at least 1"),
        (3, make_method(), {}, "outer_channels=3 must be at most num_fragments=2"),
        (
            2,
            make_method(),
            {"exchange": "auto"},
            "outer_channels=2 .* exchange='auto' and",
        ),
        (
            2,
            methods.get("data_parallel"),
            {},
            "outer_channels=2 .*='data_parallel' with",
        ),
        (
            2,
            methods.get("co2", sync_interval=4),
            {"exchange": "auto"},
            "outer_channels=2 has no meaning for method='co2'",
        ),
    ],
    ids=["none", "fragments", "inside", "no syncs", "divided"],
)
def test_channels_that_nothing_would_take_are_refused(
    tiny, outer_channels, method, options, message
):
    with pytest.raises(ValueError, match=message):
        make_program(tiny, outer_channels, method, **options)


def test_channels_need_as_many_spare_devices(tiny):
    mesh = make_mesh(4, data=2)  # Of the nine devices one is left.
    with pytest.raises(
        ValueError, match="outer_channels=2 .* process 0 has 1; use fewer"
    ):
        make_program(tiny, 2, mesh=mesh)
    make_program(tiny, 1, mesh=mesh)


def test_the_first_channel_is_the_only_one_of_one(tiny, program):
    one, two = program(1).shardings, program(2).shardings
    assert one.channels == two.channels[:1]
    used = [channel.host.device_set for channel in two.channels]
    assert not used[0] & used[1]
