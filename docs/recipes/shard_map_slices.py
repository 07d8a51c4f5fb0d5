"""`shard_map` over two slices, one region each, with data parallelism inside."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cocodc_jax as cc

method = cc.methods.get("streaming_diloco", num_fragments=2, sync_interval=8)
tx = cc.synchronized(optax.adam(0.02), method, axis_name="region")
mesh = cc.make_mesh(2, data=2, devices=jax.devices()[:4])  # On TPUs: slices, chips.


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)


def of_region(carry, x):
    (params, state), x = jax.tree.map(lambda leaf: leaf[0], (carry, x))
    loss, grads = jax.value_and_grad(loss_fn)(params, x, jnp.sin(x[:, :2]))
    updates, state = tx.update(grads, state, params)
    carry = optax.apply_updates(params, updates), state
    return jax.tree.map(lambda leaf: leaf[None], (carry, loss))


def main(steps=60):
    rng, losses, over = np.random.default_rng(0), [], P("region")
    params = {"in": rng.normal(size=(4, 16)) / 2, "out": rng.normal(size=(16, 2)) / 4}
    carry = jax.tree.map(lambda x: jnp.stack([x] * 2), (params, tx.init(params)))
    carry = jax.device_put(carry, NamedSharding(mesh, over))
    options = dict(mesh=mesh, axis_names={"region"}, in_specs=over, out_specs=over)
    step = jax.jit(jax.shard_map(of_region, **options))
    for x in rng.normal(size=(steps, 2, 8, 4)):
        batch = jax.device_put(x, NamedSharding(mesh, P("region", "data")))
        carry, loss = step(carry, batch)
        losses.append(loss)
    return losses, carry[1]
