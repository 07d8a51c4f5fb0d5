"""Splash attention, JAX's Pallas kernel for TPUs, on the positions of a device."""

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.models.layout import own_share

# Positions of a block, at most and at least.
MOST_BLOCK, LEAST_BLOCK = 512, 128


def share(length: int, num_own: int | None = None) -> float:
    """Return the share of all pairs of positions that splash attention computes.

    >>> share(512), share(2048)
    (1.0, 0.625)
    """
    num_blocks = length // _block(num_own or length)
    return (num_blocks + 1) / (2 * num_blocks)


def _block(length: int) -> int:
    sizes = MOST_BLOCK, MOST_BLOCK // 2, LEAST_BLOCK
    return next(size for size in sizes if length % size == 0)


def attend(query_BLHd, key_BLKd, value_BLKd, name, sequence, interpret) -> jax.Array:
    """Attend as `attention.attend` does.

    What the forward pass keeps goes by `name`, for policies of rematerialisation.
    """
    _, num_own, num_heads, head_width = query_BLHd.shape
    length = key_BLKd.shape[1]
    run = _kernel(length, length // num_own, num_heads, name, interpret)
    if sequence is not None:
        run = _own_blocks(run, sequence)
    query_BLHd *= np.asarray(head_width**-0.5, query_BLHd.dtype)
    heads_first = (x.swapaxes(1, 2) for x in (query_BLHd, key_BLKd, value_BLKd))
    mixed_BHLd = cast(jax.Array, jax.vmap(run)(*heads_first))  # And no residuals.
    return mixed_BHLd.swapaxes(1, 2)


def _own_blocks(kernel, sequence: str):
    """Take, of a kernel for sequences that devices share, what one of them computes.

    As its `manual_sharding_spec` would lay it out: blocks of the mask and positions by
    those of the query; the mask of a block on the diagonal is the same for all.
    """

    def own(x, axis: int):
        return None if x is None else own_share(jnp.asarray(x), sequence, axis)

    def of(info):
        return info and info._replace(
            data_next=own(info.data_next, 1),
            mask_next=own(info.mask_next, 1),
            block_mask=own(info.block_mask, 1),
            q_sequence=own(info.q_sequence, 0),
        )

    infos, kwargs = kernel.tree_flatten()
    return type(kernel).tree_unflatten(kwargs, [of(info) for info in infos])


def _kernel(length: int, num_shards: int, num_heads: int, name: str, interpret: bool):
    # Half a second to import, which only a TPU's program needs.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    block = _block(length // num_shards)
    names = (
        "block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv",
        "block_kv_dkv_compute", "block_q_dq", "block_kv_dq",
    )  # fmt: skip
    return splash.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((length, length))] * num_heads),
        block_sizes=splash.BlockSizes(**dict.fromkeys(names, block)),
        head_shards=1,
        q_seq_shards=num_shards,
        residual_checkpoint_name=name,
        interpret=interpret,
    )
