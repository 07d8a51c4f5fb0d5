"""Equinox: regions train and exchange the arrays of a model."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cocodc_jax as cc

REGIONS = 4
method = cc.methods.get("diloco", sync_interval=6, compress="ef+int8")
tx = cc.synchronized(optax.adam(0.02), method, axis_name="region")


@eqx.filter_vmap(in_axes=None, axis_size=REGIONS)
def create(key):  # All regions begin with the same.
    model = eqx.nn.MLP(4, 2, 16, 1, key=key)
    return model, tx.init(eqx.filter(model, eqx.is_inexact_array))


@eqx.filter_jit
@eqx.filter_vmap(axis_name="region")
def train_step(model, state, x, y):
    loss_fn = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - y) ** 2))
    loss, grads = loss_fn(model)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, state = tx.update(grads, state, params)
    return eqx.apply_updates(model, updates), state, loss


def main(steps=60):
    rng, losses = np.random.default_rng(0), []
    model, state = create(jax.random.key(0))
    for x in rng.normal(size=(steps, REGIONS, 8, 4)):
        model, state, loss = train_step(model, state, x, np.sin(x[..., :2]))
        losses.append(loss)
    return losses, state
