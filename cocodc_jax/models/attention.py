"""Causal attention, by the kernel that a platform has for it.

    plain    XLA's own: scores of all pairs of positions are in memory, `H L^2` numbers
             a sequence
    blocks   the same for two or four blocks of queries, each with the keys that it may
             see: 3/4 or 5/8 of the pairs
    cudnn    flash attention (arXiv 2205.14135) of NVIDIA's cuDNN
    splash   flash attention as a Pallas kernel for TPUs (`jax.experimental.pallas`)

A flash kernel never holds the scores. Its backward pass computes them again from the
result of the forward pass and one number for each row.

Shape suffixes here: B batch, L positions of the queries, S positions of the keys,
H query heads, K heads of keys and values, G = H / K query heads for each of these,
R = G L rows of one product, d features of a head.
"""

import dataclasses
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from cocodc_jax.models.config import TransformerConfig
from cocodc_jax.models.layout import own_share

# What policies of rematerialisation can keep of a flash kernel.
ATTENTION = "attention"
# Features of a head that cuDNN takes: a multiple of the first, at most the second, or
# half of it on GPUs before Hopper.
HEAD_MULTIPLE = 8
MOST_HEAD_WIDTH = 256
# Major versions of NVIDIA's compute capabilities.
_AMPERE = 8
_HOPPER = 9
# Blocks of queries in plain attention: their possible numbers, and the least positions
# of one. More blocks mean more products of few rows, and more to compile.
BLOCKS = (4, 2)
LEAST_QUERIES = 64
# Positions of a block of splash attention: the largest that divides those of a device.
_SPLASH_BLOCKS = (512, 256, 128)


def attend(
    query_BLHd: jax.Array,
    key_BLKd: jax.Array,
    value_BLKd: jax.Array,
    kernel: str,
    sequence: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return causal attention: each position attends to itself and those before it.

    Args:
      query_BLHd: the queries, `[B, L, H, d]`.
      key_BLKd: the keys, `[B, L, K, d]`; each of the K heads serves H / K of the
        query's.
      value_BLKd: the values, `[B, L, K, d]`.
      kernel: "plain", "blocks", "cudnn" or "splash"; "auto" is plain.
      sequence: the mesh axis that shards the positions of the queries, but not those of
        keys and values, inside a `jax.shard_map`; not for cudnn and blocks.
      interpret: whether splash runs in Pallas's interpreter, which any platform can,
        slowly.

    Returns:
      `[B, L, H, d]`, like the queries.
    """
    if kernel == "splash":
        return _splash(query_BLHd, key_BLKd, value_BLKd, sequence, interpret)
    if kernel == "blocks":
        return _in_blocks(query_BLHd, key_BLKd, value_BLKd)
    if kernel == "cudnn":
        mixed_BLHd = jax.nn.dot_product_attention(
            query_BLHd, key_BLKd, value_BLKd, is_causal=True, implementation="cudnn"
        )
        return checkpoint_name(mixed_BLHd, ATTENTION)

    num_local = query_BLHd.shape[1]
    first = jax.lax.axis_index(sequence) * num_local if sequence else 0
    positions_L = first + jnp.arange(num_local)
    return _plain(query_BLHd, key_BLKd, value_BLKd, positions_L)


def _plain(
    query_BLHd: jax.Array,
    key_BSKd: jax.Array,
    value_BSKd: jax.Array,
    positions_L: jax.Array,
) -> jax.Array:
    """Attend as `jax.nn.dot_product_attention` does, up to rounding.

    The softmax divides the weighted sum of the values, not each weight, so the backward
    pass sums over no pairs of positions. On CPUs a training step of the preset tiny
    then takes a twelfth less.
    """
    batch, length, _, width = query_BLHd.shape
    num_kv = key_BSKd.shape[2]

    # The G heads that share a key are more rows of one product.
    query_BLKGd = query_BLHd.reshape(batch, length, num_kv, -1, width)
    query_BKGLd = jnp.moveaxis(query_BLKGd, 1, 3)
    query_BKRd = query_BKGLd.reshape(batch, num_kv, -1, width)
    key_BKdS = jnp.moveaxis(key_BSKd, 1, 3)
    value_BKSd = jnp.moveaxis(value_BSKd, 1, 2)

    scores_BKRS = jnp.matmul(query_BKRd, key_BKdS, preferred_element_type=jnp.float32)
    positions_R = jnp.tile(positions_L, query_BKGLd.shape[2])
    scores_BKRS = jnp.where(
        positions_R[:, None] >= jnp.arange(key_BKdS.shape[3])[None],
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
    return jnp.moveaxis(mixed_BKGLd, 3, 1).reshape(query_BLHd.shape)


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


def splash_share(length: int, num_local: int | None = None) -> float:
    """Return the share of all pairs of positions that splash attention computes.

    >>> splash_share(512), splash_share(2048)
    (1.0, 0.625)
    """
    num_blocks = length // _splash_block(num_local or length)
    return (num_blocks + 1) / (2 * num_blocks)


def _splash_block(length: int) -> int:
    return next(size for size in _SPLASH_BLOCKS if length % size == 0)


def _splash(
    query_BLHd: jax.Array,
    key_BLKd: jax.Array,
    value_BLKd: jax.Array,
    sequence: str | None,
    interpret: bool,
) -> jax.Array:
    """Attend by JAX's Pallas kernel for TPUs, on the positions of a device."""
    _, num_local, num_heads, head_width = query_BLHd.shape
    length = key_BLKd.shape[1]
    run = _splash_kernel(length, length // num_local, num_heads, interpret)
    if sequence is not None:
        run = _own_blocks(run, sequence)

    query_BLHd *= np.asarray(head_width**-0.5, query_BLHd.dtype)
    heads_first = (x.swapaxes(1, 2) for x in (query_BLHd, key_BLKd, value_BLKd))
    # Residuals are not requested, so the result is one array.
    mixed_BHLd = cast(jax.Array, jax.vmap(run)(*heads_first))
    return mixed_BHLd.swapaxes(1, 2)


def _own_blocks(kernel: Any, sequence: str) -> Any:
    """Return this device's part of a splash kernel whose sequence devices share.

    It slices as the kernel's `manual_sharding_spec` does; a diagonal block has the same
    mask on all devices.
    """

    def local(x: Any, axis: int) -> jax.Array | None:
        return None if x is None else own_share(jnp.asarray(x), sequence, axis)

    def localized(info: Any) -> Any:
        return info and info._replace(
            data_next=local(info.data_next, 1),
            mask_next=local(info.mask_next, 1),
            block_mask=local(info.block_mask, 1),
            q_sequence=local(info.q_sequence, 0),
        )

    infos, kwargs = kernel.tree_flatten()
    return type(kernel).tree_unflatten(kwargs, [localized(info) for info in infos])


def _splash_kernel(length: int, num_shards: int, num_heads: int, interpret: bool):
    # Half a second to import, which only a TPU's program needs.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    block = _splash_block(length // num_shards)
    names = (
        "block_q",
        "block_kv",
        "block_kv_compute",
        "block_q_dkv",
        "block_kv_dkv",
        "block_kv_dkv_compute",
        "block_q_dq",
        "block_kv_dq",
    )

    return splash.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((length, length))] * num_heads),
        block_sizes=splash.BlockSizes(**dict.fromkeys(names, block)),
        head_shards=1,
        q_seq_shards=num_shards,
        residual_checkpoint_name=ATTENTION,
        interpret=interpret,
    )


def choose(
    config: TransformerConfig,
    platform: str,
    length: int,
    is_divided: bool,
    needs_forward_mode: bool = False,
    sequence_axis: int = 1,
    most_head_width: int = MOST_HEAD_WIDTH,
) -> TransformerConfig:
    """Return the model with the attention kernel of its configuration; resolve "auto".

    Args:
      config: the model.
      platform: "cpu", "gpu", "cuda" or "tpu".
      length: positions of a sequence.
      is_divided: whether the program names every mesh axis itself (`divided.py`).
      needs_forward_mode: whether the method takes second derivatives.
      sequence_axis: devices that share a sequence.
      most_head_width: `head_width_of` the devices.

    Raises:
      ValueError: if the program cannot use the kernel that `attention` names.
    """
    wanted = config.attention
    is_auto = wanted == "auto"
    if is_auto:
        auto = {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash", "cpu": "blocks"}
        wanted = auto.get(platform, "plain")

    reasons: list[str] = []
    if wanted == "blocks":
        reasons = _against_blocks(length, sequence_axis)
    elif wanted == "splash":
        reasons = _against_splash(platform, length, sequence_axis)
    elif wanted == "cudnn":
        reasons = _against_cudnn(config, platform, sequence_axis, most_head_width)
    if wanted in ("splash", "cudnn"):
        if not is_divided:
            reasons.append("is not for pipelines")
        if needs_forward_mode:
            reasons.append("has no second derivatives, which the method takes")

    if reasons and not is_auto:
        raise ValueError(
            f"attention={wanted!r} {' and '.join(reasons)}; use attention='auto'"
        )
    return dataclasses.replace(config, attention="plain" if reasons else wanted)


def _against_blocks(length: int, sequence_axis: int) -> list[str]:
    """Return why a program cannot have blocks of queries; empty if it can."""
    reasons = []
    if sequence_axis > 1:
        reasons.append(f"does not support sequence_axis={sequence_axis}")
    if num_blocks(length) == 1:
        reasons.append(
            f"is plain attention where sequence_length={length} makes no blocks of "
            f"{LEAST_QUERIES}"
        )
    return reasons


def _against_splash(platform: str, length: int, sequence_axis: int) -> list[str]:
    """Return why a program cannot have splash attention; empty if it can."""
    reasons = []
    if platform != "tpu":
        reasons.append("runs on TPUs only")

    multiple = _SPLASH_BLOCKS[-1]
    if length % (multiple * sequence_axis) != 0:
        over = f" over sequence_axis={sequence_axis}" if sequence_axis > 1 else ""
        reasons.append(
            f"takes lengths that are multiples of {multiple}, and "
            f"sequence_length={length}{over}"
        )
    return reasons


def _against_cudnn(
    config: TransformerConfig, platform: str, sequence_axis: int, most_head_width: int
) -> list[str]:
    """Return why a program cannot have cuDNN's attention; empty if it can."""
    is_gpu = platform in ("gpu", "cuda")
    reasons = []
    if not is_gpu:
        reasons.append("runs on GPUs only")
    if is_gpu and not most_head_width:
        reasons.append("is not made for this GPU")
    if sequence_axis > 1:
        reasons.append(f"does not support sequence_axis={sequence_axis}")
    if config.compute_dtype != "bfloat16":
        reasons.append(
            f"computes in bfloat16, and compute_dtype={config.compute_dtype!r}"
        )

    head_width = config.head_width
    limit = most_head_width or MOST_HEAD_WIDTH
    if head_width % HEAD_MULTIPLE != 0 or head_width > limit:
        reasons.append(
            f"takes heads of a multiple of {HEAD_MULTIPLE} features up to "
            f"{most_head_width}, and width={config.width} with num_heads="
            f"{config.num_heads} makes heads of {head_width}"
        )
    return reasons


def head_width_of(device: Any) -> int:
    """Return the largest head width that cuDNN supports on a GPU; 0 is no support.

    GPUs before Ampere (T4, V100) and AMD's, whose capability is a name such as
    "gfx90a", have none (both from memory).
    """
    capability = getattr(device, "compute_capability", None) or _HOPPER
    generation = str(capability).partition(".")[0]
    if not generation.isdecimal() or int(generation) < _AMPERE:
        return 0
    return MOST_HEAD_WIDTH // 2 if int(generation) < _HOPPER else MOST_HEAD_WIDTH
