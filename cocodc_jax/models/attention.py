"""Causal attention, by the kernel that a platform has for it.

    plain    XLA's own: scores of all pairs of positions exist, `H L^2` a sequence
    blocks   the same for two or four blocks of queries, each with the keys that it may
             see: 3/4 or 5/8 of the pairs
    cudnn    flash attention (arXiv 2205.14135) of NVIDIA's cuDNN
    splash   the same as a Pallas kernel for TPUs (`jax.experimental.pallas`)

A flash kernel never holds the scores; its backward pass computes them again from what
the forward pass kept, its result and a number for each row.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from cocodc_jax.models import splash
from cocodc_jax.models.config import TransformerConfig

# What policies of rematerialisation can keep of a flash kernel.
ATTENTION = "attention"
# Features of a head that cuDNN takes: a multiple, up to so many; before Hopper to half.
HEAD_MULTIPLE, MOST_HEAD_WIDTH = 8, 256
_AMPERE, _HOPPER = 8, 9  # first numbers of NVIDIA's compute capabilities
# Blocks of queries of plain attention: how many, and positions of one at least. More
# are more products of few rows, and more to compile.
BLOCKS, LEAST_QUERIES = (4, 2), 64


def attend(
    query_BLHd: jax.Array,
    key_BLKd: jax.Array,
    value_BLKd: jax.Array,
    kernel: str,
    sequence: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return what each position gathers from itself and those before it.

    Args:
      query_BLHd: of H heads; of the device's own positions, where there is `sequence`.
      key_BLKd: of K heads, each for H / K of the query's, and of all positions.
      value_BLKd: likewise.
      kernel: plain, blocks, cudnn, splash; auto is plain, as nothing here knows the
        device.
      sequence: mesh axis over which the query's positions lie, inside a
        `jax.shard_map`; None is none. Not for cudnn and blocks.
      interpret: whether splash is carried out as any platform can, slowly.
    """
    if kernel == "splash":
        return splash.attend(
            query_BLHd, key_BLKd, value_BLKd, ATTENTION, sequence, interpret
        )
    if kernel == "blocks":
        return _in_blocks(query_BLHd, key_BLKd, value_BLKd)
    if kernel != "cudnn":
        num_own = query_BLHd.shape[1]
        first = jax.lax.axis_index(sequence) * num_own if sequence else 0
        own_L = first + jnp.arange(num_own)
        return _plain(query_BLHd, key_BLKd, value_BLKd, own_L)
    mixed_BLHd = jax.nn.dot_product_attention(
        query_BLHd, key_BLKd, value_BLKd, is_causal=True, implementation="cudnn"
    )
    return checkpoint_name(mixed_BLHd, ATTENTION)


def _plain(
    query_BLHd: jax.Array, key_BSKd: jax.Array, value_BSKd: jax.Array, own_L: jax.Array
) -> jax.Array:
    """Attend as `jax.nn.dot_product_attention` does, up to rounding.

    With heads before positions its products are plain ones of a batch, and dividing
    what was gathered, in place of each weight, leaves the backward pass no sum over all
    pairs of positions: on CPUs a training step of tiny takes a twelfth less.
    """
    shape, num_kv, width = query_BLHd.shape, key_BSKd.shape[2], query_BLHd.shape[3]
    # The G heads that share a key are more rows of one product.
    query_BKGLd = jnp.moveaxis(query_BLHd.reshape(*shape[:2], num_kv, -1, width), 1, 3)
    query_BKRd = query_BKGLd.reshape(shape[0], num_kv, -1, width)
    key_BKdS, value_BKSd = jnp.moveaxis(key_BSKd, 1, 3), jnp.moveaxis(value_BSKd, 1, 2)
    scores_BKRS = jnp.matmul(query_BKRd, key_BKdS, preferred_element_type=jnp.float32)
    own_R = jnp.tile(own_L, query_BKGLd.shape[2])
    scores_BKRS = jnp.where(
        own_R[:, None] >= jnp.arange(key_BKdS.shape[3])[None],
        scores_BKRS / math.sqrt(width),
        jnp.finfo(jnp.float32).min,
    )
    highest_BKR1 = jax.lax.stop_gradient(scores_BKRS.max(axis=-1, keepdims=True))
    weights_BKRS = jnp.exp(scores_BKRS - highest_BKR1)
    mixed_BKRd = jnp.matmul(
        weights_BKRS.astype(value_BKSd.dtype),
        value_BKSd,
        preferred_element_type=jnp.float32,
    )
    mixed_BKRd = mixed_BKRd / weights_BKRS.sum(axis=-1, keepdims=True)
    mixed_BKGLd = mixed_BKRd.astype(query_BLHd.dtype).reshape(query_BKGLd.shape)
    return jnp.moveaxis(mixed_BKGLd, 3, 1).reshape(shape)


def _in_blocks(
    query_BLHd: jax.Array, key_BLKd: jax.Array, value_BLKd: jax.Array
) -> jax.Array:
    """Attend as `_plain` does, without most of the pairs that the mask hides."""
    length = query_BLHd.shape[1]
    size = length // num_blocks(length)
    mixed = [
        _plain(
            query_BLHd[:, start : start + size],
            key_BLKd[:, : start + size],
            value_BLKd[:, : start + size],
            start + jnp.arange(size),
        )
        for start in range(0, length, size)
    ]
    return jnp.concatenate(mixed, axis=1)


def num_blocks(length: int) -> int:
    """Return the blocks of queries that plain attention is cut into.

    >>> num_blocks(1024), num_blocks(128), num_blocks(127)
    (4, 2, 1)
    """
    fitting = (n for n in BLOCKS if length % n == 0 and length // n >= LEAST_QUERIES)
    return next(fitting, 1)


def choose(
    config: TransformerConfig,
    platform: str,
    length: int,
    is_divided: bool,
    needs_forward_mode: bool = False,
    sequence_axis: int = 1,
    most_head_width: int = MOST_HEAD_WIDTH,
) -> TransformerConfig:
    """Return the model with the kernel that `attention` names, or auto means.

    Args:
      config: the model.
      platform: of the devices that it is for.
      length: positions of a sequence.
      is_divided: whether the program names every axis itself (`divided.py`), as
        kernels need.
      needs_forward_mode: whether gradients are differentiated again, as no kernel is.
      sequence_axis: devices that share the positions of a sequence.
      most_head_width: as `head_width_of` the devices; 0 where cuDNN has no kernel.
    """
    is_gpu = platform in ("gpu", "cuda")
    no_sequence = f"does not support sequence_axis={sequence_axis}", sequence_axis > 1
    against = {
        "plain": (),
        "blocks": (
            no_sequence,
            (
                f"is plain attention where sequence_length={length} makes no blocks of "
                f"{LEAST_QUERIES}",
                num_blocks(length) == 1,
            ),
        ),
        "splash": (
            ("runs on TPUs only", platform != "tpu"),
            (
                f"takes lengths that are multiples of {splash.LEAST_BLOCK}, and "
                f"sequence_length={length}"
                + (f" over sequence_axis={sequence_axis}" * (sequence_axis > 1)),
                length % (splash.LEAST_BLOCK * sequence_axis) != 0,
            ),
        ),
        "cudnn": (
            ("runs on GPUs only", not is_gpu),
            ("is not made for this GPU", is_gpu and not most_head_width),
            no_sequence,
            (
                f"computes in bfloat16, and compute_dtype={config.compute_dtype!r}",
                config.compute_dtype != "bfloat16",
            ),
            (
                f"takes heads of a multiple of {HEAD_MULTIPLE} features up to "
                f"{most_head_width}, and width={config.width} with num_heads="
                f"{config.num_heads} makes heads of {config.head_width}",
                config.head_width % HEAD_MULTIPLE != 0
                or config.head_width > (most_head_width or MOST_HEAD_WIDTH),
            ),
        ),
    }
    of_kernels = (
        ("is not for pipelines", not is_divided),
        ("has no second derivatives, which the method takes", needs_forward_mode),
    )
    auto = {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash", "cpu": "blocks"}
    wanted = config.attention
    if wanted == "auto":
        wanted = auto.get(platform, "plain")
    of_all = of_kernels if wanted in ("cudnn", "splash") else ()
    reasons = [text for text, is_so in (*against[wanted], *of_all) if is_so]
    if reasons and config.attention == "auto":
        return dataclasses.replace(config, attention="plain")
    if reasons:
        raise ValueError(
            f"attention={wanted!r} {' and '.join(reasons)}; use attention='auto'"
        )
    return dataclasses.replace(config, attention=wanted)


def head_width_of(device: Any) -> int:
    """Return the most features of a head that cuDNN takes on a GPU.

    None, 0, before Ampere (T4, V100) and on those of other makers: AMD's call what they
    can compute "gfx90a" (both from memory).
    """
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        return MOST_HEAD_WIDTH
    generation = str(capability).partition(".")[0]
    if not generation.isdecimal() or int(generation) < _AMPERE:
        return 0
    return MOST_HEAD_WIDTH // 2 if int(generation) < _HOPPER else MOST_HEAD_WIDTH
