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

import cocodc_jax as cc
from cocodc_jax.train import make_evaluate

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
    found = [losses, mean, outer, evaluate(mean), program.region_drift(state)]
    with cc.Checkpoints(folder) as checkpoints:
        checkpoints.save(program, program.synchronize(state), {})
    with cc.Checkpoints(folder) as checkpoints:
        state, _ = checkpoints.restore(program)
    state, _ = program.land(state)
    other = make("diloco")
    adopted = other.adopt(state, program)
    _, output = other.advance(adopted.state, BATCH[None])
    return jax.tree.map(np.asarray, [*found, output.losses])


def callers_mesh(name):
    if name == "the program's":
        return cc.make_mesh(2, devices=jax.devices()[:2])
    return jax.make_mesh((4,), ("data",), devices=jax.devices()[4:8])


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return everything(make(), tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("name", ["the program's", "another, explicit"])
def test_a_callers_mesh_changes_nothing(expected, tmp_path, name):
    program = make()
    with jax.set_mesh(callers_mesh(name)):
        found = everything(program, tmp_path / "in context")
        made_inside = everything(make(), tmp_path / "made inside")
    jax.tree.map(np.testing.assert_array_equal, found, expected)
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


def test_devices_asked_for_too_late_name_what_to_do_and_that_does_it():
    done = in_a_process()
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: use_cpu_devices(3) comes after JAX has start")
    assert "restart the kernel" in last
    name, value = re.search(r"set (\w+)=(\d+) in the environment", last).groups()
    assert in_a_process(**{name: value}).returncode == 0
