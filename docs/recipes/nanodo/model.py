"""A decoder of the shape of NanoDO's, where NanoDO itself is not installed.

github.com/google-deepmind/nanodo is in no package registry. Layers, kernels and FSDP
annotations are as there, so that its own `nanodo.model` can take the place of this one.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class DoConfig:
    """Sizes: width D, heads H, length L, layers N, vocabulary V, hidden width F."""

    D: int
    H: int
    L: int
    N: int
    V: int
    F: int
    dtype: Any = jnp.float32


class TransformerDo(nn.Module):
    """Learned positions, pre-norm blocks, embeddings tied to the output."""

    docfg: DoConfig

    @nn.compact
    def __call__(self, tokens_BL):
        c = self.docfg
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
        init = nn.with_partitioning(init, (None, "data"))
        embed = functools.partial(nn.Embed, features=c.D, embedding_init=init)
        tokens, positions = embed(c.V, name="embed"), embed(c.L, name="pos_embed")
        x_BLD = tokens(tokens_BL) + positions(jnp.arange(tokens_BL.shape[1])[None])
        for i in range(c.N):
            x_BLD = Block(c, name=f"blocks_{i}")(x_BLD)
        x_BLD = nn.LayerNorm(use_bias=False, dtype=c.dtype)(x_BLD)
        return tokens.attend(x_BLD.astype(jnp.float32))


class Block(nn.Module):
    """Causal attention and an MLP; every kernel is sharded along its width D."""

    docfg: DoConfig

    @nn.compact
    def __call__(self, x_BLD):
        c = self.docfg
        norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=c.dtype)
        heads = functools.partial(_dense, c, (c.H, c.D // c.H), ("data", None, None))
        y_BLD = norm()(x_BLD)
        q_BLHd, k_BLHd, v_BLHd = (
            heads(name=name)(y_BLD) for name in ("query", "key", "value")
        )
        y_BLHd = jax.nn.dot_product_attention(q_BLHd, k_BLHd, v_BLHd, is_causal=True)
        x_BLD += _dense(c, c.D, (None, None, "data"), axis=(-2, -1))(y_BLHd)
        y_BLF = nn.gelu(_dense(c, c.F, ("data", None))(norm()(x_BLD)))
        return x_BLD + _dense(c, c.D, ("data", None))(y_BLF)


def _dense(c, features, axes, **options):
    init = nn.with_partitioning(nn.initializers.xavier_uniform(), axes)
    return nn.DenseGeneral(
        features, use_bias=False, kernel_init=init, dtype=c.dtype, **options
    )
