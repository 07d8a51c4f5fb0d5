"""Causal attention, by the kernel that a platform has for it.

    plain    XLA's own: scores of all pairs of positions exist, `H L^2` a sequence
    cudnn    flash attention (arXiv 2205.14135) of NVIDIA's cuDNN
    splash   the same as a Pallas kernel for TPUs (`jax.experimental.pallas`)

A flash kernel never holds the scores; its backward pass computes them again from what
the forward pass kept, its result and a number for each row.
"""

import dataclasses
from typing import cast

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from cocodc_jax.models.config import TransformerConfig

# What policies of rematerialisation can keep of a flash kernel.
ATTENTION = "attention"
# Positions of a block of splash attention, at most and at least.
MOST_BLOCK, LEAST_BLOCK = 512, 128


def attend(
    query_BLHd: jax.Array,
    key_BLKd: jax.Array,
    value_BLKd: jax.Array,
    kernel: str,
    interpret: bool = False,
) -> jax.Array:
    """Return what each position gathers from itself and those before it.

    Args:
      query_BLHd: of H heads.
      key_BLKd: of K heads, each for H / K of the query's.
      value_BLKd: as many.
      kernel: plain, cudnn, splash; auto is plain, as nothing here knows the device.
      interpret: whether splash is carried out as any platform can, slowly.
    """
    if kernel == "splash":
        return _splash(query_BLHd, key_BLKd, value_BLKd, interpret)
    mixed_BLHd = jax.nn.dot_product_attention(
        query_BLHd,
        key_BLKd,
        value_BLKd,
        is_causal=True,
        implementation="cudnn" if kernel == "cudnn" else None,
    )
    return checkpoint_name(mixed_BLHd, ATTENTION) if kernel == "cudnn" else mixed_BLHd


def choose(
    config: TransformerConfig,
    platform: str,
    length: int,
    is_divided: bool,
    needs_forward_mode: bool = False,
) -> TransformerConfig:
    """Return the model with the kernel that `attention` names, or auto means.

    Args:
      config: the model.
      platform: of the devices that it is for.
      length: positions of a sequence.
      is_divided: whether the program names every axis itself (`divided.py`), as
        kernels need.
      needs_forward_mode: whether gradients are differentiated again, as no kernel is.

    Raises:
      ValueError: if that kernel cannot be had, naming what stands against it.
    """
    is_gpu = platform in ("gpu", "cuda")
    against = {
        "splash": (
            ("runs on TPUs only", platform != "tpu"),
            (
                f"takes lengths that are multiples of {LEAST_BLOCK}, and "
                f"sequence_length={length}",
                length % LEAST_BLOCK != 0,
            ),
        ),
        "cudnn": (
            ("runs on GPUs only", not is_gpu),
            (
                f"computes in bfloat16, and compute_dtype={config.compute_dtype!r}",
                config.compute_dtype != "bfloat16",
            ),
        ),
    }
    of_all = (
        ("is not for pipelines", not is_divided),
        ("has no second derivatives, which the method takes", needs_forward_mode),
    )
    wanted = config.attention
    if wanted == "auto":
        wanted = "cudnn" if is_gpu else "splash" if platform == "tpu" else "plain"
    reasons = [text for text, is_so in (*against.get(wanted, ()), *of_all) if is_so]
    if wanted == "plain" or (reasons and config.attention == "auto"):
        return dataclasses.replace(config, attention="plain")
    if reasons:
        raise ValueError(
            f"attention={wanted!r} {' and '.join(reasons)}; use attention='auto'"
        )
    return dataclasses.replace(config, attention=wanted)


def splash_share(length: int) -> float:
    """Return the share of all pairs of positions that splash attention computes.

    >>> splash_share(512), splash_share(2048)
    (1.0, 0.625)
    """
    num_blocks = length // _block(length)
    return (num_blocks + 1) / (2 * num_blocks)


def _block(length: int) -> int:
    return next(
        size
        for size in (MOST_BLOCK, MOST_BLOCK // 2, LEAST_BLOCK)
        if length % size == 0
    )


def _splash(query_BLHd, key_BLKd, value_BLKd, interpret: bool) -> jax.Array:
    _, length, num_heads, head_width = query_BLHd.shape
    run = _splash_kernel(length, num_heads, interpret)
    query_BLHd *= np.asarray(head_width**-0.5, query_BLHd.dtype)
    heads_first = (x.swapaxes(1, 2) for x in (query_BLHd, key_BLKd, value_BLKd))
    mixed_BHLd = cast(jax.Array, jax.vmap(run)(*heads_first))  # And no residuals.
    return mixed_BHLd.swapaxes(1, 2)


def _splash_kernel(length: int, num_heads: int, interpret: bool):
    # Half a second to import, which only a TPU's program needs.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    block = _block(length)
    names = (
        "block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv",
        "block_kv_dkv_compute", "block_q_dq", "block_kv_dq",
    )  # fmt: skip
    return splash.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((length, length))] * num_heads),
        block_sizes=splash.BlockSizes(**dict.fromkeys(names, block)),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=ATTENTION,
        interpret=interpret,
    )
