"""A checkpoint of a run is restored into a program of another method."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cocodc_jax as cc
from cocodc_jax.train.checkpoint import Checkpoints

PARAMS = {"blocks": {"w": jnp.ones((2, 4, 4)) / 4}}
BATCHES = np.random.default_rng(0).normal(size=(3, 2, 4, 4)).astype(np.float32)
FRAGMENTS = {"sync_interval": 4, "num_fragments": 2, "delay_steps": 2}
STREAMING = cc.methods.get("streaming_diloco", **FRAGMENTS)
COCODC = cc.methods.get("cocodc", **FRAGMENTS, syncs_per_interval=2)
# A user's method: the merge of one in the schedule of the other.
MIXED = dataclasses.replace(
    STREAMING,
    name="mixed",
    sync=dataclasses.replace(STREAMING.sync, merge=COCODC.sync.merge),
)


def loss_fn(params, batch, key):
    for w in params["blocks"]["w"]:
        batch = jnp.tanh(batch @ w)
    return jnp.mean((batch - 1) ** 2), {}


def make(method):
    user_inputs = cc.UserInputs(learning_rate=0.1)
    return cc.RegionProgram(
        loss_fn, optax.sgd(0.1), method, PARAMS, regions=2, user_inputs=user_inputs
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """With a fragment in flight."""
    folder = tmp_path_factory.mktemp("checkpoints")
    program = make(STREAMING)
    state = program.init(PARAMS, jax.random.key(0))

    for new, _ in cc.run_steps(program, state, iter(BATCHES), 3):
        state = new

    assert state.sync.in_flight

    with Checkpoints(folder) as checkpoints:
        checkpoints.save(program, state, {})
    return folder


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            COCODC,
            "saved by method='streaming_diloco' in .* method='cocodc', .* remembers",
        ),
        (MIXED, "method='mixed', as this program has it, .*: in_flight/.* is missing"),
        (
            "diloco",
            "number of regions .saved by method='streaming_diloco', restored into "
            "method='diloco'.: outer/",
        ),
    ],
)
def test_a_state_in_flight_is_not_restored_into_another_method(saved, method, message):
    with (
        Checkpoints(saved) as checkpoints,
        pytest.raises(ValueError, match=f"checkpoint of step 3 in .*{message}"),
    ):
        checkpoints.restore(make(method))
