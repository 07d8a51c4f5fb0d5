"""Loops of other people's with a method in them: the scripts of the documentation."""

import pathlib
import runpy

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import cocodc_jax as cc
from tests.numerics import assert_all_close
from tests.slow import mostly_slow

SCRIPTS = sorted(pathlib.Path(__file__, "../../../docs/recipes").resolve().glob("*.py"))


# NanoDO is trained and resumed below.
QUICK = [script for script in SCRIPTS if script.stem != "nanodo_loop"]


@pytest.mark.parametrize(
    "script", mostly_slow(SCRIPTS, quick=QUICK), ids=lambda script: script.stem
)
def test_a_recipe_trains_in_few_lines(script):
    assert sum(map(bool, script.read_text().splitlines())) <= 40
    losses, state = runpy.run_path(str(script))["main"]()
    losses = np.array(losses)
    metrics = cc.sync_metrics(state)
    assert losses.ndim == 2
    assert (losses[-10:].mean(0) < losses[:10].mean(0)).all()
    assert (np.asarray(metrics["bytes_sent"]) > 0).all()
    assert (np.asarray(metrics["norm"]) > 0).all()


@pytest.fixture(scope="module")
def nanodo():
    (script,) = (script for script in SCRIPTS if script.stem == "nanodo_loop")
    return runpy.run_path(str(script))


def test_nanodos_loop_resumes_in_mid_flight(nanodo, tmp_path):
    whole, state = nanodo["main"](16, workdir=tmp_path / "whole")
    _, cut = nanodo["main"](11, workdir=tmp_path / "cut")
    assert cc.sync_metrics(cut)["fragments_in_flight"] == 1

    rest, resumed = nanodo["main"](16, workdir=tmp_path / "cut")

    np.testing.assert_allclose(rest, whole[11:], rtol=1e-6)
    assert_all_close(resumed, state, rtol=1e-5, atol=1e-6)

    # The outer model is sharded as the parameters are, not once a device.
    outer = {k: v for part in nn.unbox(state.outer) for k, v in part.items()}
    assert outer["blocks_0/query/kernel"].sharding.spec[0] == "data"


@pytest.mark.slow
def test_nanodos_loop_by_data_parallel_is_the_loop_alone(nanodo):
    losses, _ = nanodo["main"](8, cc.methods.get("data_parallel"))
    model = nanodo["model"]
    optimizer = optax.adamw(0.01)
    params = model.init(jax.random.key(0), np.zeros((1, 11), int))["params"]
    state = optimizer.init(params)

    def loss_fn(params, tokens):
        logits = model.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    @jax.jit
    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for i in range(8):
        tokens = (np.arange(12) + i + np.arange(8)[:, None]) % 16
        params, state, loss = step(params, state, tokens)
        np.testing.assert_allclose(np.mean(losses[i]), loss, rtol=1e-5)
