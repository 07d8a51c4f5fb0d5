"""Regions of unequal speed in the region program: who steps, who takes, who counts."""

import itertools

import jax
import numpy as np
import optax

from cocodc_jax import methods
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sharding.mesh import make_mesh
from cocodc_jax.sync.regions import Regions
from cocodc_jax.train.run_steps import run

NUM_REGIONS = 3
SPEEDS = Regions((1.0, 2.0, 3.0), (1, 1, 1))
PARAMS = {"w": np.zeros(2, np.float32)}


def loss_fn(params, batch, key):
    """Its gradient is minus the batch: SGD of rate 1 adds the batches up."""
    return -params["w"] @ batch, {"draw": jax.random.key_data(key)[1]}


def make(method, regions=SPEEDS, optimizer=None):
    return RegionProgram(
        loss_fn, optimizer or optax.sgd(1.0), method, PARAMS, regions,
        mesh=make_mesh(NUM_REGIONS),
    )  # fmt: skip


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
    """H = 2 and equal steps: they come at 2 4 6 .., 4 8 .. and 6 12 .. .

    Outer SGD with a learning rate of 1: the outer value is the sum of what came, and
    a region goes on from that, though others have moved it since it last came.
    """
    method = methods.get(
        "mla", sync_interval=2, outer_lr=1.0, outer_momentum=0.0, dynamic_steps=False,
    )  # fmt: skip
    program = make(method)
    seen = {step: region.params["w"][:, 0] for step, region, _ in states(program, 6)}
    # Region 0 took 1 + 10; the others' own batches are of ticks 1 (10) and none.
    assert seen[2].tolist() == [11, 10, 0]
    # Region 0 comes first, with 100 + 1000; region 1 adds its 10 + 1000.
    assert seen[4].tolist() == [1111, 1111 + 1010, 100]
    # Region 0 comes from 1111, which lacks region 1's; it takes 1010 with its own.
    outer = 1111 + 1010 + 110000
    assert seen[6].tolist() == [outer, 1111 + 1010 + 100000, outer + 100100]


def test_an_arrival_is_one_sync_of_one_message():
    method = methods.get("delayed_nesterov", sync_interval=4)
    outputs = [(step, output.syncs) for step, _, output in states(make(method), 8)]
    # Dynamic: 4, 2 and 1 steps between arrivals, so every 4, 4 and 3 ticks.
    assert [(step, len(syncs)) for step, syncs in outputs] == [
        (3, 1), (4, 2), (6, 1), (8, 2),
    ]  # fmt: skip
    assert {sync.num_bytes for _, syncs in outputs for sync in syncs} == {8}
