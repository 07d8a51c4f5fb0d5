"""A plain JAX loop: regions are an axis of `jax.vmap`, all on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import cocodc_jax as cc

REGIONS = 4
method = cc.methods.get("cocodc", num_fragments=2, sync_interval=8, delay_steps=2)
tx = cc.synchronized(optax.adam(0.02), method, axis_name="region")


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)


def train_step(params, state, x, y):  # Of one region, as any Optax loop has it.
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def main(steps=60):
    rng, losses = np.random.default_rng(0), []
    params = {"in": rng.normal(size=(4, 16)) / 2, "out": rng.normal(size=(16, 2)) / 4}
    axes = cc.sync_axes(method)  # What is equal in all regions is there once.
    state = jax.vmap(tx.init, None, axes, axis_size=REGIONS)(params)
    params = jax.tree.map(lambda x: jnp.stack([x] * REGIONS), params)
    step = jax.vmap(train_step, (0, axes, 0, 0), (0, axes, 0), axis_name="region")
    step = jax.jit(step, donate_argnums=(0, 1))
    for _ in range(steps):
        x = rng.normal(size=(REGIONS, 8, 4))
        params, state, loss = step(params, state, x, np.sin(x[..., :2]))
        losses.append(loss)
    return losses, state
