"""Flax NNX: `nnx.vmap` names the axis of regions; `nnx.Optimizer` needs no change."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import cocodc_jax as cc

REGIONS = 4
method = cc.methods.get("streaming_diloco", num_fragments=2, sync_interval=8)
tx = cc.synchronized(optax.adam(0.02), method, axis_name="region")


@nnx.vmap(in_axes=None, axis_size=REGIONS)
def create(seed):  # All regions begin with the same.
    rngs = nnx.Rngs(seed)
    layers = nnx.Linear(4, 16, rngs=rngs), jnp.tanh, nnx.Linear(16, 2, rngs=rngs)
    model = nnx.Sequential(*layers)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


@nnx.jit
@nnx.vmap(axis_name="region")
def train_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def main(steps=60):
    model, optimizer = create(0)
    xs = np.random.default_rng(0).normal(size=(steps, REGIONS, 8, 4))
    losses = [train_step(model, optimizer, x, np.sin(x[..., :2])) for x in xs]
    return losses, optimizer.opt_state
