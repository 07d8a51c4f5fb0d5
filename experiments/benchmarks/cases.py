"""Cases: a model with its data, optimizer and interval, for every contender.

One is a small GPT in plain JAX, which any framework can train unchanged. Like GPT-2
(Radford et al., 2019) it has learned positions, LayerNorm before attention and
feed-forward, GELU, and a head tied to the embedding; its matrices have no biases.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cocodc_jax import models
from cocodc_jax.run.config.presets import PRESETS

PyTree = Any
Params = dict[str, Any]
Tensor = Any

GPT = "gpt"
CASES = (GPT, *PRESETS)
OUTER_LR = 0.7
OUTER_MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class Gpt:
    """The shape of the model; 0.84 million parameters by default."""

    vocab_size: int = 256  # V.
    length: int = 128  # L, tokens of a sequence.
    width: int = 128  # D.
    num_layers: int = 4
    num_heads: int = 4  # Attention heads, each of `width // num_heads` features.

    def init(self, key: jax.Array) -> Params:
        """Initialize the parameters, normal with standard deviation 0.02."""
        keys = iter(jax.random.split(key, 2 + 4 * self.num_layers))

        def normal(*shape: int) -> jax.Array:
            return 0.02 * jax.random.normal(next(keys), shape)

        def norm() -> dict[str, jax.Array]:
            return {"scale": jnp.ones(self.width), "bias": jnp.zeros(self.width)}

        width = self.width
        blocks = {
            str(layer): {
                "attention_norm": norm(),
                "attention": normal(width, 3 * width),
                "output": normal(width, width),
                "mlp_norm": norm(),
                "up": normal(width, 4 * width),
                "down": normal(4 * width, width),
            }
            for layer in range(self.num_layers)
        }

        return {
            "embedding": normal(self.vocab_size, width),
            "positions": normal(self.length, width),
            "blocks": blocks,
            "norm": norm(),
        }

    def loss_fn(self) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
        """Return `loss_fn(params, tokens, key) -> (loss, {})`; tokens are `[B, L + 1]`.

        The loss is the mean in nats per token; the key is not used.
        """

        def loss_fn(params: Params, tokens: jax.Array, key: jax.Array):
            del key
            x_BLD = params["embedding"][tokens[:, :-1]] + params["positions"][None]
            for layer in range(self.num_layers):
                block = params["blocks"][str(layer)]
                x_BLD = x_BLD + self._attention(block, x_BLD)
                hidden = _norm(x_BLD, block["mlp_norm"]) @ block["up"]
                x_BLD = x_BLD + jax.nn.gelu(hidden) @ block["down"]

            logits = _norm(x_BLD, params["norm"]) @ params["embedding"].T
            loss_of = optax.softmax_cross_entropy_with_integer_labels
            return loss_of(logits, tokens[:, 1:]).mean(), {}

        return loss_fn

    def _attention(self, block: Params, x_BLD: jax.Array) -> jax.Array:
        joined = _norm(x_BLD, block["attention_norm"]) @ block["attention"]
        heads = (*x_BLD.shape[:2], self.num_heads, -1)
        query, key, value = (
            part.reshape(heads) for part in jnp.split(joined, 3, axis=-1)
        )
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return mixed.reshape(x_BLD.shape) @ block["output"]


def _norm(x: jax.Array, params: Params) -> jax.Array:
    mean = x.mean(axis=-1, keepdims=True)
    variance = x.var(axis=-1, keepdims=True)
    scale = params["scale"][None, None]
    bias = params["bias"][None, None]
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + bias


def torch_loss(gpt: Gpt, params: Params, tokens: Tensor) -> Tensor:
    """Return the loss of `Gpt.loss_fn` by PyTorch, of tokens int64 `[B, L + 1]`."""
    from torch.nn import functional  # pyright: ignore[reportMissingImports]

    def norm(x_BLD: Tensor, part: Params) -> Tensor:
        width = x_BLD.shape[-1:]
        return functional.layer_norm(x_BLD, width, part["scale"], part["bias"])

    x_BLD = params["embedding"][tokens[:, :-1]] + params["positions"]
    for layer in range(gpt.num_layers):
        block = params["blocks"][str(layer)]
        joined = norm(x_BLD, block["attention_norm"]) @ block["attention"]
        heads = joined.view(*x_BLD.shape[:2], 3, gpt.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        mixed_BLD = mixed.transpose(1, 2).reshape(x_BLD.shape)
        x_BLD = x_BLD + mixed_BLD @ block["output"]
        hidden = norm(x_BLD, block["mlp_norm"]) @ block["up"]
        hidden = functional.gelu(hidden, approximate="tanh")
        x_BLD = x_BLD + hidden @ block["down"]

    logits = norm(x_BLD, params["norm"]) @ params["embedding"].T
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@dataclasses.dataclass(frozen=True)
class Case:
    """The training that every contender does."""

    name: str
    loss_fn: Callable  # `(params, batch, key) -> (loss, aux)` of one region.
    optimizer: optax.GradientTransformation
    params: PyTree  # One region's initial parameters.
    # Batches of one turn, int32 `[T, R, B, L + 1]`; a turn is one interval, H = T.
    batches: np.ndarray
    # The GPT's shape, for contenders that implement it themselves; None for presets.
    gpt: Gpt | None = None

    @property
    def interval(self) -> int:
        """H, steps of a turn."""
        return self.batches.shape[0]

    @property
    def regions(self) -> int:
        """R, regions that train."""
        return self.batches.shape[1]

    @property
    def tokens(self) -> int:
        """Tokens that all regions train on in a turn."""
        interval, regions, batch, length = self.batches.shape
        return interval * regions * batch * (length - 1)


def make_case(
    name: str, regions: int, interval: int, num_layers: int | None = None
) -> Case:
    """Build the case of a name of `CASES`."""
    if name == GPT:
        gpt = Gpt() if num_layers is None else Gpt(num_layers=num_layers)
        sizes = (interval, regions, 8, gpt.length + 1)
        params = gpt.init(jax.random.key(0))
        batches = _tokens(gpt.vocab_size, sizes)
        return Case(name, gpt.loss_fn(), optax.adamw(1e-3), params, batches, gpt)
    config = PRESETS[name]
    model = config.model
    data = config.data
    # As in a run of the preset with one device per region.
    platform = jax.default_backend()
    backward = models.backward.choose(model.backward, platform, False, False)
    model = dataclasses.replace(model, backward=backward)
    if num_layers is not None:
        model = dataclasses.replace(model, num_layers=num_layers, scan_layers=True)
    sizes = (interval, regions, data.batch_per_region, data.sequence_length + 1)
    params = models.init_params(model, jax.random.key(0))
    optimizer = config.optimizer.build(10**6)
    batches = _tokens(model.vocab_size, sizes)

    return Case(name, models.make_loss_fn(model), optimizer, params, batches)


def _tokens(vocab_size: int, sizes: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab_size, sizes, np.int32)
