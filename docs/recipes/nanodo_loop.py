"""NanoDO's loop: its FSDP annotations, Orbax checkpoints; regions are a mesh axis."""

import tempfile

import flax.linen as nn
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec
from nanodo.model import DoConfig, TransformerDo

import cocodc_jax as cc

model = TransformerDo(DoConfig(D=16, H=2, L=11, N=2, V=16, F=64))
COCODC = cc.methods.get("cocodc", num_fragments=2, sync_interval=10, delay_steps=2)


def train_step(state, tokens):
    def loss_fn(params):
        logits, labels = model.apply({"params": params}, tokens[:, :-1]), tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def main(steps=60, method=COCODC, workdir=None):
    tx = cc.synchronized(optax.adamw(0.01), method, axis_name="region")
    create = lambda params: TrainState.create(apply_fn=None, params=params, tx=tx)  # noqa: E731
    init = lambda key: create(model.init(key, np.zeros((1, 11), int))["params"])  # noqa: E731
    mesh, key, losses = cc.make_mesh(2, data=2), jax.random.key(0), []
    one = jax.eval_shape(init, key)
    axes = one.replace(step=0, params=0, opt_state=cc.sync_axes(method))
    where = cc.sync_shardings(one, nn.get_sharding(one, mesh).params, axes)
    state = jax.jit(jax.vmap(init, None, axes, axis_size=2), out_shardings=where)(key)
    step = jax.vmap(train_step, (axes, 0), (axes, 0), "region", None, "region")
    batches = NamedSharding(mesh, PartitionSpec("region", "data"))
    step = jax.jit(step, in_shardings=(where, batches), out_shardings=(where, None))
    with ocp.CheckpointManager(workdir or tempfile.mkdtemp()) as manager:
        if first := manager.latest_step() or 0:
            state = manager.restore(first, args=ocp.args.StandardRestore(state))
        for i in range(first, steps):
            tokens = (np.arange(12) + i + np.arange(8)[:, None]).reshape(2, 4, 12) % 16
            state, loss = step(state, tokens)
            losses.append(loss)
        manager.save(steps, args=ocp.args.StandardSave(state))
    return losses, state.opt_state
