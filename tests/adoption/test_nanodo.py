"""Linen models that say how their kernels are divided, as NanoDO's by default.

Flax puts a constraint on a boxed kernel wherever a mesh is in context, and
`nn.DenseGeneral` makes its kernel flat first: such models train by themselves, where no
mesh is, and must train here.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from nanodo.model import DoConfig, TransformerDo

import cocodc_jax as cc

WIDTH, HEADS, VOCABULARY = 8, 2, 7
NUM_STEPS = 4
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (NUM_STEPS, 2, 4, 6))
normal = nn.initializers.normal(0.5)
NANODO = TransformerDo(DoConfig(D=WIDTH, H=HEADS, L=6, N=1, V=VOCABULARY, F=WIDTH))
boxed = nn.with_partitioning
logical = nn.with_logical_partitioning


class Attention(nn.Module):
    """Flax's own attention; axes that no mesh here has."""

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
    state, losses = optimizer.init(params), []
    for batch in TOKENS[:, 0]:
        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            params, batch, jax.random.key(0)
        )
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(loss)
    return np.stack(losses)


@pytest.mark.parametrize(
    ("model", "unboxed"),
    [
        (NANODO, True),
        (NANODO, False),
        (Attention(), False),
        (Einsum(), False),
        (Scanned(), False),
    ],
)
def test_a_model_that_trains_by_itself_trains_here(model, unboxed):
    params = model.init(jax.random.key(0), TOKENS[0, 0])
    params = nn.unbox(params) if unboxed else params

    def loss_fn(params, tokens, key):
        logits = model.apply(params, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean(), {}

    optimizer = optax.adam(0.01)
    method = cc.methods.get("diloco", sync_interval=NUM_STEPS)
    mesh = cc.make_mesh(2, data=2, devices=jax.devices()[:4])
    program = cc.RegionProgram(loss_fn, optimizer, method, params, 2, mesh=mesh)
    state = program.init(jax.tree.map(jnp.copy, params), jax.random.key(0))
    _, output = program.advance(state, TOKENS)
    expected = alone(loss_fn, optimizer, params)
    np.testing.assert_allclose(output.losses[:, 0], expected, rtol=1e-5)
