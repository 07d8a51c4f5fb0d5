"""A LLaMA-style decoder in Flax NNX, used through pure functions.

`block.py` has the blocks. Outside these two files a model is a `TransformerConfig` and
a nested dict of float32 arrays:

    embedding [V, D]
    blocks    attention: query, key, value, output, (query_norm, key_norm: scale)
              mlp: gate, up, down
              both with adapters: lora: NAME: a, b (`lora.py`)
              attention_norm, mlp_norm: scale
              moe: router, experts: gate, up, down, tokens (`experts.py`), and shared:
              gate, up, down, in place of mlp where a block has experts
    norm      scale [D]
    head      [D, V], absent with tied embeddings

With `scan_layers` every array under `blocks` has a leading layer axis; without,
`blocks` is a dict from layer number to block. If only every n-th block has experts, n
blocks are scanned as one: `blocks/layer_0` to `layer_{n - 1}` are stacks of groups.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from cocodc_jax._extras import extra
from cocodc_jax.models.attention import ATTENTION
from cocodc_jax.models.block import Block, Group, RMSNorm, rotary_tables
from cocodc_jax.models.config import TransformerConfig
from cocodc_jax.models.drawn import matrix, normal
from cocodc_jax.models.experts import Routed, router_aux, router_loss
from cocodc_jax.models.layout import WEIGHTS, Layout, lookup
from cocodc_jax.models.loss import cross_entropy, logits_from_hidden

with extra("train"):
    from flax import nnx

Params = dict[str, Any]
# The input of a block's backward pass, which a policy may keep in host memory.
BLOCK_INPUT = "block_input"
LossFn = Callable[
    [Params, jax.Array, jax.Array], tuple[jax.Array, dict[str, jax.Array]]
]


class Transformer(nnx.Module):
    """The decoder up to its last hidden states."""

    def __init__(
        self, config: TransformerConfig, rngs: nnx.Rngs, layout: Layout | None = None
    ):
        vocab = config.vocab_size
        width = config.width
        self.embedding = normal(rngs, (vocab, width), 1 / math.sqrt(width))
        # One key a layer either way, so that both layouts start with equal values.
        keys = jax.random.split(rngs.params(), config.num_layers)

        def block(layer: int, key: jax.Array):
            return Block(config, nnx.Rngs(key), layout, config.has_experts(layer))

        if config.scan_layers and config.num_experts and config.moe_every > 1:
            groups = keys.reshape(-1, config.moe_every)
            self.blocks = nnx.vmap(lambda keys: Group(config, keys, layout))(groups)
        elif config.scan_layers:
            self.blocks = nnx.vmap(functools.partial(block, 0))(keys)
        else:
            self.blocks = nnx.List([block(i, key) for i, key in enumerate(keys)])

        self.norm = RMSNorm(config, width)
        if not config.tie_embeddings:
            self.head = matrix(rngs, width, vocab)
        self.config = config
        self.layout = layout

    def __call__(self, tokens_BL: jax.Array) -> tuple[jax.Array, Routed | None]:
        """Return the normed hidden states [B, L, D], and the routing of all blocks."""
        x_BLD, routed = self.run_blocks(self.embed(tokens_BL))
        return self.norm(x_BLD), routed

    def embed(self, tokens_BL: jax.Array) -> jax.Array:
        """Return the first block's input, [B, L, D] in the compute dtype."""
        return lookup(
            self.embedding[...], tokens_BL, self.config.compute_dtype, self.layout
        )

    def output_head(self) -> jax.Array:
        """Return the float32 output projection [D, V]; with a layout, this device's."""
        if self.config.tie_embeddings:
            return self.embedding[...].T
        return self.head[...]

    def run_blocks(self, x_BLD: jax.Array) -> tuple[jax.Array, Routed | None]:
        """Pass the residual stream [B, L, D] through all blocks.

        The second result is a `Routed`, leaves `[layers with experts, ...]`.
        """
        # Rotary tables of the device's own positions.
        layout = self.layout
        length = x_BLD.shape[1]
        if layout and layout.sequence:
            length *= jax.lax.axis_size(layout.sequence)

        cos, sin = rotary_tables(length, self.config.head_width, self.config.rope_theta)
        if layout:
            cos = layout.own_part(cos, 0)
            sin = layout.own_part(sin, 0)

        run = _rematerialise(
            lambda graph, params, x: nnx.merge(graph, params)(
                checkpoint_name(x, BLOCK_INPUT), (cos, sin)
            ),
            self.config.remat,
            in_scan=self.config.scan_layers,
            is_divided=layout is not None,
        )

        if isinstance(self.blocks, nnx.List):
            of_layers: list[Routed] = []
            for block in self.blocks:
                graph, params = nnx.split(block)
                x_BLD, routed = run(graph, params, x_BLD)
                of_layers += routed
            if not of_layers:
                return x_BLD, None
            return x_BLD, jax.tree.map(lambda *x: jnp.stack(x), *of_layers)

        graph, stacked = nnx.split(self.blocks)
        x_BLD, routed = jax.lax.scan(
            lambda x, params: run(graph, params, x), x_BLD, stacked
        )
        return x_BLD, routed[0] if routed else None


def init_params(config: TransformerConfig, key: jax.Array) -> Params:
    """Draw the parameters: a pure function of `key`, so every region starts equal.

    Matrices are normal with deviation 1/sqrt(fan_in), those that write to the
    residual stream further divided by sqrt(2 num_layers) (GPT-2), the embedding
    1/sqrt(width), norm scales one. Scanned and unscanned models of one key hold
    the same numbers.
    """
    return nnx.to_pure_dict(nnx.state(Transformer(config, nnx.Rngs(key))))


def apply(config: TransformerConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Return float32 logits [B, L, V] for int32 `tokens` [B, L]."""
    model = bind(config, params)
    return logits_from_hidden(model(tokens)[0], model.output_head())


def make_loss_fn(config: TransformerConfig) -> LossFn:
    """Make the language-model loss of one region, on one device or as XLA divides it.

    Returns:
      `loss_fn(params, tokens, key) -> (loss, aux)` for int32 tokens [B, L + 1]:
      position t predicts token t + 1. The loss is the mean in nats per token, a
      float32 scalar; aux holds `num_tokens` (B * L) and `accuracy`, float32, and with
      experts what `experts.router_aux` reports. Losses of routers add to the gradient
      alone. The key is unused: the model draws nothing.
    """

    def loss_fn(
        params: Params, tokens: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        del key
        model = bind(config, params)
        inputs_BL = tokens[:, :-1]
        targets_BL = tokens[:, 1:]
        hidden_BLD, routed = model(inputs_BL)
        loss, accuracy = cross_entropy(
            hidden_BLD,
            model.output_head(),
            targets_BL,
            chunk_tokens=config.loss_chunk_tokens,
            backward=config.backward,
        )

        num_tokens = jnp.asarray(targets_BL.size, jnp.float32)
        aux = {"num_tokens": num_tokens, "accuracy": accuracy}
        if routed is not None:
            return loss + router_loss(config, routed), aux | router_aux(routed)
        return loss, aux

    return loss_fn


def make_outputs(
    config: TransformerConfig, layout: Layout | None = None
) -> tuple[Callable, Callable]:
    """Make the loss in two parts, for Gauss-Newton products: logits, and their loss.

    They are `model(params, tokens) -> float32 logits [B, L, V]` and
    `loss(logits, tokens) -> float32 scalar`; tokens are int32 `[B, L + 1]`. Together
    they are `make_loss_fn`'s loss, unchunked and in plain operations, because
    Gauss-Newton products need forward mode. With a layout the compiler divides the
    work.
    """
    config = dataclasses.replace(
        config, attention="plain", backward="plain", expert_dispatch="blocks"
    )

    def model(params: Params, tokens: jax.Array) -> jax.Array:
        if layout is not None:
            # See `sharding.py` on tables that are divided as the tokens are.
            table = jax.lax.with_sharding_constraint(
                params["embedding"], PartitionSpec(layout.model, None)
            )
            params = params | {"embedding": table}
        return apply(config, params, tokens[:, :-1])

    def loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
        losses = optax.losses.softmax_cross_entropy_with_integer_labels
        return losses(logits, tokens[:, 1:]).mean()

    return model, loss


@functools.cache
def num_params(config: TransformerConfig) -> int:
    """Count the parameters without allocating any."""
    shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def flops_per_token(config: TransformerConfig, sequence_length: int) -> float:
    """Return the floating-point operations of one training step per token.

    PaLM's convention (arXiv 2204.02311, appendix B): 6 for every parameter that
    multiplies a token, 4 if it is frozen, plus 12 * num_layers * width *
    sequence_length for attention. Recomputation does not count, and the masked half of
    attention does. Of the experts, those of a token count.
    """
    # A tied table is a head and counts; an untied one has its head beside it.
    table = 0 if config.tie_embeddings else config.vocab_size * config.width
    attention = 12 * config.num_layers * config.width * sequence_length
    idle = config.num_moe_layers * (config.num_experts - config.experts_per_token)
    idle *= 3 * config.width * config.expert_width
    frozen = 0
    if config.lora_rank:
        frozen = num_params(dataclasses.replace(config, lora_rank=0)) - table - idle
    return float(6 * (num_params(config) - table - idle) - 2 * frozen + attention)


def bind(
    config: TransformerConfig, params: Params, layout: Layout | None = None
) -> Transformer:
    """Return the module that computes with `params`, for use while tracing."""
    return nnx.merge(_graph(config, layout), params)


@functools.cache
def _graph(config: TransformerConfig, layout: Layout | None):
    make = functools.partial(Transformer, config, layout=layout)
    return nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))


def _rematerialise(
    run: Callable, remat: str, in_scan: bool, is_divided: bool
) -> Callable:
    """Wrap `run(graph, params, x)` so that backward recomputes according to `remat`."""
    if remat == "none" and not is_divided:
        return run

    policies = jax.checkpoint_policies
    attention = policies.save_only_these_names(ATTENTION)
    by_name = {
        # Gathered weights are not activations.
        "none": policies.save_anything_except_these_names(WEIGHTS),
        "dots": policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, attention
        ),
        "attention": attention,
        "full": policies.nothing_saveable,
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[BLOCK_INPUT, ATTENTION],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }
    return jax.checkpoint(
        run,
        policy=by_name[remat],
        # Inside a scan the loop itself keeps XLA from undoing the recomputation.
        prevent_cse=not in_scan,
        static_argnums=0,
    )
