"""Models with running statistics: Flax Linen, NNX, and a module of one's own."""

import dataclasses
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import cocodc_jax as cc

RNG = np.random.default_rng(0)
X = RNG.normal(3.0, 2.0, (4, 16, 4)).astype(np.float32)  # Regions, batch, features.
BATCH = {"x": X, "y": np.tanh(X.sum(-1, keepdims=True) / 4)}
DILOCO = cc.methods.get("diloco", sync_interval=5, outer_lr=1.0, outer_momentum=0.0)


@pytest.fixture(autouse=True)
def shapes_as_users_have_them():
    with jax.numpy_rank_promotion("allow"):
        yield


def train(loss_fn, params, state):
    """Train and return loss, parameters and statistics to judge by."""
    program = cc.RegionProgram(
        loss_fn, optax.adam(0.02), DILOCO, params, 4, model_state=cc.ModelState(state)
    )
    start = program.init(params, jax.random.key(0))
    turns = list(cc.run_steps(program, start, itertools.repeat(BATCH), 40))
    losses = [output.losses.mean() for _, output in turns]
    assert losses[-1] < losses[0] / 3
    running, _ = turns[-1]
    # A sync was applied at the last step: all regions have the same.
    for leaf in jax.tree.leaves(running.region.model_state):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    return program.mean_params(running), program.mean_model_state(running)


def check_statistics(mean, var):
    """Momentum 0.9 over 40 steps of one batch a region; plain means over regions."""
    np.testing.assert_allclose(mean, X.mean(1).mean(0), rtol=0.05)
    np.testing.assert_allclose(var, X.var(1).mean(0), rtol=0.05)


class Linen(nn.Module):
    """A layer between batch norm and the output."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(1)(jnp.tanh(nn.Dense(16)(x)))


def test_flax_linen():
    model = Linen()
    variables = model.init(jax.random.key(0), X[0], train=False)

    def loss_fn(params, batch_stats, batch, key):
        predicted, new = model.apply(
            {"params": params, "batch_stats": batch_stats}, batch["x"], train=True,
            mutable=["batch_stats"],
        )  # fmt: skip
        loss = jnp.mean((predicted - batch["y"]) ** 2)
        return loss, ({}, new["batch_stats"])

    params, stats = train(loss_fn, variables["params"], variables["batch_stats"])
    check_statistics(**stats["BatchNorm_0"])
    trained = {"params": params, "batch_stats": stats}
    error = model.apply(trained, X[0], train=False) - BATCH["y"][0]
    assert jnp.mean(error**2) < 0.1


class Net(nnx.Module):
    """The same as an object."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.hidden, self.out = (
            nnx.Linear(4, 16, rngs=rngs),
            nnx.Linear(16, 1, rngs=rngs),
        )

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(self.norm(x))))


def test_flax_nnx():
    graph, params, stats = nnx.split(Net(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

    def loss_fn(params, stats, batch, key):
        model = nnx.merge(graph, params, stats)
        loss = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        return loss, ({}, nnx.state(model, nnx.BatchStat))

    params, stats = train(loss_fn, params, stats)
    model = nnx.merge(graph, params, stats)
    check_statistics(model.norm.mean[...], model.norm.var[...])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Norm:
    """As Equinox's stateful layers: called with a state, returns the next one."""

    scale: jax.Array

    def __call__(self, x, state):
        mean, var = x.mean(0), x.var(0)
        new = {"mean": 0.9 * state["mean"] + 0.1 * mean}
        new["var"] = 0.9 * state["var"] + 0.1 * var
        return self.scale * (x - mean) / jnp.sqrt(var + 1e-5), new


def test_a_module_that_returns_its_state():
    model = {"norm": Norm(jnp.ones(4)), "out": jnp.ones((4, 1)) / 4, "b": jnp.zeros(1)}
    state = {"mean": jnp.zeros(4), "var": jnp.ones(4)}

    def loss_fn(model, state, batch, key):
        hidden, state = model["norm"](batch["x"], state)
        predicted = hidden @ model["out"] + model["b"]
        return jnp.mean((predicted - batch["y"]) ** 2), ({}, state)

    _, state = train(loss_fn, model, state)
    check_statistics(**state)
