"""A small model, its data, and steps to compare pipelined and divided ones with."""

import dataclasses
import functools

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.models import (
    TransformerConfig,
    init_params,
    make_loss_fn,
    partition_specs,
)
from cocodc_jax.models.transformer import bind
from tests.numerics import assert_all_close

# Nine positions: no number of stages here divides them.
BATCH = 8
LENGTH = 9
CONFIG = TransformerConfig(
    vocab_size=32, num_layers=4, width=16, mlp_width=24, num_heads=2, num_kv_heads=2
)
# The same function, the loss some tokens at a time.
CHUNKED = dataclasses.replace(CONFIG, loss_chunk_tokens=12)
UNTIED = dataclasses.replace(CONFIG, qk_norm=True, tie_embeddings=False, remat="full")
ADAPTED = dataclasses.replace(CONFIG, lora_rank=3)
BFLOAT16 = dataclasses.replace(CONFIG, compute_dtype="bfloat16", remat="dots")
KEY = jax.random.key(0)


@functools.cache
def shapes(config):
    return jax.eval_shape(functools.partial(init_params, config), KEY)


def draw(config, *lead):
    """Parameters with leading axes, of deviation 0.3."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: rng.normal(0.1, 0.3, (*lead, *x.shape)).astype(np.float32),
        shapes(config),
    )


def alike(params, num_regions):
    return jax.tree.map(lambda x: np.stack([x] * num_regions), params)


def tokens(*lead):
    shape = (*lead, BATCH, LENGTH + 1)
    return np.random.default_rng(1).integers(0, 32, shape).astype(np.int32)


def region(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def step(loss_fn):
    return jax.value_and_grad(loss_fn, has_aux=True)


@functools.cache
def _compiled_step(config):
    return jax.jit(step(make_loss_fn(config)))


@functools.cache
def plain(config):
    """Return the results of one region's step without a pipeline."""
    return jax.device_get(_compiled_step(config)(draw(config), tokens(), KEY))


@functools.cache
def plain_regions(config, num_regions):
    """Return the same of regions with different parameters and batches."""
    return plain_steps(config, draw(config, num_regions), tokens(num_regions))


def plain_steps(config, params, batches):
    compiled = _compiled_step(config)
    outputs = [
        compiled(region(params, r), batch, KEY) for r, batch in enumerate(batches)
    ]
    return jax.tree.map(lambda *x: np.stack(x), *outputs)


def place(mesh, tree, specs, *lead):
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, P(*lead, *spec)),
        specs,
        is_leaf=lambda x: isinstance(x, P),
    )
    return jax.device_put(tree, shardings)


def place_regions(mesh, params, batches):
    specs = partition_specs(region(params, 0), stage="stage")
    return (
        place(mesh, params, specs, "region"),
        jax.device_put(batches, NamedSharding(mesh, P("region", "data"))),
    )


def over_regions(mesh, loss_fn, block=lambda fn: lambda x: fn(region(x, 0))):
    """Make the step of all regions as the runtime does, with a key for each region."""

    def one(values):
        params, batch, key = values
        return step(loss_fn)(params, batch, jax.random.wrap_key_data(key))

    def body(*values):
        out = block(one)(values)
        holds_one = values[1].shape[0] == 1
        return jax.tree.map(lambda x: x[None], out) if holds_one else out

    regions = P("region")
    return jax.shard_map(
        body,
        mesh=mesh,
        axis_names={"region"},
        in_specs=regions,
        out_specs=regions,
        check_vma=False,
    )


def keys(num_regions):
    return np.asarray(jax.random.key_data(jax.random.split(KEY, num_regions)))


def assert_close(actual, expected, rtol=1e-4, atol=2e-6):
    # Sums over microbatches, stages and positions in another order, in float32.
    assert_all_close(jax.device_get(actual), jax.device_get(expected), rtol, atol)


# --- Two stages by hand, without a mesh or a collective ---

_HALF = dataclasses.replace(CONFIG, num_layers=2)


def _stage(params, number):
    rows = slice(2 * number, 2 * number + 2)
    blocks = jax.tree.map(lambda x: x[rows], params["blocks"])
    return bind(_HALF, params | {"blocks": blocks})


def first_stage(params, batch):
    model = _stage(params, 0)
    return model.run_blocks(model.embed(batch[:, :-1]))[0]


def last_stage(params, x, batch):
    """Return the mean loss over the first stage's outputs."""
    model = _stage(params, 1)
    logits = model.norm(model.run_blocks(x)[0]) @ model.output_head()
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return nll.mean()
