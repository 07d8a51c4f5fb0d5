"""Decoupled momentum: each coefficient is averaged over the regions that sent it.

DeMo, every step, in region i with d_i from zero:

    d_i <- b d_i + x_i;   q_i = top-k of the chunked 2-D DCT of d_i;   d_i <- d_i - q_i
    Q = mean over the senders of each coefficient of q_1 .. q_M, transformed back

The first line is `error_feedback(dct_top_k(k=32, chunk_side=64), decay=b)`, whose
residual is d_i, the second `average_duplicates`. Parameters then move by the sign of Q.
DiLoCo with decoupled momentum adds the mean over all regions to its residual.

Source: DeMo (arXiv 2411.19870) and DiLoCo with decoupled momentum (arXiv 2510.03371),
both as read from the authors' code. Differs from the code of the second, which averages
over the senders; `methods/diloco_demo.py` says why.
"""

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.transforms.compressor import Compressor, map_packed, without_bad
from cocodc_jax.transforms.numerics import down_to_median, widen
from cocodc_jax.transforms.sparsify import SparseCompressor


def average_duplicates(
    messages,
    compressor: Compressor,
    weights=None,
    clip: bool = False,
    over_all: bool = False,
):
    """Average each coefficient over the regions that sent it, and transform back.

        Q_j = sum_i w_i s_ij q_ij / sum_i w_i s_ij       s_ij = 1 if i sent j, else 0

    A coefficient that one region sent keeps its size; the mean over all M would divide
    it by M. A region that sent a zero counts as a sender. A region of weight 0 does
    not, nor one whose message is not finite, if the compressor has a memory. A
    coefficient that no region sent is 0.

    Args:
      messages: messages of M regions as one tree, a region axis M before every array:
        what `jax.lax.all_gather` or `jax.vmap(compressor.encode)` gives.
      compressor: of the messages: `top_k`, `chunked_top_k` or `dct_top_k` with any
        `values`, bare or in `error_feedback`.
      weights: `[M]` of the regions, up to a common factor; None weighs all equally.
      clip: whether to shorten each tensor of a region to the median of the norms that
        the tensor has in the regions of a weight above 0.
      over_all: whether regions that did not send an entry count in its mean, as zero.

    Returns:
      The tree, in the shapes and dtypes encoded; sums are in float32 or wider.

    >>> import jax, jax.numpy as jnp
    >>> from cocodc_jax.transforms.sparsify import top_k
    >>> compressor = top_k(density=0.5)
    >>> regions = jnp.array([[4.0, 2.0, 0.0, 1.0], [6.0, 0.0, 3.0, 1.0]])
    >>> messages = jax.vmap(lambda x: compressor.encode(x, ())[0])(regions)
    >>> print(average_duplicates(messages, compressor))
    [5. 2. 3. 0.]
    """
    if not isinstance(compressor, SparseCompressor):
        raise ValueError(
            f"average_duplicates cannot read messages of {compressor.name}; use top_k, "
            "chunked_top_k or dct_top_k, bare or in error_feedback"
        )

    if compressor.has_memory:
        if weights is None:
            weights = jnp.ones(len(jax.tree.leaves(messages)[0]))
        messages, weights = without_bad(messages, weights)

    def combine(packed):
        read = jax.vmap(lambda arrays: compressor.read(arrays, packed.shape))
        places, coefficients = read(packed.arrays)
        coefficients = widen(coefficients)
        num_rows = places.shape[1]
        counts = jnp.ones(len(places)) if weights is None else weights

        counts = counts.astype(coefficients.dtype)
        if clip:
            norms = jnp.sqrt(jnp.square(coefficients).sum((1, 2)))
            coefficients *= down_to_median(norms, counts > 0)[:, None, None]

        counts = counts[:, None, None]
        where = (np.arange(num_rows)[None, :, None], places)
        size = compressor.row_size(packed.shape)
        nothing = jnp.zeros((num_rows, size), coefficients.dtype)
        total = nothing.at[where].add(counts * coefficients)

        sent = nothing.at[where].add(jnp.broadcast_to(counts, places.shape))
        if over_all:
            sent = jnp.full_like(total, counts.sum())
        return compressor.invert(total / jnp.where(sent > 0, sent, 1), packed.shape)

    return map_packed(combine, messages)
