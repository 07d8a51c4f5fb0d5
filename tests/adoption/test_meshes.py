"""A caller's mesh in context, and virtual devices asked for too late."""

import itertools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cocodc_jax as cc
from cocodc_jax.train import make_evaluate
from tests.numerics import assert_all_close

PARAMS = {"w": np.ones((4, 3), np.float32), "b": np.zeros(3, np.float32)}
METHODS = {
    "cocodc": dict(sync_interval=4, num_fragments=2, delay_steps=2),
    "diloco": dict(sync_interval=4),
}
BATCH = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)


def loss_fn(params, batch, key):
    return jnp.square(batch @ params["w"] + params["b"][None]).mean(), {}


def make(method="cocodc"):
    method = cc.methods.get(method, **METHODS[method])
    mesh = cc.make_mesh(2, devices=jax.devices()[:2])
    return cc.RegionProgram(loss_fn, optax.adam(0.1), method, PARAMS, 2, mesh=mesh)


def everything(program, folder):
    """Everything public, in a run's order."""
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = program.init(params, jax.random.key(0))

    steps = cc.run_steps(program, state, itertools.repeat(BATCH), 6)
    for state, output in steps:  # noqa: B007
        losses = output.losses

    evaluate = make_evaluate(loss_fn, program.mesh, BATCH)
    mean = program.mean_params(state)
    outer = program.outer_params(state)
    results = [losses, mean, outer, evaluate(mean), program.region_drift(state)]

    with cc.Checkpoints(folder) as checkpoints:
        checkpoints.save(program, program.synchronize(state), {})
    with cc.Checkpoints(folder) as checkpoints:
        state, _ = checkpoints.restore(program)
    state, _ = program.land(state)

    other = make("diloco")
    adopted = other.adopt(state, program)
    _, output = other.advance(adopted.state, BATCH[None])

    return jax.tree.map(np.asarray, [*results, output.losses])


def callers_mesh(name):
    if name == "the program's":
        return cc.make_mesh(2, devices=jax.devices()[:2])
    return jax.make_mesh((4,), ("data",), devices=jax.devices()[4:8])


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return everything(make(), tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("name", ["the program's", "another, explicit"])
def test_a_callers_mesh_changes_no_number(expected, tmp_path, name):
    program = make()
    with jax.set_mesh(callers_mesh(name)):
        results = everything(program, tmp_path / "in context")
        made_inside = everything(make(), tmp_path / "made inside")
    jax.tree.map(np.testing.assert_array_equal, results, expected)
    jax.tree.map(np.testing.assert_array_equal, made_inside, expected)


SCRIPT = """
import jax, jax.numpy as jnp
import cocodc_jax as cc
jnp.zeros(2)
cc.use_cpu_devices(3)
assert len(jax.devices()) == 3
"""


def in_a_process(**env):
    words = [sys.executable, "-c", SCRIPT]
    kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(words, env=kept | env, capture_output=True, text=True)


def test_use_cpu_devices_after_jax_has_started_names_a_repair_that_works():
    done = in_a_process()
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: use_cpu_devices(3) comes after JAX has start")
    assert "restart the kernel" in last
    name, value = re.search(r"set (\w+)=(\d+) in the environment", last).groups()
    assert in_a_process(**{name: value}).returncode == 0


# --- A loss with another mesh ---


def fsdp_mesh():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    return Mesh(devices, ("region", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def manual_loss(params, batch, key=None):
    """Each device has a part of the batch; all axes of the mesh are manual."""

    def of_device(params, batch):
        loss, _ = loss_fn(params, batch, None)
        return jax.lax.pmean(loss, "fsdp")

    of_region = jax.shard_map(
        of_device, mesh=fsdp_mesh(), in_specs=(P(), P("fsdp")), out_specs=P()
    )
    return of_region(params, batch), {}


def entering_loss(params, batch, key):
    with jax.sharding.use_abstract_mesh(fsdp_mesh().abstract_mesh):
        return loss_fn(params, batch, key)


def setting_loss(params, batch, key):
    with jax.set_mesh(fsdp_mesh()):
        return loss_fn(params, batch, key)


@pytest.mark.parametrize("loss", [manual_loss, entering_loss, setting_loss])
def test_a_program_refuses_a_loss_that_enters_a_mesh(loss):
    mesh = cc.make_mesh(2, devices=jax.devices()[:2])
    program = cc.RegionProgram(loss, optax.sgd(0.1), "diloco", PARAMS, 2, mesh=mesh)
    state = program.init(jax.tree.map(jnp.asarray, PARAMS), jax.random.key(0))
    says = "loss_fn cannot be traced .* use RegionSync after .*, or synchronized as its"
    with pytest.raises(ValueError, match=says):
        program.advance(state, BATCH[None])


@pytest.mark.parametrize("way", ["synchronized", "RegionSync"])
def test_a_manual_loss_trains_in_its_own_step(way):
    """By the two ways that the error names; on four devices as on one."""
    method = cc.methods.get("diloco", sync_interval=2, outer_lr=0.5)
    optimizer = optax.sgd(0.1)
    if way == "synchronized":
        optimizer = cc.synchronized(optimizer, method, axis_name="region")

    def train(loss, spmd_axis_name):
        def step(params, state, batch):
            grads = jax.grad(lambda params: loss(params, batch, None)[0])(params)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        step = jax.vmap(step, axis_name="region", spmd_axis_name=spmd_axis_name)
        params = jax.tree.map(lambda x: jnp.stack([x] * 2), PARAMS)
        state = jax.vmap(optimizer.init)(params)
        batch = jnp.asarray(BATCH)
        if spmd_axis_name:
            where = NamedSharding(fsdp_mesh(), P("region"))
            params, state, batch = jax.device_put((params, state, batch), where)

        step = jax.jit(step)
        sync = sync_state = None
        if way == "RegionSync":
            sync = cc.RegionSync(method, params, 2)
            sync_state = sync.init(params)

        for _ in range(5):
            params, state = step(params, state, batch)
            if sync is not None:
                params, sync_state = sync.after_step(params, sync_state)
        return params

    params_by_region = train(manual_loss, "region")
    expected = train(loss_fn, None)
    assert_all_close(params_by_region, expected, rtol=0, atol=1e-6)
