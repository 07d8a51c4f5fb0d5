"""PowerSGD: a matrix as the product of two thin ones, by one power iteration.

    P = orthonormalise(M Q);   Q <- M' P;   message (P, Q);   decoded M^ = P Q'

Q of one call is where the next begins (warm start), so while M changes slowly the
iteration converges to its leading singular directions. M^ is M projected on the columns
of P: never longer than M. A tensor is folded into a matrix (`matrix_shape`); one that
rank * (rows + columns) numbers would not shrink is sent whole.

Both factors go through another compressor: `low_rank(rank, factors=int4())` is
DiLoCoX's. Wrap it in `error_feedback`.

`resize` and `effective_rank` are for a rank that changes between rounds.

Source: PowerSGD (Vogels et al., arXiv 1905.13727, algorithm 1) and DiLoCoX (arXiv
2506.21263, from memory, unchecked). Differs from PowerSGD's paper: there P and Q are
averaged over regions between the two products, here a region factorises its own tensor.
A stack of layers is one matrix here, not one for each layer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cocodc_jax.transforms.compressor import (
    Compressor,
    Packed,
    map_packed,
    matrix_shape,
    stateless,
)
from cocodc_jax.transforms.numerics import check_positive


class LowRankState(NamedTuple):
    """State of `low_rank`: `right`, float32 [columns, rank] a leaf, or () if whole."""

    right: tuple


def low_rank(rank: int = 4, factors: Compressor | None = None) -> Compressor:
    """Send a rank-r approximation of each tensor.

    Args:
      rank: columns of both factors.
      factors: stateless compressor for the factors and for tensors sent whole,
        `identity()` if None.

    Raises:
      ValueError: if `rank` is not positive or `factors` keeps a state.

    >>> import jax.numpy as jnp
    >>> from cocodc_jax.transforms.compressor import message_bytes
    >>> compressor = low_rank(rank=1)
    >>> matrix = jnp.outer(jnp.arange(8.0), jnp.arange(6.0))
    >>> message, _ = compressor.encode(matrix, compressor.init(matrix))
    >>> message_bytes(message)  # (8 + 6) float32
    56
    >>> bool(jnp.allclose(compressor.decode(message), matrix, rtol=1e-4, atol=1e-4))
    True
    """
    check_positive("rank", rank)
    inner = stateless("factors", factors)

    def init(tree):
        return LowRankState(
            tuple(_start(i, x.shape, rank) for i, x in enumerate(jax.tree.leaves(tree)))
        )

    def encode(tree, state, key=None):
        leaves, structure = jax.tree.flatten(tree)
        parts, right = [], []
        for x, q in zip(leaves, state.right, strict=True):
            part, q = (x, q) if isinstance(q, tuple) else _factorise(x, q)
            parts.append(part)
            right.append(q)
        encoded, _ = inner.encode(parts, (), key)
        packed = [
            Packed(part, x.shape, x.dtype)
            for x, part in zip(leaves, encoded, strict=True)
        ]
        return jax.tree.unflatten(structure, packed), LowRankState(tuple(right))

    def decode_leaf(packed):
        part = inner.decode(packed.arrays)
        if not isinstance(part, dict):
            return part
        return _product(part["left"], part["right"].T)

    name = f"low_rank({factors.name})" if factors else "low_rank"
    return Compressor(name, init, encode, lambda m: map_packed(decode_leaf, m))


def resize(state: LowRankState, tree, rank: int) -> LowRankState:
    """Carry the warm start over to `low_rank(rank)`: crop columns or add random ones.

    The new columns are those a fresh start would have there, the same in all regions.

    Args:
      state: of `low_rank` with any rank; in `error_feedback` its `inner`.
      tree: what is compressed, or its shapes (`jax.ShapeDtypeStruct`).
      rank: the new rank, static.

    Returns:
      A state with the shapes of `low_rank(rank).init(tree)`; a tensor sent whole at
      one rank and not at the other starts afresh.

    Raises:
      ValueError: if `rank` is not positive.
    """
    check_positive("rank", rank)

    def resized(index, shape, old):
        fresh = _start(index, shape, rank)
        if isinstance(fresh, tuple) or isinstance(old, tuple):
            return fresh
        kept = old[:, :rank]
        return jnp.concatenate([kept, fresh[:, kept.shape[1] :]], axis=1)

    pairs = zip(jax.tree.leaves(tree), state.right, strict=True)
    return LowRankState(tuple(resized(i, x.shape, q) for i, (x, q) in enumerate(pairs)))


def effective_rank(tree) -> jax.Array:
    """Return how many singular values matter: exp of their entropy (DiLoCoX's r).

        p = s / sum(s);   exp(-sum(p log p))      n for n equal values, 1 for one

    The values of a product P Q' whose P is orthonormal are those of Q, so of
    the last message it costs next to nothing: `effective_rank(state.right)` with the
    state that `encode` returned (not one of `init` or `resize`, which hold random
    columns). Such a rank is at most the message's. Of whole matrices it costs their
    singular values.

    Args:
      tree: matrices, or tensors folded as `low_rank` folds them; vectors have rank 1.

    Returns:
      float32 scalar, the mean over the leaves; 1 for zeros. Regions differ in it: to
      agree on a rank they have to average it.

    Raises:
      ValueError: if the tree has no leaves, as when all are sent whole.

    >>> import jax.numpy as jnp
    >>> print(effective_rank(jnp.diag(jnp.array([2.0, 2.0, 0.0]))))
    2.0
    """
    leaves = jax.tree.leaves(tree)
    if not leaves:
        raise ValueError("effective_rank of a tree without leaves is undefined")
    return jnp.mean(jnp.stack([_effective_rank(x) for x in leaves]))


def _effective_rank(x):
    matrix = x.astype(jnp.float32).reshape(matrix_shape(x.shape))
    values = jnp.linalg.svd(matrix, compute_uv=False)
    total = jnp.sum(values)
    shares = values / jnp.where(total > 0, total, 1.0)
    return jnp.exp(jnp.sum(jax.scipy.special.entr(shares)))


def _start(index, shape, rank):
    """Return a random right factor, the same in all regions, or () to send it whole."""
    rows, columns = matrix_shape(shape)
    if rank * (rows + columns) >= rows * columns:
        return ()
    key = jax.random.fold_in(jax.random.key(0), index)
    return jax.random.normal(key, (columns, rank))


def _factorise(x, right):
    """Take one power iteration; return the factors and the next right factor."""
    matrix = x.astype(jnp.float32).reshape(matrix_shape(x.shape))
    left, _ = jnp.linalg.qr(_product(matrix, right))
    new_right = _product(matrix.T, left)
    # A column of zeros would stay zero in all later iterations: keep the old one.
    is_lost = jnp.all(new_right == 0, axis=0, keepdims=True)
    return {"left": left, "right": new_right}, jnp.where(is_lost, right, new_right)


def _product(a, b):
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
