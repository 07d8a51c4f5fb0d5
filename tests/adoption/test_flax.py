"""Flax models: kernels with partitioning metadata, and running statistics."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from nanodo.model import DoConfig, TransformerDo

import cocodc_jax as cc
from tests.numerics import assert_all_close

WIDTH = 8
HEADS = 2
VOCABULARY = 7
NUM_STEPS = 4
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (NUM_STEPS, 2, 4, 6))
normal = nn.initializers.normal(0.5)
boxed = nn.with_partitioning
logical = nn.with_logical_partitioning


class Decoder(nn.Module):
    """Embedding, a layer, and logits; `annotated` names mesh axes in all of them."""

    annotated: bool

    @nn.compact
    def __call__(self, tokens):
        divided = boxed if self.annotated else lambda init, names: init
        x = nn.Embed(8, 4, embedding_init=divided(normal, (None, "data")))(tokens)
        if self.annotated:
            x = jax.lax.with_sharding_constraint(x, P("data"))
            x = nn.with_logical_constraint(x, ("batch", None, None))
        x = x + nn.tanh(nn.Dense(4, kernel_init=divided(normal, ("data", None)))(x))
        return nn.Dense(8, kernel_init=divided(normal, (None, "data")), use_bias=False)(
            x
        )


def loss_of(model):
    def loss_fn(params, tokens, key):
        logits = model.apply(params, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean(), {"longest": losses.max()}

    return loss_fn


def train(annotated, data, is_boxed=True):
    """Train two regions; return the parameters of both, unboxed."""
    model = Decoder(annotated)
    mesh = cc.make_mesh(2, data=data)

    def loss_fn(*arguments):
        with nn.logical_axis_rules([("batch", "data")]):
            return loss_of(model)(*arguments)

    # Without a mesh a constraint has no meaning: parameters are made by the plain one.
    params = jax.jit(Decoder(False).init)(jax.random.key(0), TOKENS[0, 0])
    if annotated and is_boxed:
        with jax.set_mesh(mesh):
            shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS[0, 0])
        params = jax.tree.map(
            lambda box, x: box.replace_boxed(x) if nn.meta.is_axis_metadata(box) else x,
            shapes,
            params,
            is_leaf=nn.meta.is_axis_metadata,
        )

    specs = nn.get_partition_spec(params) if annotated and is_boxed else None
    optimizer = optax.MultiSteps(optax.adamw(0.01), 1)
    program = cc.RegionProgram(
        loss_fn, optimizer, "apart", params, 2, mesh=mesh, param_specs=specs
    )

    # Users keep a mesh set around a training loop.
    with jax.set_mesh(mesh) if annotated else contextlib.nullcontext():
        state = program.init(params, jax.random.key(0))
        state, _ = program.advance(state, TOKENS)

    return jax.device_get(nn.meta.unbox(state.region.params))


@pytest.fixture(scope="module")
def plain():
    return train(annotated=False, data=1)


@pytest.mark.parametrize(
    ("data", "is_boxed"),
    [(1, True), pytest.param(2, True, marks=pytest.mark.slow), (2, False)],
)
def test_a_model_with_sharding_annotations_trains_as_one_without(plain, data, is_boxed):
    params = train(annotated=True, data=data, is_boxed=is_boxed)
    assert_all_close(params, plain, rtol=1e-4, atol=1e-5)


# --- Models that train by themselves, where no mesh is in context ---
# Flax puts a constraint on a boxed kernel wherever a mesh is in context, and
# `nn.DenseGeneral` makes its kernel flat first: they must train here.

NANODO = TransformerDo(DoConfig(D=WIDTH, H=HEADS, L=6, N=1, V=VOCABULARY, F=WIDTH))


class Attention(nn.Module):
    """Flax's attention; its axes are in no mesh here."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        kernel = boxed(normal, ("fsdp", "tensor", None))
        x += nn.MultiHeadDotProductAttention(HEADS, kernel_init=kernel)(x)
        return nn.Dense(VOCABULARY)(x)


class Einsum(nn.Module):
    """Logical axes, with no rules and no mesh to resolve them."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        kernel = logical(normal, ("embed", "heads", "kv"))
        x = nn.Einsum((WIDTH, 2, 3), "...d,dhk->...hk", kernel_init=kernel)(x)
        return nn.DenseGeneral(
            VOCABULARY, (-2, -1), kernel_init=logical(normal, ("heads", "kv", "vocab"))
        )(x)


class Layer(nn.Module):
    """A layer for a scan, rematerialized."""

    @nn.compact
    def __call__(self, x, _):
        kernel = boxed(normal, ("fsdp", None, None))
        y = nn.DenseGeneral((2, WIDTH // 2), kernel_init=kernel)(x)
        return x + y.reshape(x.shape), None


class Scanned(nn.Module):
    """A stack of layers in one scan."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        layers = nn.scan(
            nn.remat(Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = layers()(x, None)
        return nn.Dense(VOCABULARY)(x)


def alone(loss_fn, optimizer, params):
    """Train the first region's part in a plain loop."""

    @jax.jit
    def step(params, state, batch):
        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            params, batch, jax.random.key(0)
        )
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = optimizer.init(params)
    losses = []

    for batch in TOKENS[:, 0]:
        params, state, loss = step(params, state, batch)
        losses.append(loss)

    return np.stack(losses)


@pytest.mark.parametrize(
    ("model", "unboxed"),
    [
        (NANODO, True),
        pytest.param(NANODO, False, marks=pytest.mark.slow),
        pytest.param(Attention(), False, marks=pytest.mark.slow),
        (Einsum(), False),
        (Scanned(), False),
    ],
)
def test_a_model_trains_in_a_region_as_alone(model, unboxed):
    params = jax.jit(model.init)(jax.random.key(0), TOKENS[0, 0])
    params = nn.unbox(params) if unboxed else params
    loss_fn = loss_of(model)
    optimizer = optax.adam(0.01)

    method = cc.methods.get("diloco", sync_interval=NUM_STEPS)
    mesh = cc.make_mesh(2, data=2, devices=jax.devices()[:4])
    program = cc.RegionProgram(loss_fn, optimizer, method, params, 2, mesh=mesh)

    state = program.init(jax.tree.map(jnp.copy, params), jax.random.key(0))
    _, output = program.advance(state, TOKENS)

    expected = alone(loss_fn, optimizer, params)
    np.testing.assert_allclose(output.losses[:, 0], expected, rtol=1e-5)


# --- Running statistics ---

RNG = np.random.default_rng(0)
X = RNG.normal(3.0, 2.0, (4, 16, 4)).astype(np.float32)  # Regions, batch, features.
BATCH = {"x": X, "y": np.tanh(X.sum(-1, keepdims=True) / 4)}
DILOCO = cc.methods.get("diloco", sync_interval=5, outer_lr=1.0, outer_momentum=0.0)


@pytest.fixture(autouse=True)
def shapes_as_users_have_them():
    with jax.numpy_rank_promotion("allow"):
        yield


class Linen(nn.Module):
    """A layer between batch norm and the output."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(1)(jnp.tanh(nn.Dense(16)(x)))


class Net(nnx.Module):
    """The same as an object."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.hidden = nnx.Linear(4, 16, rngs=rngs)
        self.out = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(self.norm(x))))


class Trained(NamedTuple):
    """A model with running statistics after 40 steps, the last of which is a sync.

    Attributes:
      losses: of each step, their mean over regions.
      of_regions: statistics of each region.
      mean: the running mean of the mean model.
      var: its running variance.
      predict: what the mean model computes with its statistics.
    """

    losses: list[float]
    of_regions: Any
    mean: Any
    var: Any
    predict: Callable | None = None


def train_with_state(loss_fn, params, state):
    """Train four regions; return all losses, the program, and its last state."""
    program = cc.RegionProgram(
        loss_fn, optax.adam(0.02), DILOCO, params, 4, model_state=cc.ModelState(state)
    )
    start = program.init(params, jax.random.key(0))
    steps = list(cc.run_steps(program, start, itertools.repeat(BATCH), 40))

    losses = [output.losses.mean() for _, output in steps]
    last, _ = steps[-1]
    return losses, program, last


def train_linen():
    model = Linen()
    variables = model.init(jax.random.key(0), X[0], train=False)

    def loss_fn(params, batch_stats, batch, key):
        predicted, new = model.apply(
            {"params": params, "batch_stats": batch_stats},
            batch["x"],
            train=True,
            mutable=["batch_stats"],
        )
        loss = jnp.mean((predicted - batch["y"]) ** 2)
        return loss, ({}, new["batch_stats"])

    losses, program, last = train_with_state(
        loss_fn, variables["params"], variables["batch_stats"]
    )
    stats = program.mean_model_state(last)
    trained = {"params": program.mean_params(last), "batch_stats": stats}
    return Trained(
        losses,
        last.region.model_state,
        **stats["BatchNorm_0"],
        predict=lambda x: model.apply(trained, x, train=False),
    )


def train_nnx():
    graph, params, stats = nnx.split(Net(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

    def loss_fn(params, stats, batch, key):
        model = nnx.merge(graph, params, stats)
        loss = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        return loss, ({}, nnx.state(model, nnx.BatchStat))

    losses, program, last = train_with_state(loss_fn, params, stats)
    model = nnx.merge(graph, program.mean_params(last), program.mean_model_state(last))
    model.eval()
    return Trained(
        losses,
        last.region.model_state,
        mean=model.norm.mean[...],
        var=model.norm.var[...],
        predict=model,
    )


@pytest.fixture(scope="module", params=[train_linen, train_nnx])
def trained(request):
    with jax.numpy_rank_promotion("allow"):
        return request.param()


def test_a_model_with_batch_norm_learns(trained):
    assert trained.losses[-1] < trained.losses[0] / 3


def test_regions_have_the_same_statistics_after_a_sync(trained):
    for leaf in jax.tree.leaves(trained.of_regions):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))


def test_statistics_are_plain_means_over_regions(trained):
    """Momentum 0.9 over 40 steps of one batch a region."""
    np.testing.assert_allclose(trained.mean, X.mean(1).mean(0), rtol=0.05)
    np.testing.assert_allclose(trained.var, X.var(1).mean(0), rtol=0.05)


def test_the_mean_model_predicts_with_the_mean_statistics(trained):
    error = trained.predict(X[0]) - BATCH["y"][0]
    assert jnp.mean(error**2) < 0.1
