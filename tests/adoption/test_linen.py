"""A Flax Linen model that says where its parameters lie, as NanoDO's with FSDP."""

import contextlib

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import cocodc_jax as cc
from tests.numerics import assert_all_close

NUM_STEPS = 3
TOKENS = np.random.default_rng(0).integers(0, 8, (NUM_STEPS, 2, 4, 6))


class Decoder(nn.Module):
    """Embedding, a layer, and logits; `says` has them meet the mesh."""

    says: bool

    @nn.compact
    def __call__(self, tokens):
        normal = nn.initializers.normal(0.5)
        lies = nn.with_partitioning if self.says else lambda init, names: init
        x = nn.Embed(8, 4, embedding_init=lies(normal, (None, "data")))(tokens)
        if self.says:
            x = jax.lax.with_sharding_constraint(x, P("data"))
            x = nn.with_logical_constraint(x, ("batch", None, None))
        x = x + nn.tanh(nn.Dense(4, kernel_init=lies(normal, ("data", None)))(x))
        return nn.Dense(8, kernel_init=lies(normal, (None, "data")), use_bias=False)(x)


def train(says, data, boxed=True):
    """Returns the trained parameters of both regions, unboxed."""
    model = Decoder(says)
    mesh = cc.make_mesh(2, data=data)
    rules = [("batch", "data")]

    def loss_fn(params, tokens, key):
        with nn.logical_axis_rules(rules):
            logits = model.apply(params, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean(), {"longest": losses.max()}

    # Without a mesh a constraint has no meaning: parameters are made by the plain one.
    params = Decoder(False).init(jax.random.key(0), TOKENS[0, 0])
    if says and boxed:
        with jax.set_mesh(mesh):
            shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS[0, 0])
        params = jax.tree.map(
            lambda box, x: box.replace_boxed(x) if nn.meta.is_axis_metadata(box) else x,
            shapes,
            params,
            is_leaf=nn.meta.is_axis_metadata,
        )
    specs = nn.get_partition_spec(params) if says and boxed else None
    optimizer = optax.MultiSteps(optax.adamw(0.01), 1)
    program = cc.RegionProgram(
        loss_fn, optimizer, "apart", params, 2, mesh=mesh, param_specs=specs
    )
    # People keep a mesh set around a whole training loop.
    with jax.set_mesh(mesh) if says else contextlib.nullcontext():
        state = program.init(params, jax.random.key(0))
        state, _ = program.advance(state, TOKENS)
    return jax.device_get(nn.meta.unbox(state.region.params))


@pytest.fixture(scope="module")
def plain():
    return train(says=False, data=1)


@pytest.mark.parametrize(
    ("data", "boxed"),
    [(1, True), pytest.param(2, True, marks=pytest.mark.slow), (2, False)],
)
def test_a_model_that_meets_the_mesh_trains_as_one_that_does_not(plain, data, boxed):
    found = train(says=True, data=data, boxed=boxed)
    assert_all_close(found, plain, rtol=1e-4, atol=1e-5)
