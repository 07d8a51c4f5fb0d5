"""One block of a LLaMA-style decoder, in Flax NNX.

A block adds to the residual stream x, with n(x) = scale * x / rms(x):

    x <- x + attention(n(x)) W_output        causal, rotary, grouped-query
    x <- x + (silu(n(x) W_gate) * (n(x) W_up)) W_down

Sources: LLaMA (Touvron et al., arXiv 2302.13971, section 2.2) for RMSNorm
(arXiv 1910.07467), SwiGLU (arXiv 2002.05202) and RoPE (arXiv 2104.09864);
grouped-query attention (arXiv 2305.13245); QK-norm (arXiv 2302.05442); LoRA, thin
products that are added to those with matrices (Hu et al., arXiv 2106.09685). A block
may have a mixture of experts in place of its feed-forward (`experts.py`), and next to
it a feed-forward of `shared` experts for every token; both are added.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax._extras import extra
from cocodc_jax.models.attention import attend
from cocodc_jax.models.backward import PLAIN, spread
from cocodc_jax.models.config import TransformerConfig
from cocodc_jax.models.drawn import matrix
from cocodc_jax.models.experts import MixtureOfExperts, Routed
from cocodc_jax.models.layout import Adapter, Layout, read, shared, write

with extra("train"):
    from flax import nnx


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last axis, then scales."""

    def __init__(self, width: int, epsilon: float, backward: str = PLAIN):
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.epsilon, self.backward = epsilon, backward

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise `x`; statistics and product are float32, the result x's dtype."""
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        inverse = jax.lax.rsqrt(mean_square + self.epsilon)
        normed = x32 * spread(inverse, x.shape[-1], self.backward)
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (normed * scale).astype(x.dtype)


class Thin(nnx.Module):
    """Two thin matrices whose product is added to a matrix, zero at first."""

    def __init__(self, rngs: nnx.Rngs, like: nnx.Param, rank: int):
        fan_in, fan_out = like.shape
        self.a = matrix(rngs, fan_in, rank)
        self.b = nnx.Param(jnp.zeros((rank, fan_out), jnp.float32))


class Multiplying(nnx.Module):
    """A module whose matrices may have adapters."""

    def adapt(
        self, config: TransformerConfig, rngs: nnx.Rngs, layout: Layout | None
    ) -> None:
        """Add adapters to those of the module's matrices that are to have some."""
        self.config, self.layout = config, layout
        found = {name: getattr(self, name, None) for name in config.lora_names}
        if found := {name: x for name, x in found.items() if x is not None}:
            self.lora = nnx.Dict(
                {name: Thin(rngs, x, config.lora_rank) for name, x in found.items()}
            )

    def times(self, multiply: Callable, x: jax.Array, name: str) -> jax.Array:
        """Multiply by a matrix, by `read` or `write`."""
        config, adapter = self.config, None
        if name in config.lora_names:
            thin = self.lora[name]
            adapter = Adapter(thin.a[...], thin.b[...], config.lora_scale)
        w = getattr(self, name)[...]
        return multiply(x, w, self.layout, config.backward, adapter)


class Attention(Multiplying):
    """Causal grouped-query attention with rotary positions."""

    def __init__(
        self, config: TransformerConfig, rngs: nnx.Rngs, layout: Layout | None = None
    ):
        kv_width = config.num_kv_heads * config.head_width
        self.query = matrix(rngs, config.width, config.width)
        self.key = matrix(rngs, config.width, kv_width)
        self.value = matrix(rngs, config.width, kv_width)
        self.output = matrix(rngs, config.width, config.width, gain=_residual(config))
        if config.qk_norm:
            self.query_norm = norm(config, config.head_width)
            self.key_norm = norm(config, config.head_width)
        self.adapt(config, rngs, layout)

    def __call__(self, x_BLD: jax.Array, rotation: tuple[jax.Array, jax.Array]):
        """Attend within each sequence; `rotation` comes from `rotary_tables`."""
        x_BLD = shared(x_BLD, self.layout)
        query_BLHd = self._heads(x_BLD, "query")
        key_BLHd = self._heads(x_BLD, "key")
        value_BLHd = self._heads(x_BLD, "value")
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
        return self.times(write, mixed_BLF, "output")

    def _heads(self, x_BLD: jax.Array, name: str):
        flat = self.times(read, x_BLD, name)
        return flat.reshape(*x_BLD.shape[:2], -1, self.config.head_width)


class MLP(Multiplying):
    """SwiGLU feed-forward."""

    def __init__(
        self,
        config: TransformerConfig,
        rngs: nnx.Rngs,
        layout: Layout | None = None,
        mlp_width: int = 0,
    ):
        mlp_width = mlp_width or config.mlp_width
        self.gate = matrix(rngs, config.width, mlp_width)
        self.up = matrix(rngs, config.width, mlp_width)
        self.down = matrix(rngs, mlp_width, config.width, gain=_residual(config))
        self.adapt(config, rngs, layout)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """Map each position by itself."""
        x_BLD = shared(x_BLD, self.layout)
        gate_BLF = jax.nn.silu(self.times(read, x_BLD, "gate"))
        gated_BLF = gate_BLF * self.times(read, x_BLD, "up")
        return self.times(write, gated_BLF, "down")


class Block(nnx.Module):
    """One pre-norm transformer block."""

    def __init__(
        self,
        config: TransformerConfig,
        rngs: nnx.Rngs,
        layout: Layout | None = None,
        has_experts: bool = False,
    ):
        self.attention_norm = norm(config, config.width)
        self.attention = Attention(config, rngs, layout)
        self.mlp_norm = norm(config, config.width)
        self.has_experts = has_experts
        if not has_experts:
            self.mlp = MLP(config, rngs, layout)
            return
        self.moe = MixtureOfExperts(config, rngs, _residual(config), layout)
        if config.shared_experts:
            width = config.shared_experts * config.expert_width
            self.shared = MLP(config, rngs, layout, width)

    def __call__(
        self, x_BLD: jax.Array, rotation: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[Routed, ...]]:
        """Add attention, then the feed-forward, to the residual stream."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rotation)
        normed_BLD = self.mlp_norm(x_BLD)
        if not self.has_experts:
            return x_BLD + self.mlp(normed_BLD), ()
        mixed_BLD, routed = self.moe(normed_BLD)
        if hasattr(self, "shared"):
            mixed_BLD = mixed_BLD + self.shared(normed_BLD)
        return x_BLD + mixed_BLD, (routed,)


class Group(nnx.Module):
    """Blocks of which the last has experts: what is scanned where not all have."""

    def __init__(
        self, config: TransformerConfig, keys: jax.Array, layout: Layout | None = None
    ):
        self.names = tuple(f"layer_{i}" for i in range(config.moe_every))
        for i, name in enumerate(self.names):
            rngs = nnx.Rngs(keys[i])
            setattr(self, name, Block(config, rngs, layout, config.has_experts(i)))

    def __call__(self, x_BLD: jax.Array, rotation: tuple[jax.Array, jax.Array]):
        """Pass the residual stream through the blocks; see `Block`."""
        routed = ()
        for name in self.names:
            x_BLD, routed = getattr(self, name)(x_BLD, rotation)
        return x_BLD, routed


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


def norm(config: TransformerConfig, width: int) -> RMSNorm:
    """Return a norm of the last `width` features, as the model has them."""
    return RMSNorm(width, config.norm_epsilon, config.backward)


def _residual(config: TransformerConfig) -> float:
    return 1 / math.sqrt(2 * config.num_layers)
