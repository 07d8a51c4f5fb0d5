"""Random initial matrices of a model."""

import math

import jax
import jax.numpy as jnp

from cocodc_jax._extras import extra

with extra("train"):
    from flax import nnx


def matrix(rngs: nnx.Rngs, *shape: int, gain: float = 1.0) -> nnx.Param:
    """Draw `[..., fan_in, fan_out]` with standard deviation `gain` / sqrt(fan_in)."""
    return normal(rngs, shape, gain / math.sqrt(shape[-2]))


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], stddev: float) -> nnx.Param:
    """Draw float32 normal numbers."""
    return nnx.Param(stddev * jax.random.normal(rngs.params(), shape, jnp.float32))
