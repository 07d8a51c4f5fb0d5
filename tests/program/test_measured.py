"""Delays and slots that follow what syncs take: what crosses, what is made of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax import methods
from cocodc_jax.exchange import between_hosts as combining
from cocodc_jax.exchange.transport import Transport
from cocodc_jax.sharding.outer_mesh import outer_sharding
from cocodc_jax.sync.messages import Compressed
from cocodc_jax.transforms import compression
from tests.numerics import assert_all_close
from tests.program import tiny

SHAPE = {"sync_interval": 4, "num_fragments": 2}


def make(name="streaming_diloco", exchange="auto", **options):
    method = methods.get(name, **SHAPE | options)
    return tiny.program_of(method, transport=Transport(exchange))


def train(program, times, num_steps=14):
    """Runs to `num_steps`; gives the final state and `(fragment, start, apply)`."""
    state, seen = tiny.start(program), []
    stream = tiny.stream()
    while state.step < num_steps:
        ahead = min(program.steps_to_event(state), num_steps - state.step)
        batches = [next(stream) for _ in range(ahead)]
        stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
        state, output = program.advance(state, stacked, times)
        seen += [(s.fragment_id, s.start_step, s.apply_step) for s in output.syncs]
    return state, seen


@pytest.mark.parametrize("rule", ["mix", "replay"])
def test_a_delay_that_comes_out_as_two_steps_is_a_delay_of_two_steps(rule):
    fixed = make(delay_steps=2, merge_rule=rule, exchange="outer")
    auto = make(delay_steps="auto", merge_rule=rule)
    one, syncs = train(fixed, (0.0, 0.0))
    other, seen = train(auto, (0.5, 0.9))
    assert seen == syncs
    ends = (tiny.host((x.region, x.sync.outer)) for x in (one, other))
    assert_all_close(*ends, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compress", [None, "int8"])
def test_a_slow_network_makes_the_delay_longer(compress):
    _, seen = train(make(delay_steps="auto", compress=compress), (0.5, 1.3))
    delays = [apply - start for _, start, apply in seen]
    assert delays == [2, 3, 3, 3, 3]  # Slots are two steps apart.


def test_a_fast_network_makes_more_syncs():
    options = {"delay_steps": 1, "syncs_per_interval": "auto", "network_share": 1.0}
    program = make("cocodc", sync_interval=8, **options)
    few, more = (train(program, (1.0, t))[1] for t in (9.0, 1.0))
    assert len(more) > 2 * len(few)


@pytest.mark.parametrize("compress", [None, "int8", "ef+topk:0.1"])
def test_every_region_gets_the_times_of_all_beside_the_mean(compress):
    part = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, "f4")}
    compressor = compress and compression.parse(compress)
    mean_of = Compressed(compressor).combine if compressor else None
    where = outer_sharding(tiny.shared_program("diloco").mesh)
    weights = jnp.array([0.0, 0.5, 0.25, 0.25])
    times = jnp.array([[1, 2], [3, 4], [5, 6], [7, 0]], jnp.float32)
    regions = [jax.tree.map(lambda x, m=m: x * (m + 1), part) for m in range(4)]
    if compressor:
        state, key = compressor.init(part), jax.random.key(0)
        regions = [compressor.encode(r, state, key)[0] for r in regions]
    shapes = jax.eval_shape(lambda: regions[0])
    message = jax.tree.map(lambda *x: jnp.stack(x), *regions)
    plain, nothing = jax.jit(combining.make_combine(mean_of, where, shapes))(
        combining.make_buffer(message, None, compressor), weights
    )
    mean, told = jax.jit(combining.make_combine(mean_of, where, shapes, 4))(
        combining.make_buffer(message, times, compressor), weights
    )
    assert nothing is None
    expected = times if compressor else times.at[0].set(0)  # Of weight 0.
    np.testing.assert_allclose(told, expected, rtol=1e-6)
    assert_all_close(mean, plain, rtol=1e-6)


def test_the_bytes_of_the_times_are_counted():
    def one(delay, compress=None):
        options = {"delay_steps": delay, "compress": compress}
        return make(exchange="outer", **options)._syncs.message_bytes(0)

    assert one("auto") - one(2) == 4 * 8  # Room for four regions in the sum.
    assert one("auto", "int8") - one(2, "int8") == 8


def test_a_checkpoint_keeps_what_is_on_its_way(tmp_path):
    program = make(delay_steps="auto")
    state, _ = train(program, (0.5, 1.3), num_steps=7)
    assert state.sync.in_flight
    state, restored = tiny.saved_and_restored(program, state, tmp_path)
    tiny.assert_same(tiny.numbers(restored), tiny.numbers(state))
    assert restored.sync.in_flight.keys() == state.sync.in_flight.keys()
    for sync_id, flight in restored.sync.in_flight.items():
        times = flight.kept["times"]
        np.testing.assert_array_equal(
            times, state.sync.in_flight[sync_id].kept["times"]
        )
        assert np.asarray(times).any()


def test_one_program_serves_every_delay():
    program = make(delay_steps="auto", merge_rule="replay")
    for sync_time in (0.4, 1.4, 1.9):
        train(program, (0.5, sync_time))
    assert [merge._cache_size() for merge in program._syncs.merges] == [1, 1]
