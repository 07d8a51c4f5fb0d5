"""Regions of unequal speed, and schedules that follow measured times.

Which regions step, take the outer parameters and count; how delays and slots follow the
times of syncs.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.engine import between_hosts as combining
from cocodc_jax.engine.mesh import make_mesh, outer_sharding
from cocodc_jax.engine.transport import Transport
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sync.messages import Compressed
from cocodc_jax.sync.regions import Regions
from cocodc_jax.train.run_steps import run_steps as run
from cocodc_jax.transforms import compression
from tests.numerics import assert_all_close
from tests.program import tiny
from tests.slow import mostly_slow

NUM_REGIONS = 3
SPEEDS = Regions((1.0, 2.0, 3.0), (1, 1, 1))
PARAMS = {"w": np.zeros(2, np.float32)}


def loss_fn(params, batch, key):
    """Its gradient is minus the batch: SGD of rate 1 adds the batches up."""
    return -params["w"] @ batch, {"draw": jax.random.key_data(key)[1]}


def make(method, regions=SPEEDS, optimizer=None):
    return RegionProgram(
        loss_fn,
        optimizer or optax.sgd(1.0),
        method,
        PARAMS,
        regions,
        mesh=make_mesh(NUM_REGIONS),
    )


def states(program, num_steps):
    """The state after every scan, and the tick; one more copy each, to be kept."""
    stream = (np.full((NUM_REGIONS, 2), 10.0**t, np.float32) for t in range(num_steps))
    state = program.init(PARAMS, jax.random.key(0))
    for new, output in run(program, state, stream, num_steps):
        yield new.step, jax.device_get(new.region), output
        state = new


def test_a_region_steps_when_its_step_ends():
    """The batches of ticks 0, 1, 2 ... are 1, 10, 100 ...: sums show the ticks."""
    *_, (_, region, _) = states(make(methods.get("apart")), 6)
    assert region.params["w"][:, 0].tolist() == [111111, 101010, 100100]


def test_accumulation_with_unequal_speeds_is_refused():
    with pytest.raises(ValueError, match=r"^step_times=\(1.0, 2.0, 3.0\) with optax"):
        make(
            methods.get("diloco", sync_interval=4),
            SPEEDS,
            optax.MultiSteps(optax.sgd(1.0), 2),
        )


def test_a_region_at_rest_keeps_all_of_its_state():
    """Adam's count and the key stand still as the parameters do."""
    program = make(methods.get("apart"), optimizer=optax.adam(0.1))
    state = program.init(PARAMS, jax.random.key(0))
    keys = [np.array(state.region.key)]
    for _ in range(3):
        state, _ = program.advance(state, np.ones((1, NUM_REGIONS, 2), np.float32))
        keys.append(np.array(state.region.key))

    (count,) = [x for x in jax.tree.leaves(state.region.opt_state) if x.ndim == 1]
    assert count.tolist() == [3, 1, 1]

    moved = [
        [(a[m] != b[m]).any() for m in range(3)] for a, b in itertools.pairwise(keys)
    ]
    assert moved == [[True, False, False], [True, True, False], [True, False, True]]


def test_only_the_region_that_comes_takes_the_outer_parameters():
    """With H = 2 and equal steps regions sync at 2 4 6 .., 4 8 .. and 6 12 .. .

    Outer SGD with a learning rate of 1: the outer value is the sum of what came, and
    a region goes on from that, though others have moved it since it last came.
    """
    method = methods.get(
        "mla", sync_interval=2, outer_lr=1.0, outer_momentum=0.0, dynamic_steps=False
    )
    program = make(method)
    seen = {step: region.params["w"][:, 0] for step, region, _ in states(program, 6)}

    # Region 0 took 1 + 10; the others' batches are of ticks 1 (10) and none.
    assert seen[2].tolist() == [11, 10, 0]
    # Region 0 comes first, with 100 + 1000; region 1 adds its 10 + 1000.
    assert seen[4].tolist() == [1111, 1111 + 1010, 100]

    # Region 0 goes on from 1111, without region 1's; it takes 1010 with its own.
    outer = 1111 + 1010 + 110000
    assert seen[6].tolist() == [outer, 1111 + 1010 + 100000, outer + 100100]


# --- Delays and slots that follow the times of syncs ---

SHAPE = {"sync_interval": 4, "num_fragments": 2}


def make_tiny(name="streaming_diloco", exchange="auto", **options):
    method = methods.get(name, **SHAPE | options)
    return tiny.program_of(method, transport=Transport(exchange))


def train(program, times, num_steps=14):
    """Run to `num_steps`; return the last state and `(fragment, start, apply)`."""
    state = tiny.start(program)
    seen = []
    stream = tiny.stream()

    while state.step < num_steps:
        ahead = min(program.steps_to_event(state), num_steps - state.step)
        batches = [next(stream) for _ in range(ahead)]
        stacked = jax.tree.map(lambda *x: np.stack(x), *batches)

        state, output = program.advance(state, stacked, times)
        seen += [(s.fragment_id, s.start_step, s.apply_step) for s in output.syncs]

    return state, seen


@pytest.mark.parametrize("rule", mostly_slow(["mix", "replay"], quick=["mix"]))
def test_a_delay_that_comes_out_as_two_steps_is_a_delay_of_two_steps(rule):
    fixed = make_tiny(delay_steps=2, merge_rule=rule, exchange="outer")
    auto = make_tiny(delay_steps="auto", merge_rule=rule)
    one, syncs = train(fixed, (0.0, 0.0))
    other, seen = train(auto, (0.5, 0.9))
    assert seen == syncs
    ends = (tiny.host((x.region, x.sync.outer)) for x in (one, other))
    assert_all_close(*ends, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compress", [None, "int8"])
def test_a_slow_network_makes_the_delay_longer(compress):
    _, seen = train(make_tiny(delay_steps="auto", compress=compress), (0.5, 1.3))
    delays = [apply - start for _, start, apply in seen]
    assert delays == [2, 3, 3, 3, 3]  # Slots are two steps apart.


def test_a_fast_network_makes_more_syncs():
    options = {"delay_steps": 1, "syncs_per_interval": "auto", "network_share": 1.0}
    program = make_tiny("cocodc", sync_interval=8, **options)
    few, more = (train(program, (1.0, t))[1] for t in (9.0, 1.0))
    assert len(more) > 2 * len(few)


def test_without_a_delay_regions_take_the_outer_parameters_in_measured_slots():
    program = make_tiny("cocodc", delay_steps=0, syncs_per_interval="auto")
    state, seen = train(program, (1.0, 0.1), num_steps=8)
    last, start, apply = seen[-1]
    assert start == apply == 8

    outer = program.fragments.take(program.outer_params(state), last)
    local = program.fragments.take(state.region.params, last, lead=1)
    whole = jax.tree.map(lambda x, like: np.broadcast_to(x, like.shape), outer, local)
    assert_all_close(local, whole)


@pytest.mark.parametrize(
    "compress", mostly_slow([None, "int8", "ef+topk:0.1"], quick=[None, "ef+topk:0.1"])
)
def test_times_of_all_regions_arrive_with_the_mean(compress):
    part = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, "f4")}
    compressor = compress and compression.parse(compress)
    mean_of = Compressed(compressor).combine if compressor else None
    where = outer_sharding(tiny.shared_program("diloco").mesh)

    weights = jnp.array([0.0, 0.5, 0.25, 0.25])
    times = jnp.array([[1, 2], [3, 4], [5, 6], [7, 0]], jnp.float32)
    regions = [jax.tree.map(lambda x, m=m: x * (m + 1), part) for m in range(4)]

    if compressor:
        state = compressor.init(part)
        key = jax.random.key(0)
        regions = [compressor.encode(r, state, key)[0] for r in regions]

    shapes = jax.eval_shape(lambda: regions[0])
    message = jax.tree.map(lambda *x: jnp.stack(x), *regions)
    plain, nothing = jax.jit(combining.make_combine(mean_of, where, shapes))(
        combining.make_buffer(message, None, compressor is not None), weights
    )
    mean, extras = jax.jit(combining.make_combine(mean_of, where, shapes, 4))(
        combining.make_buffer(message, times, compressor is not None), weights
    )

    assert nothing is None
    expected = times if compressor else times.at[0].set(0)  # Of weight 0.
    np.testing.assert_allclose(extras, expected, rtol=1e-6)
    assert_all_close(mean, plain, rtol=1e-6)


def test_the_bytes_of_the_times_are_counted():
    def one(delay, compress=None):
        options = {"delay_steps": delay, "compress": compress}
        return make_tiny(exchange="outer", **options)._syncs.message_bytes(0)

    assert one("auto") - one(2) == 4 * 8  # Room for four regions in the sum.
    assert one("auto", "int8") - one(2, "int8") == 8


def test_a_checkpoint_keeps_times_in_flight(tmp_path):
    program = make_tiny(delay_steps="auto")
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
    program = make_tiny(delay_steps="auto", merge_rule="replay")
    for sync_time in (0.4, 1.4, 1.9):
        train(program, (0.5, sync_time))
    assert [merge._cache_size() for merge in program._syncs.merges] == [1, 1]
