"""The same run on more or fewer devices, replicated or sharded inside a region."""

import functools
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax import methods
from cocodc_jax.engine import placement
from cocodc_jax.engine.mesh import make_mesh, regional
from cocodc_jax.engine.placement import memory_kind
from tests.numerics import assert_all_close, assert_within_ulps
from tests.program import tiny
from tests.slow import mostly_slow

NUM_STEPS = 6

# Sums over regions and over shards are taken in another order, and AdamW divides by
# the root of what may be small: 6 steps of float32 grow 1e-7 to some 1e-5.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


def result(program):
    """Return the end of a run on the host, as far as meshes can be compared."""
    state, outputs = tiny.finish(program, tiny.start(program), NUM_STEPS)

    arrays = {
        "region": state.region,
        "outer": state.sync and state.sync.outer,
        "in_flight": state.sync and state.sync.in_flight,
        "losses": np.concatenate([np.asarray(o.losses) for o in outputs]),
        "draws": np.concatenate([np.asarray(o.aux["draw"]) for o in outputs]),
        "syncs": [sync for o in outputs for sync in o.syncs],
        "mean": program.mean_params(state),
        "outer_params": program.outer_params(state),
    }
    return tiny.host(arrays), state.sync and state.sync.schedule.in_flight


@functools.cache
def four_devices(name):
    return result(tiny.shared_program(name))


def assert_close(one, other):
    assert one[1] == other[1]
    assert_all_close(one[0], other[0], **TOLERANCE)


@pytest.mark.parametrize(
    ("length", "data", "model"),
    [(2, 2, 2), pytest.param(1, 2, 2, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("method_name", ["data_parallel", "streaming_diloco", "cocodc"])
def test_devices_and_axes_do_not_change_the_run(method_name, length, data, model):
    program = tiny.sharded_program(method_name, length, data, model)
    assert_close(result(program), four_devices(method_name))


@pytest.mark.parametrize("name", ["data_parallel", "cocodc_hessian"])
@pytest.mark.parametrize("how", mostly_slow(["batched", "in_turn"], quick=["in_turn"]))
def test_regions_of_one_device_make_the_same_run(how, name):
    mesh = make_mesh(4, devices=jax.devices()[:1])
    program = tiny.make_program(name, mesh, local_regions=how)

    assert_close(result(program), four_devices(name))


# JAX's CPU has the kind of memory that accelerators reach of their hosts.


@pytest.mark.parametrize(
    ("name", "data"),
    [pytest.param("cocodc_hessian", 1, marks=pytest.mark.slow), ("cocodc", 2)],
)
def test_the_memory_of_moments_changes_no_number(name, data):
    """Also where merges read them, and where devices divide them."""
    mesh = make_mesh(4, data, 1, jax.devices()[:4])
    specs = P() if data == 1 else P("data")
    programs = [
        tiny.make_program(name, mesh, param_specs=specs, optimizer_memory=memory)
        for memory in ("host", "device")
    ]

    assert_within_ulps(*(result(program) for program in programs))
    state, _ = tiny.finish(programs[0], tiny.start(programs[0]), 2)
    # Counts of steps, one a region, are not moments.
    moments = [x for x in jax.tree.leaves(state.region.opt_state) if x.ndim > 1]
    assert {x.sharding.memory_kind for x in moments} == {"pinned_host"}


def test_host_memory_is_refused_for_methods_that_restore_regions():
    robust = methods.get("streaming_diloco", exclude_above=3.0)
    with pytest.raises(ValueError, match="which puts regions back; use 'device'"):
        memory_kind("host", make_mesh(4), robust)


def test_memory_that_a_platform_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(placement, "PINNED", "no_such_kind")
    with pytest.raises(ValueError, match="needs memory of the kind .* cpu has"):
        tiny.make_program("cocodc", optimizer_memory="host")


def test_optimizer_state_is_sharded_as_its_parameters():
    program = tiny.sharded_program("cocodc", 2, 2, 2)
    mesh = program.mesh
    state, _ = tiny.finish(program, tiny.start(program), 2)
    adam = state.region.opt_state[0]
    where = jax.tree.map(functools.partial(regional, mesh), tiny.SPECS)

    for tree in (state.region.params, adam.mu, adam.nu):
        assert jax.tree.map(lambda x: x.sharding, tree) == where
        assert tree["blocks"]["w"].addressable_shards[0].data.shape == (2, 2, 4, 4)
    assert adam.count.sharding == regional(mesh)

    (flight,) = state.sync.in_flight.values()
    for path, x in flight.mean.items():
        spec = x.sharding.spec
        assert spec == program.shardings.fragments[0][path].spec
        assert flight.kept["staged"][path].sharding == regional(mesh, spec)
        assert not x.sharding.is_fully_replicated

    outer = program.outer_params(state)["embed"]
    assert outer.sharding == NamedSharding(mesh, P("data", "model"))


@pytest.mark.parametrize(
    "optimizer",
    [optax.adafactor(0.01, min_dim_size_to_factor=2), optax.contrib.muon(0.01)],
    ids=["adafactor", "muon"],
)
def test_any_optax_optimizer_can_be_sharded(optimizer):
    """Factored states are not of their parameter's shape: these are replicated."""
    diloco = methods.get("diloco", sync_interval=2)
    mesh = make_mesh(2, 2, 2)
    program = tiny.program_of(diloco, mesh, optimizer=optimizer, param_specs=tiny.SPECS)

    region = tiny.start(program).region
    assert region.params["embed"].sharding.spec == P("region", "data", "model")

    batches = jax.tree.map(lambda x: x[None], tiny.make_batch(0))

    # Only traced: a scan must accept the new state.
    after, _ = jax.eval_shape(program._steps, region, batches, None, None, ())
    assert jax.tree.structure(after) == jax.tree.structure(region)


ONE_DEVICE = """
import json, sys, warnings
import jax
import numpy as np

warnings.simplefilter("error")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
from tests.program import tiny
means = {}
for name in sys.argv[2:]:
    program = tiny.make_program(name)
    assert program.mesh.devices.size == len(jax.devices()) == 1
    state, outputs = tiny.finish(program, tiny.start(program), int(sys.argv[1]))
    outer = state.sync and state.sync.outer
    outer = {d for x in jax.tree.leaves(outer) for d in x.devices()}
    assert outer <= set(jax.devices())
    means[name] = [np.asarray(output.losses).tolist() for output in outputs]
print(json.dumps(means))
"""


def test_one_device_for_regions_and_outer_state_is_enough():
    """In another process, in which regions and outer state share the only device."""
    words = ("-c", ONE_DEVICE, str(NUM_STEPS), "data_parallel", "cocodc")
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(__file__).parents[2],
    )

    assert done.returncode == 0, done.stderr

    for name, losses in json.loads(done.stdout).items():
        expected = four_devices(name)[0]["losses"]
        np.testing.assert_allclose(np.concatenate(losses), expected, **TOLERANCE)
