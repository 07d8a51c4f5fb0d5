"""A LLaMA-style decoder in Flax NNX, used through pure functions.

A block adds to the residual stream x, with n(x) = scale * x / rms(x):

    x <- x + attention(n(x)) W_output        causal, rotary, grouped-query
    x <- x + (silu(n(x) W_gate) * (n(x) W_up)) W_down

Sources: LLaMA (Touvron et al., arXiv 2302.13971, section 2.2) for RMSNorm
(arXiv 1910.07467), SwiGLU (arXiv 2002.05202) and RoPE (arXiv 2104.09864);
grouped-query attention (arXiv 2305.13245); QK-norm (arXiv 2302.05442).

The NNX modules define the parameters and the forward pass. Outside this file a
model is a `TransformerConfig` and a nested dict of float32 arrays:

    embedding [V, D]
    blocks    attention: query, key, value, output, (query_norm, key_norm: scale)
              mlp: gate, up, down
              attention_norm, mlp_norm: scale
    norm      scale [D]
    head      [D, V], absent with tied embeddings

With `scan_layers` every array under `blocks` has a leading layer axis; without,
`blocks` is a dict from layer number to block.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from cocodc_jax._extras import extra
from cocodc_jax.models.attention import ATTENTION, attend
from cocodc_jax.models.config import TransformerConfig
from cocodc_jax.models.layout import WEIGHTS, Layout, lookup, read, shared, write
from cocodc_jax.models.loss import cross_entropy, logits_from_hidden

with extra("train"):
    from flax import nnx

Params = dict[str, Any]
LossFn = Callable[
    [Params, jax.Array, jax.Array], tuple[jax.Array, dict[str, jax.Array]]
]


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last axis, then scales."""

    def __init__(self, width: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise `x`; statistics and product are float32, the result x's dtype."""
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        normed = x32 * jax.lax.rsqrt(mean_square + self.epsilon)
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (normed * scale).astype(x.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(
        self, config: TransformerConfig, rngs: nnx.Rngs, layout: Layout | None = None
    ):
        kv_width = config.num_kv_heads * config.head_width
        self.query = _matrix(rngs, config.width, config.width)
        self.key = _matrix(rngs, config.width, kv_width)
        self.value = _matrix(rngs, config.width, kv_width)
        self.output = _matrix(rngs, config.width, config.width, _residual(config))
        if config.qk_norm:
            self.query_norm = RMSNorm(config.head_width, config.norm_epsilon)
            self.key_norm = RMSNorm(config.head_width, config.norm_epsilon)
        self.config, self.layout = config, layout

    def __call__(self, x_BLD: jax.Array, rotation: tuple[jax.Array, jax.Array]):
        """Attend within each sequence; `rotation` comes from `rotary_tables`."""
        x_BLD = shared(x_BLD, self.layout)
        query_BLHd = self._heads(x_BLD, self.query)
        key_BLHd = self._heads(x_BLD, self.key)
        value_BLHd = self._heads(x_BLD, self.value)
        if self.config.qk_norm:
            query_BLHd = self.query_norm(query_BLHd)
            key_BLHd = self.key_norm(key_BLHd)
        query_BLHd, key_BLHd = (rotate(x, *rotation) for x in (query_BLHd, key_BLHd))
        sequence = None
        if self.layout is not None:
            sequence = self.layout.sequence
            key_BLHd, value_BLHd = map(self.layout.whole, (key_BLHd, value_BLHd))
        mixed_BLHd = attend(
            query_BLHd, key_BLHd, value_BLHd, self.config.attention, sequence
        )
        mixed_BLF = mixed_BLHd.reshape(*x_BLD.shape[:2], -1)
        return write(mixed_BLF, self.output[...], self.layout)

    def _heads(self, x_BLD: jax.Array, kernel: nnx.Param):
        flat = read(x_BLD, kernel[...], self.layout)
        return flat.reshape(*x_BLD.shape[:2], -1, self.config.head_width)


class MLP(nnx.Module):
    """SwiGLU feed-forward."""

    def __init__(
        self, config: TransformerConfig, rngs: nnx.Rngs, layout: Layout | None = None
    ):
        self.gate = _matrix(rngs, config.width, config.mlp_width)
        self.up = _matrix(rngs, config.width, config.mlp_width)
        self.down = _matrix(rngs, config.mlp_width, config.width, _residual(config))
        self.layout = layout

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """Map each position by itself."""
        x_BLD = shared(x_BLD, self.layout)
        gate_BLF = jax.nn.silu(read(x_BLD, self.gate[...], self.layout))
        gated_BLF = gate_BLF * read(x_BLD, self.up[...], self.layout)
        return write(gated_BLF, self.down[...], self.layout)


class Block(nnx.Module):
    """One pre-norm transformer block."""

    def __init__(
        self, config: TransformerConfig, rngs: nnx.Rngs, layout: Layout | None = None
    ):
        self.attention_norm = RMSNorm(config.width, config.norm_epsilon)
        self.attention = Attention(config, rngs, layout)
        self.mlp_norm = RMSNorm(config.width, config.norm_epsilon)
        self.mlp = MLP(config, rngs, layout)

    def __call__(self, x_BLD: jax.Array, rotation: tuple[jax.Array, jax.Array]):
        """Add attention, then the feed-forward, to the residual stream."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rotation)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))


class Transformer(nnx.Module):
    """The decoder up to its last hidden states."""

    def __init__(
        self, config: TransformerConfig, rngs: nnx.Rngs, layout: Layout | None = None
    ):
        vocab, width = config.vocab_size, config.width
        self.embedding = _normal(rngs, (vocab, width), 1 / math.sqrt(width))
        # One key a layer either way, so that both layouts start alike.
        keys = jax.random.split(rngs.params(), config.num_layers)
        if config.scan_layers:
            self.blocks = nnx.vmap(lambda key: Block(config, nnx.Rngs(key), layout))(
                keys
            )
        else:
            self.blocks = nnx.List(
                [Block(config, nnx.Rngs(key), layout) for key in keys]
            )
        self.norm = RMSNorm(width, config.norm_epsilon)
        if not config.tie_embeddings:
            self.head = _matrix(rngs, width, vocab)
        self.config, self.layout = config, layout

    def __call__(self, tokens_BL: jax.Array) -> jax.Array:
        """Return the normed hidden states [B, L, D] in the compute dtype."""
        return self.norm(self.run_blocks(self.embed(tokens_BL)))

    def embed(self, tokens_BL: jax.Array) -> jax.Array:
        """Return what enters the first block, [B, L, D] in the compute dtype."""
        return lookup(
            self.embedding[...], tokens_BL, self.config.compute_dtype, self.layout
        )

    def output_head(self) -> jax.Array:
        """Return the float32 output projection [D, V]; with a layout its own part."""
        if self.config.tie_embeddings:
            return self.embedding[...].T
        return self.head[...]

    def run_blocks(self, x_BLD: jax.Array) -> jax.Array:
        """Pass the residual stream [B, L, D] through all blocks."""
        rotation = self._rotation(x_BLD.shape[1])
        run = _rematerialise(
            lambda graph, params, x: nnx.merge(graph, params)(x, rotation),
            self.config.remat,
            in_scan=self.config.scan_layers,
            is_divided=self.layout is not None,
        )
        if isinstance(self.blocks, nnx.List):
            for block in self.blocks:
                x_BLD = run(*nnx.split(block), x_BLD)
            return x_BLD
        graph, stacked = nnx.split(self.blocks)
        x_BLD, _ = jax.lax.scan(
            lambda x, params: (run(graph, params, x), None), x_BLD, stacked
        )
        return x_BLD

    def _rotation(self, num_own: int) -> tuple[jax.Array, jax.Array]:
        """Return the rotary tables of the device's own positions."""
        sequence = self.layout.sequence if self.layout else None
        length = num_own * (jax.lax.axis_size(sequence) if sequence else 1)
        tables = rotary_tables(length, self.config.head_width, self.config.rope_theta)
        if self.layout is None:
            return tables
        cos, sin = (self.layout.own_part(table, 0) for table in tables)
        return cos, sin


def rotary_tables(
    length: int, head_width: int, theta: float
) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin of each position's angles, float32 [L, head_width / 2].

    Pair i of position t turns by `t * theta ** (-2 i / head_width)`. Computed in
    float64 while tracing, so that the tables are constants of the program.
    """
    frequency = theta ** (-np.arange(0, head_width, 2) / head_width)
    angle = np.outer(np.arange(length), frequency)
    return (
        jnp.asarray(np.cos(angle), jnp.float32),
        jnp.asarray(np.sin(angle), jnp.float32),
    )


def rotate(x_BLHd: jax.Array, cos_Ld: jax.Array, sin_Ld: jax.Array) -> jax.Array:
    """Turn feature pairs (i, i + d / 2) of each head by their position's angle."""
    cos, sin = cos_Ld[None, :, None, :], sin_Ld[None, :, None, :]
    first, second = jnp.split(x_BLHd.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x_BLHd.dtype)


def init_params(config: TransformerConfig, key: jax.Array) -> Params:
    """Draw the parameters: a pure function of `key`, so every region starts alike.

    Matrices are normal with deviation 1/sqrt(fan_in), those that write to the
    residual stream further divided by sqrt(2 num_layers) (GPT-2), the embedding
    1/sqrt(width), norm scales one. Scanned and unscanned models of one key hold
    the same numbers.

    Args:
      config: the model.
      key: a PRNG key.

    Returns:
      The nested dict of float32 arrays described at the top of this file.
    """
    return nnx.to_pure_dict(nnx.state(Transformer(config, nnx.Rngs(key))))


def apply(config: TransformerConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Return float32 logits [B, L, V] for int32 `tokens` [B, L]."""
    model = bind(config, params)
    return logits_from_hidden(model(tokens), model.output_head())


def make_loss_fn(config: TransformerConfig) -> LossFn:
    """Make the language-model loss of one region, on one device.

    `make_divided_loss_fn` is that of several; this one can be compiled for them too,
    if the compiler is to choose what they share.

    Args:
      config: the model.

    Returns:
      `loss_fn(params, tokens, key) -> (loss, aux)` for int32 tokens [B, L + 1]:
      position t predicts token t + 1. The loss is the mean in nats per token, a
      float32 scalar; aux holds `num_tokens` (B * L) and `accuracy`, float32. The
      key is unused: the model draws nothing.
    """

    def loss_fn(params, tokens, key):
        del key
        model = bind(config, params)
        inputs_BL, targets_BL = tokens[:, :-1], tokens[:, 1:]
        loss, accuracy = cross_entropy(
            model(inputs_BL),
            model.output_head(),
            targets_BL,
            config.loss_chunk_tokens,
        )
        num_tokens = jnp.asarray(targets_BL.size, jnp.float32)
        return loss, {"num_tokens": num_tokens, "accuracy": accuracy}

    return loss_fn


def make_outputs(
    config: TransformerConfig, layout: Layout | None = None
) -> tuple[Callable, Callable]:
    """Make the loss in two parts, for Gauss-Newton products: logits, and their loss.

    Args:
      config: the model.
      layout: of parameters that are divided; the compiler then shares out the work.

    Returns:
      `model(params, tokens) -> float32 logits [B, L, V]` and
      `loss(logits, tokens) -> float32 scalar`, convex in the logits; tokens are
      int32 `[B, L + 1]`. Their composition is `make_loss_fn`'s loss, unchunked.
    """

    def model(params: Params, tokens: jax.Array) -> jax.Array:
        if layout is not None:
            # See `sharding.py` on tables that are divided as the tokens are.
            table = jax.lax.with_sharding_constraint(
                params["embedding"], PartitionSpec(layout.model, None)
            )
            params = params | {"embedding": table}
        return apply(config, params, tokens[:, :-1])

    def loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    return model, loss


def num_params(config: TransformerConfig) -> int:
    """Count the parameters without allocating any."""
    shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def flops_per_token(config: TransformerConfig, sequence_length: int) -> float:
    """Return the floating-point operations of one training step per token.

    PaLM's convention (arXiv 2204.02311, appendix B): 6 for every parameter that
    multiplies a token, plus 12 * num_layers * width * sequence_length for
    attention; recomputation is not counted, nor is the causal half left out.
    """
    table = config.vocab_size * config.width
    # A tied table is a head and counts; an untied one has its head beside it.
    num_multiplying = num_params(config) - (0 if config.tie_embeddings else table)
    attention = 12 * config.num_layers * config.width * sequence_length
    return float(6 * num_multiplying + attention)


def bind(
    config: TransformerConfig, params: Params, layout: Layout | None = None
) -> Transformer:
    """Return the module that computes with `params`, for use while tracing."""
    return nnx.merge(_graph(config, layout), params)


@functools.cache
def _graph(config: TransformerConfig, layout: Layout | None):
    make = functools.partial(Transformer, config, layout=layout)
    return nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))


def _matrix(rngs: nnx.Rngs, fan_in: int, fan_out: int, gain: float = 1.0) -> nnx.Param:
    return _normal(rngs, (fan_in, fan_out), gain / math.sqrt(fan_in))


def _normal(rngs: nnx.Rngs, shape: tuple[int, int], stddev: float) -> nnx.Param:
    return nnx.Param(stddev * jax.random.normal(rngs.params(), shape, jnp.float32))


def _residual(config: TransformerConfig) -> float:
    return 1 / math.sqrt(2 * config.num_layers)


def _rematerialise(
    run: Callable, remat: str, in_scan: bool, is_divided: bool
) -> Callable:
    """Wrap `run(graph, params, x)` so that backward recomputes as `remat` says."""
    policies = jax.checkpoint_policies
    if remat == "none" and not is_divided:
        return run
    attention = policies.save_only_these_names(ATTENTION)
    dots = policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(
        run,
        policy={
            # What weights are gathered to is no activation.
            "none": policies.save_anything_except_these_names(WEIGHTS),
            "dots": policies.save_from_both_policies(dots, attention),
            "attention": attention,
            "full": policies.nothing_saveable,
        }[remat],
        # Inside a scan the loop itself keeps XLA from undoing the recomputation.
        prevent_cse=not in_scan,
        static_argnums=0,
    )
