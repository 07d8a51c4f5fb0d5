"""A trainer's step in one program with the messages that cross while it computes.

`python test_window.py TARGET SLICES` compiles such a window for accelerators that are
not there, and prints for each program with steps its collectives between regions.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cocodc_jax as cc
from cocodc_jax.aot import hlo
from cocodc_jax.aot.collectives import BETWEEN_SLICES, collectives
from cocodc_jax.aot.targets import Target
from tests.numerics import assert_all_close
from tests.region_sync import regression as plain

ROOT = Path(__file__).parents[2]
NUM_STEPS = 16
OPTIONS = {"sync_interval": 6, "num_fragments": 2, "delay_steps": 2}
SPECS = {"blocks": {"w": P("pods", None, "fsdp")}, "head": P("pods", "fsdp")}


def step(carry, batch):
    """One step of all regions; the count is a leaf without regions."""
    params, opt_state, count = carry
    params, opt_state = jax.vmap(plain.one_step)(params, opt_state, batch)
    norms = jnp.sqrt(jnp.square(params["head"]).sum((1, 2)))
    return (params, opt_state, count + 1), norms


def params_of(carry):
    return carry[0]


def first_carry(mesh):
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    params = jax.device_put(plain.stacked(plain.make_params()), shardings)
    return params, jax.jit(jax.vmap(plain.OPTIMIZER.init))(params), jnp.int32(0)


@pytest.mark.parametrize("overlap", ["no", "yes"])
def test_a_window_gives_the_numbers_of_the_program(overlap):
    method = cc.methods.get("streaming_diloco", **OPTIONS)
    _, expected = plain.train_by_program(method, plain.OPTIMIZER, NUM_STEPS)

    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("pods", "fsdp"))
    carry = first_carry(mesh)
    transport = cc.Transport("program", overlap=overlap)
    sync = cc.RegionSync(method, params_of(carry), 2, transport=transport)
    window = sync.window(step, params_of, carry)
    state = sync.init(params_of(carry))

    while state.step < NUM_STEPS:
        num_steps = min(sync.steps_to_event(state), NUM_STEPS - state.step)
        steps = range(state.step, state.step + num_steps)
        batches = jax.tree.map(lambda *x: np.stack(x), *map(plain.batch_of, steps))
        carry, norms, state = window(carry, batches, state)
        assert norms.shape == (num_steps, 2)

    params, _, count = carry
    assert_all_close(params, expected.region.params, rtol=1e-5, atol=1e-6)
    assert (int(count), state.bytes_sent) == (NUM_STEPS, expected.bytes_sent)
    assert params["head"].sharding.spec == SPECS["head"]


def small(overlap="yes"):
    mesh = Mesh(np.array(jax.devices()[:2]), ("pods",))
    params = jax.device_put(jnp.ones((2, 4)), NamedSharding(mesh, P("pods")))
    carry = {"params": params, "count": jnp.int32(0)}
    method = cc.methods.get("diloco", sync_interval=2)
    transport = cc.Transport("program", overlap=overlap)
    return cc.RegionSync(method, params, 2, transport=transport), carry


def test_steps_past_an_event_are_refused():
    sync, carry = small()
    window = sync.window(lambda c, x: (c, x), lambda c: c["params"], carry)
    with pytest.raises(ValueError, match="batches has 3 steps, .* 2 steps ahead"):
        window(carry, np.zeros((3, 2)), sync.init(carry["params"]))


def test_with_overlap_the_window_takes_the_place_of_after_step():
    sync, carry = small()
    with pytest.raises(ValueError, match=r"overlap='yes' .* call window\("):
        sync.after_step(carry["params"], sync.init(carry["params"]))


@pytest.mark.parametrize(
    ("pick", "change", "message"),
    [
        (lambda c: c["params"] + 1, {}, "arrays that are not in the carry"),
        (lambda c: c["params"], {"again": "params"}, "holds one array twice"),
    ],
)
def test_an_invalid_pick_of_a_carry_is_refused(pick, change, message):
    sync, carry = small()
    carry |= {name: carry[other] for name, other in change.items()}
    with pytest.raises(ValueError, match=message):
        sync.window(lambda c, x: (c, x), pick, carry)


def test_a_method_without_a_delay_sends_between_windows():
    """No communication is hidden; a carry may hold PRNG keys, as a trainer's does."""
    sync, carry = small()
    where = carry["params"].sharding
    carry["keys"] = jax.device_put(jax.random.split(jax.random.key(0), 2), where)
    carry["key"] = jax.random.key(1)

    def step(carry, x):
        keys = jax.vmap(jax.random.split)(carry["keys"])
        noise = jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys[:, 1])
        params = carry["params"] + noise
        return carry | {"params": params, "keys": keys[:, 0]}, params

    window = sync.window(step, lambda carry: carry["params"], carry)
    listed = window.list_programs(carry, jax.ShapeDtypeStruct((2,), jnp.float32))
    assert {one.name: one.num_steps for one in listed} == {
        "inner steps": 2,
        "send fragment 0": 0,
        "outer step 0": 0,
        "merge fragment 0": 0,
    }

    carry, params, state = window(carry, jnp.zeros((2, 2)), sync.init(carry["params"]))
    assert [one.apply_step for one in state.applied] == [2]
    assert not np.allclose(params[-1, 0], params[-1, 1])
    np.testing.assert_allclose(carry["params"][0], carry["params"][1])
    assert carry["keys"].sharding == where


WIDTH = 256
NUM_SLICES = 4
NUM_CHIPS = 4


def main(name, slices):
    """Compile a window of a plain loop for slices of a TPU, a region each."""
    target = Target.parse(name, int(slices))
    devices = np.array(target.devices()).reshape(NUM_SLICES, -1)
    mesh = Mesh(devices, ("pods", "fsdp"))
    shape = {"region": 1, "data": NUM_CHIPS}

    def of(shape, *spec):
        return jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec))
        )

    layer = of((NUM_SLICES, WIDTH, WIDTH), "pods", "fsdp")
    carry = {"a": layer, "b": of(layer.shape, "pods", "fsdp")}

    def one_step(params, x):
        def loss(params):
            return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - x) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, _ = optax.sgd(0.1).update(grads, optax.sgd(0.1).init(params))
        return optax.apply_updates(params, updates), value

    def step(params, x):
        return jax.vmap(one_step, spmd_axis_name="pods")(params, x)

    method = cc.methods.get(
        "streaming_diloco", sync_interval=8, num_fragments=2, delay_steps=2
    )
    transport = cc.Transport("program", overlap="yes")
    sync = cc.RegionSync(method, carry, NUM_SLICES, transport=transport)
    window = sync.window(step, lambda carry: carry, carry)
    batch = of((NUM_SLICES, 64, WIDTH), "pods", "fsdp")

    rows = {}
    for listed in window.list_programs(carry, batch):
        if not listed.num_steps:
            continue
        traced = listed.program.trace(*listed.arguments)
        lowered = traced.lower(lowering_platforms=(target.chip.platform,))
        text = lowered.compile().as_text()
        rows[listed.name] = [
            (one.kind, one.spans, one.num_bytes)
            for one in collectives(hlo.parse(text), shape)
            if {"region", BETWEEN_SLICES} & set(one.axes)
        ]
    print(json.dumps(rows))


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
def test_messages_between_slices_cross_while_the_trainers_step_computes():
    target = "v5e:2x2"
    env = os.environ | Target.parse(target, NUM_SLICES).environment()
    env["PYTHONPATH"] = str(ROOT)
    words = [sys.executable, __file__, target, str(NUM_SLICES)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr

    programs = json.loads(done.stdout.splitlines()[-1])
    windows = [rows for name, rows in programs.items() if "start fragment" in name]
    assert len(windows) == 2
    for rows in windows:
        ((kind, spans, num_bytes),) = rows
        assert (kind, spans) == ("all-reduce", True)
        assert num_bytes == 4 * WIDTH * WIDTH / NUM_CHIPS


if __name__ == "__main__":
    main(*sys.argv[1:])
