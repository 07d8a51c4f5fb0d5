"""One block of a LLaMA-style decoder, in Flax NNX.

A block adds to the residual stream x, with n(x) = scale * x / rms(x):

    x <- x + attention(n(x)) W_output        causal, rotary, grouped-query
    x <- x + (silu(n(x) W_gate) * (n(x) W_up)) W_down

Sources: LLaMA (Touvron et al., arXiv 2302.13971, section 2.2) for RMSNorm
(arXiv 1910.07467), SwiGLU (arXiv 2002.05202) and RoPE (arXiv 2104.09864);
grouped-query attention (arXiv 2305.13245); QK-norm (arXiv 2302.05442); LoRA, low-rank
products that are added to those of matrices (Hu et al., arXiv 2106.09685). A block may
have a mixture of experts in place of its feed-forward (`experts.py`), and with it a
feed-forward of `shared` experts for every token; their results are added.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax._extras import extra
from cocodc_jax.models.attention import attend
from cocodc_jax.models.backward import spread
from cocodc_jax.models.config import WRITERS, TransformerConfig
from cocodc_jax.models.drawn import matrix
from cocodc_jax.models.experts import MixtureOfExperts, Routed
from cocodc_jax.models.layout import Layout, multiply, shared, summed

with extra("train"):
    from flax import nnx


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last axis, then scales."""

    def __init__(self, config: TransformerConfig, width: int):
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.epsilon = config.norm_epsilon
        self.backward = config.backward

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
        """Add adapters to the matrices of the module that the configuration names."""
        self.config = config
        self.layout = layout
        thin = {
            name: Thin(rngs, getattr(self, name), config.lora_rank)
            for name in config.lora_names
            if hasattr(self, name)
        }
        if thin:
            self.lora = nnx.Dict(thin)

    def times(self, x: jax.Array, name: str) -> jax.Array:
        """Multiply by a matrix; those of `WRITERS` sum over the model axis."""
        config = self.config
        layout = self.layout
        is_writer = name in WRITERS
        times = functools.partial(
            multiply, side=int(is_writer), backward=config.backward
        )
        out = times(x, getattr(self, name)[...], layout)
        if name in config.lora_names:
            # Data divides the residual width alone, one side of one thin matrix.
            reader, writer = (None, layout) if is_writer else (layout, None)
            low = times(x, self.lora[name].a[...], reader)
            out += config.lora_scale * times(low, self.lora[name].b[...], writer)

        return summed(out, layout) if is_writer else out


class Attention(Multiplying):
    """Causal grouped-query attention with rotary positions."""

    def __init__(
        self, config: TransformerConfig, rngs: nnx.Rngs, layout: Layout | None
    ):
        kv_width = config.num_kv_heads * config.head_width
        self.query = matrix(rngs, config.width, config.width)
        self.key = matrix(rngs, config.width, kv_width)
        self.value = matrix(rngs, config.width, kv_width)
        self.output = matrix(
            rngs, config.width, config.width, gain=config.residual_gain
        )

        if config.qk_norm:
            self.query_norm = RMSNorm(config, config.head_width)
            self.key_norm = RMSNorm(config, config.head_width)
        self.adapt(config, rngs, layout)

    def __call__(
        self, x_BLD: jax.Array, rotation: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        """Attend within each sequence; `rotation` comes from `rotary_tables`."""
        x_BLD = shared(x_BLD, self.layout)
        heads = (*x_BLD.shape[:2], -1, self.config.head_width)
        query_BLHd = self.times(x_BLD, "query").reshape(heads)
        key_BLHd = self.times(x_BLD, "key").reshape(heads)
        value_BLHd = self.times(x_BLD, "value").reshape(heads)
        if self.config.qk_norm:
            query_BLHd = self.query_norm(query_BLHd)
            key_BLHd = self.key_norm(key_BLHd)

        cos, sin = rotation
        query_BLHd = rotate(query_BLHd, cos, sin)
        key_BLHd = rotate(key_BLHd, cos, sin)

        sequence = None
        if self.layout is not None:
            sequence = self.layout.sequence
            key_BLHd = self.layout.whole(key_BLHd)
            value_BLHd = self.layout.whole(value_BLHd)

        mixed_BLHd = attend(
            query_BLHd, key_BLHd, value_BLHd, self.config.attention, sequence
        )

        return self.times(mixed_BLHd.reshape(*x_BLD.shape[:2], -1), "output")


class MLP(Multiplying):
    """SwiGLU feed-forward."""

    def __init__(
        self,
        config: TransformerConfig,
        rngs: nnx.Rngs,
        layout: Layout | None,
        mlp_width: int,
    ):
        self.gate = matrix(rngs, config.width, mlp_width)
        self.up = matrix(rngs, config.width, mlp_width)
        self.down = matrix(rngs, mlp_width, config.width, gain=config.residual_gain)
        self.adapt(config, rngs, layout)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """Apply the feed-forward to each position."""
        x_BLD = shared(x_BLD, self.layout)
        gate_BLF = jax.nn.silu(self.times(x_BLD, "gate"))
        return self.times(gate_BLF * self.times(x_BLD, "up"), "down")


class Block(nnx.Module):
    """One pre-norm transformer block."""

    def __init__(
        self,
        config: TransformerConfig,
        rngs: nnx.Rngs,
        layout: Layout | None,
        has_experts: bool,
    ):
        self.attention_norm = RMSNorm(config, config.width)
        self.attention = Attention(config, rngs, layout)
        self.mlp_norm = RMSNorm(config, config.width)
        self.has_experts = has_experts

        if not has_experts:
            self.mlp = MLP(config, rngs, layout, config.mlp_width)
            return

        self.moe = MixtureOfExperts(config, rngs, layout)
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
    """Blocks of which the last has experts, scanned as one if not all have experts."""

    def __init__(
        self, config: TransformerConfig, keys: jax.Array, layout: Layout | None
    ):
        self.names = tuple(f"layer_{i}" for i in range(config.moe_every))
        for i, name in enumerate(self.names):
            rngs = nnx.Rngs(keys[i])
            setattr(self, name, Block(config, rngs, layout, config.has_experts(i)))

    def __call__(
        self, x_BLD: jax.Array, rotation: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[Routed, ...]]:
        """Pass the residual stream through the blocks; see `Block`."""
        routed = ()
        for name in self.names:
            x_BLD, routed = getattr(self, name)(x_BLD, rotation)
        return x_BLD, routed


def rotary_tables(
    length: int, head_width: int, theta: float
) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin of each position's angles, float32 [L, head_width / 2].

    They are constants of the program, computed in float64 while tracing.
    """
    frequency = theta ** (-np.arange(0, head_width, 2) / head_width)
    angle = np.outer(np.arange(length), frequency)
    return jnp.float32(np.cos(angle)), jnp.float32(np.sin(angle))


def rotate(x_BLHd: jax.Array, cos_Ld: jax.Array, sin_Ld: jax.Array) -> jax.Array:
    """Rotate feature pairs (i, i + d / 2) of each head by their position's angle."""
    cos = cos_Ld[None, :, None, :]
    sin = sin_Ld[None, :, None, :]
    first, second = jnp.split(x_BLHd.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x_BLHd.dtype)
