"""A plain loop around a small regression, as anybody's trainer has one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import cocodc_jax as cc

NUM_REGIONS = 2
OPTIMIZER = optax.sgd(0.02, 0.9)


def make_params():
    rng = np.random.default_rng(0)
    return {
        "blocks": {"w": rng.normal(size=(2, 8, 8)).astype(np.float32)},
        "head": rng.normal(size=(8, 2)).astype(np.float32),
    }


def loss_fn(params, batch, key):
    x = batch["x"]
    for w in params["blocks"]["w"]:
        x = x + jnp.tanh(x @ w)
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2), {}


def batch_of(step, num_regions=NUM_REGIONS):
    """The batch of one step, leaves `[R, B, ...]`."""
    x = np.random.default_rng(step).normal(size=(num_regions, 8, 8))
    x = x.astype(np.float32)
    return {"x": x, "y": 2 * x[..., :2]}


def one_step(params, opt_state, batch):
    """One region's step, which belongs to the trainer."""
    grads = jax.grad(lambda params: loss_fn(params, batch, None)[0])(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


# One program for all that train by this loop.
step_of_all = jax.jit(jax.vmap(one_step))


def stacked(tree, num_regions=NUM_REGIONS):
    return jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * num_regions), tree)


def train(sync, params, num_steps, state=None, step_fn=None, opt_state=None):
    """The trainer's loop; returns parameters, optimizer state and the syncs' state."""
    state = sync.init(params) if state is None else state
    step_fn = step_fn or step_of_all
    opt_state = jax.vmap(OPTIMIZER.init)(params) if opt_state is None else opt_state
    while state.step < num_steps:
        params, opt_state = step_fn(params, opt_state, batch_of(state.step))
        params, state = sync.after_step(params, state)
    return params, opt_state, state


def train_by_program(method, optimizer, num_steps, user_inputs=None):
    """The same by a `RegionProgram`; returns it and its last state."""
    params = make_params()
    program = cc.RegionProgram(
        loss_fn,
        optimizer,
        method,
        params,
        NUM_REGIONS,
        user_inputs=user_inputs or cc.UserInputs(),
    )

    first = program.init(params, jax.random.key(0))
    batches = map(batch_of, range(num_steps))
    *_, (state, _) = cc.run_steps(program, first, batches, num_steps)
    return program, state
