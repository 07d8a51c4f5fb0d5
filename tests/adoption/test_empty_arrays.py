"""Arrays without entries, such as `(0, 4)`, of a model with a part switched off."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cocodc_jax as cc
from cocodc_jax.train.checkpoint import Checkpoints

PARAMS = {
    "blocks": {"w": jnp.ones((2, 4, 4)) / 4, "none": jnp.zeros((2, 0, 4))},
    "extra": {"none": jnp.zeros((0, 4), jnp.bfloat16)},
}
MODEL_STATE = {"seen": jnp.zeros(()), "none": jnp.zeros((3, 0), jnp.int32)}
BATCHES = np.random.default_rng(0).normal(size=(9, 2, 4, 4)).astype(np.float32)


def loss_fn(params, state, batch, key):
    for w in params["blocks"]["w"]:
        batch = jnp.tanh(batch @ w)
    loss = jnp.mean((batch - 1) ** 2)
    loss += params["blocks"]["none"].sum() + params["extra"]["none"].astype(float).sum()
    return loss, ({}, state | {"seen": state["seen"] + 1})


def make(name, **arguments):
    options = {"sync_interval": 4, "num_fragments": 2, "delay_steps": 2} | arguments
    known = cc.methods.defaults(name)
    method = cc.methods.get(name, **{n: x for n, x in options.items() if n in known})

    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    return cc.RegionProgram(
        loss_fn,
        inner,
        method,
        PARAMS,
        2,
        model_state=cc.ModelState(MODEL_STATE),
        user_inputs=cc.UserInputs(learning_rate=0.1),
    )


def run(program, state, first, last):
    batches = iter(BATCHES[first:last])
    *_, (end, _) = cc.run_steps(program, state, batches, last - first)
    return end


def assert_equal(one, other):
    alike = jax.tree.map(
        lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), one, other
    )
    assert jax.tree.all(alike)


def saved_in_flight(folder, program):
    """Train three steps and save with a fragment in flight; return the state."""
    state = run(program, program.init(PARAMS, jax.random.key(0)), 0, 3)
    with Checkpoints(folder) as checkpoints:
        return checkpoints.save(program, state, {})


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("streaming_diloco", {"compress": "ef+int4"}),
        ("data_parallel", {}),
        ("muloco", {}),
    ],
)
def test_a_run_with_empty_arrays_goes_on_from_its_checkpoint(tmp_path, name, arguments):
    program = make(name, **arguments)
    state = saved_in_flight(tmp_path, program)
    assert bool(state.sync and state.sync.in_flight) == (name == "streaming_diloco")

    with Checkpoints(tmp_path) as checkpoints:
        restored, _ = checkpoints.restore(program)

    where = jax.tree.map(lambda x: (x.shape, x.sharding), state.region)
    assert jax.tree.map(lambda x: (x.shape, x.sharding), restored.region) == where
    assert_equal(restored.region, state.region)
    assert_equal(
        restored.sync and restored.sync.arrays, state.sync and state.sync.arrays
    )

    end = run(program, state, 3, 8)
    assert_equal(run(program, restored, 3, 8).region, end.region)


def test_an_empty_array_of_another_shape_is_named(tmp_path, monkeypatch):
    saved_in_flight(tmp_path, make("diloco"))

    wider = PARAMS | {"extra": {"none": jnp.zeros((0, 5), jnp.bfloat16)}}
    monkeypatch.setitem(globals(), "PARAMS", wider)

    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(
            ValueError, match=r"none is float32\[0, 4\] there and float32\[0, 5\]"
        ),
    ):
        checkpoints.restore(make("diloco"))


def test_a_state_with_empty_arrays_is_adopted_by_another_method(tmp_path):
    source = make("streaming_diloco")
    saved_in_flight(tmp_path, source)

    with Checkpoints(tmp_path) as checkpoints:
        state, _ = checkpoints.restore(source)

    program = make("cocodc", syncs_per_interval=2)
    adopted = program.adopt(state, source).state

    assert adopted.region.params["extra"]["none"].shape == (2, 0, 4)

    end = run(program, adopted, 3, 8)
    assert np.isfinite(end.region.params["blocks"]["w"]).all()
