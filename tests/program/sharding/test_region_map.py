"""Sums over the region axis, and runs with one shard on it, divided inside or not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from cocodc_jax import methods
from cocodc_jax.aot import hlo
from cocodc_jax.aot.collectives import collectives
from cocodc_jax.engine import region_map
from cocodc_jax.engine.mesh import REGION, make_mesh, regional
from tests.numerics import assert_all_close
from tests.program import tiny
from tests.slow import mostly_slow

NUM_STEPS = 4
# Sums over shards have another order, and Adam divides by small numbers.
RTOL = 1e-4
ATOL = 1e-5

# One of each kind of collective: a mean or messages gathered at every step, a sum, one
# concurrent with the inner steps, the drift, messages of compressors, of pairs, of
# neighbours and of rings, and the optimizer's moments.
METHODS = {
    "data_parallel": methods.get("data_parallel"),
    "demo": methods.get("demo"),
    "snoo": methods.get("snoo", sync_interval=2),
    "streaming_diloco": methods.get(
        "streaming_diloco", sync_interval=2, num_fragments=2, delay_steps=1
    ),
    "cocodc": methods.get(
        "cocodc",
        sync_interval=4,
        num_fragments=2,
        delay_steps=1,
        curvature="hessian_vector",
        transmission_score="drift",
    ),
    "co2": methods.get("co2", sync_interval=2, compress="int8"),
    "diloco_demo": methods.get("diloco_demo", sync_interval=2),
    "noloco": methods.get("noloco", sync_interval=2),
    "lt_admm": methods.get("lt_admm", sync_interval=2),
    "multi_ring": methods.get("multi_ring", sync_interval=2),
    "des_loc": methods.get("des_loc", sync_interval=2, sync_moments="1,1"),
}


def mesh_of(length, data=1, model=1):
    """A mesh with that many shards."""
    return make_mesh(length, data, model, jax.devices()[: length * data * model])


def all_of_it(x):
    """Every collective over shards, of `[block, ...]`; regional and shared results."""
    mean = region_map.pmean_over_regions(x.mean(0))
    shared = {"sum": region_map.psum_over_regions(x.sum(0)), "mean": mean}
    gathered = region_map.all_gather_regions(x).sum(0)[None]
    return x + region_map.as_varying(mean)[None], shared, gathered


def mapped(mesh):
    return region_map.region_shard_map(
        all_of_it, mesh, in_specs=P(REGION), out_specs=(P(REGION), P(), P(REGION))
    )


def kinds_in(mesh):
    """The kinds of collectives in the compiled program."""
    x = jax.device_put(jnp.ones((4, 6, 2)), regional(mesh, ("data", "model")))
    compiled = jax.jit(mapped(mesh)).lower(x).compile()
    module = hlo.parse(compiled.as_text())
    _, shared, _ = compiled(x)
    assert shared["sum"].sharding.spec == P("data", "model")
    return {collective.kind for collective in collectives(module, dict(mesh.shape))}


@pytest.mark.parametrize("inside", [(1, 1), (2, 2)])
@pytest.mark.parametrize("length", [1, 2])
def test_sums_and_means_are_those_over_all_regions(length, inside):
    mesh = mesh_of(length, *inside)
    x = np.random.default_rng(0).normal(size=(4, 6, 2)).astype(np.float32)
    placed = jax.device_put(x, regional(mesh, ("data", "model")))
    local, shared, gathered = jax.jit(mapped(mesh))(placed)
    actual = local, shared["sum"], shared["mean"], gathered
    sums = np.stack([x.sum(0)] * length)
    expected = x + x.mean(0), x.sum(0), x.mean(0), sums
    assert_all_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_one_shard_has_no_collective():
    """Nor is there one between the devices of a region: arrays stay sharded."""
    assert not kinds_in(mesh_of(1, 2, 2))
    assert {"all-reduce", "all-gather"} <= kinds_in(mesh_of(2, 2, 2))


def test_a_forgotten_mean_over_shards_fails_to_trace():
    """`check_vma` stays on: a varying value cannot pass for a replicated one."""
    forgotten = region_map.region_shard_map(
        lambda x: x.mean(0), mesh_of(2), in_specs=P(REGION), out_specs=P()
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(forgotten, jnp.ones((4, 2)))


def result(name, data=1, model=1):
    """Return the end of a run of one region, on the host."""
    program = tiny.program_of(
        METHODS[name],
        mesh_of(1, data, model),
        regions=1,
        optimizer=optax.adam(tiny.LEARNING_RATE),
        param_specs=tiny.SPECS if data * model > 1 else None,
    )

    batches = (jax.tree.map(lambda x: x[:1], b) for b in tiny.stream())
    state, outputs = tiny.follow(program, tiny.start(program), batches, NUM_STEPS)

    losses = [output.losses for output in outputs]
    means = program.mean_params(state), program.outer_params(state)
    arrays = state.region, state.sync and state.sync.arrays, means
    return tiny.host((arrays, np.concatenate(losses)))


# That of a method by name, made once.
on_one_device = functools.cache(result)


# One of each way that messages take.
QUICK = [
    ("data_parallel", 2, 1),
    ("cocodc", 1, 2),
    ("noloco", 2, 2),
    ("multi_ring", 2, 2),
]
CASES = [(name, 2, 2) for name in METHODS] + [
    ("data_parallel", 2, 1),
    ("snoo", 2, 1),
    ("snoo", 1, 2),
    ("cocodc", 2, 1),
    ("cocodc", 1, 2),
]


@pytest.mark.parametrize(("name", "data", "model"), mostly_slow(CASES, quick=QUICK))
def test_one_region_on_several_devices_trains_as_on_one(name, data, model):
    actual = result(name, data, model)
    expected = on_one_device(name)
    assert_all_close(actual, expected, rtol=RTOL, atol=ATOL)
