"""A Linen loop as NanoDO's: regions are one axis of the mesh, FSDP is another."""

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import cocodc_jax as cc

fsdp = nn.with_partitioning(nn.initializers.normal(0.1), (None, "data"))
model = nn.Sequential([nn.Embed(16, 8), nn.Dense(32, kernel_init=fsdp), nn.Dense(16)])
method = cc.methods.get("diloco", sync_interval=10)
tx = cc.synchronized(optax.adam(0.02), method, axis_name="region")


def init(key):
    params = model.init(key, np.zeros((1, 4), int))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state, tokens):
    def loss_fn(params):
        logits, labels = model.apply({"params": params}, tokens[:, :-1]), tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def main(steps=60):
    mesh, key, losses = cc.make_mesh(2, data=2), jax.random.key(0), []
    specs = nn.get_partition_spec(jax.eval_shape(init, key))
    lay = lambda spec: NamedSharding(mesh, PartitionSpec("region", *spec))  # noqa: E731
    where = jax.tree.map(lay, specs)
    state = jax.jit(jax.vmap(init, None, axis_size=2), out_shardings=where)(key)
    step = jax.vmap(train_step, axis_name="region", spmd_axis_name="region")
    step = jax.jit(step, out_shardings=(where, None))
    for i in range(steps):
        tokens = (np.arange(12) + i + np.arange(8)[:, None]).reshape(2, 4, 12) % 16
        state, loss = step(state, tokens)
        losses.append(loss)
    return losses, state.opt_state
