"""PowerSGD: a matrix as the product of two thin ones, by one power iteration.

    P = orthonormalise(M Q);   Q <- M' P;   message (P, Q);   decoded M^ = P Q'

The next call starts from Q (warm start), so while M changes slowly the iteration
converges to its leading singular directions. M^ is M projected on the columns of P, and
so never longer than M. A tensor is folded into a matrix (`matrix_shape`), and so is
each layer of a stack (`layers.is_stack`). A tensor that rank * (rows + columns) numbers
would not shrink is sent whole.

Another compressor encodes both factors: `low_rank(rank, factors=int4())` is DiLoCoX's.
Wrap it in `error_feedback`.

Source: PowerSGD (Vogels et al., arXiv 1905.13727, algorithm 1) and DiLoCoX (arXiv
2506.21263, from memory, unchecked). Differs from PowerSGD's paper: there P and Q are
averaged over regions between the two products (`power_sgd` does that), here a region
factorises its own tensor.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.transforms.compressor import (
    Compressor,
    Packed,
    check_floats,
    check_state,
    keep_finite,
    map_packed,
    matrix_shape,
    stateless,
)
from cocodc_jax.transforms.layers import is_stack, named_leaves
from cocodc_jax.transforms.numerics import check_at_least


class LowRankState(NamedTuple):
    """Memory of `low_rank`: `right`, a leaf's next Q, or () if it is sent whole.

    float32 [columns, rank], of a stack [layers, columns, rank].
    """

    right: tuple


def low_rank(
    rank: int = 4,
    factors: Compressor | None = None,
    has_layers: Callable[[str], bool] = is_stack,
) -> Compressor:
    """Send a rank-r approximation of each tensor.

    Args:
      rank: columns of both factors.
      factors: stateless compressor for the factors and for tensors sent whole,
        `identity()` if None.
      has_layers: `has_layers(path) -> bool`, whether a leaf's first axis is of layers;
        by default a guess by its name.

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
    check_at_least("rank", rank, 1)
    inner = stateless("factors", factors)

    def init(tree: Any) -> LowRankState:
        return LowRankState(start(tree, rank, has_layers))

    def encode(
        tree: Any, memory: Any, key: jax.Array | None = None
    ) -> tuple[Any, LowRankState]:
        check_floats(name, tree)
        fresh = jax.eval_shape(lambda: start(tree, rank, has_layers))
        shapes = [np.shape(q) for q in fresh]  # (0,) of ().
        check_state(name, memory, LowRankState, lambda m: m.right, tree, shapes)

        leaves, structure = jax.tree.flatten(tree)
        parts = []
        right = []
        for x, q in zip(leaves, memory.right, strict=True):
            is_whole = isinstance(q, tuple)
            part, next_q = (x, q) if is_whole else _factorise(x, q)
            parts.append(part)
            right.append(next_q)

        encoded, _ = inner.encode(parts, (), key)
        packed = [
            Packed(part, x.shape, x.dtype)
            for x, part in zip(leaves, encoded, strict=True)
        ]

        return jax.tree.unflatten(structure, packed), LowRankState(tuple(right))

    def decode_leaf(packed: Packed) -> jax.Array:
        part = inner.decode(packed.arrays)
        if not isinstance(part, dict):
            return part
        return product(part["left"], part["right"].mT)

    def decode(message: Any) -> Any:
        return map_packed(decode_leaf, message)

    name = f"low_rank({factors.name})" if factors else "low_rank"
    return keep_finite(
        Compressor(name, init, encode, decode, is_sparse=inner.is_sparse)
    )


def resize(
    state: LowRankState,
    tree,
    rank: int,
    has_layers: Callable[[str], bool] = is_stack,
) -> LowRankState:
    """Carry the warm start over to `low_rank(rank)`: crop columns or add random ones.

    The new columns are those of a fresh start, equal in all regions.

    Args:
      state: of `low_rank` with any rank; in `error_feedback` its `inner`.
      tree: what is compressed, or its shapes (`jax.ShapeDtypeStruct`).
      rank: the new rank, static.
      has_layers: as of `low_rank`.

    Returns:
      A state with the shapes of `low_rank(rank).init(tree)`; a tensor that is sent
      whole at one rank and not at the other starts afresh.
    """
    check_at_least("rank", rank, 1)

    def resized(fresh: Any, old: Any) -> Any:
        if isinstance(fresh, tuple) or isinstance(old, tuple):
            return fresh
        kept = old[..., :rank]
        return jnp.concatenate([kept, fresh[..., kept.shape[-1] :]], axis=-1)

    pairs = zip(start(tree, rank, has_layers), state.right, strict=True)
    return LowRankState(tuple(resized(fresh, old) for fresh, old in pairs))


def effective_rank(tree, has_layers: Callable[[str], bool] = is_stack) -> jax.Array:
    """Return how many singular values matter: exp of their entropy (DiLoCoX's r).

        p = s / sum(s);   exp(-sum(p log p))      n for n equal values, 1 for one

    The singular values of a product P Q' whose P is orthonormal are those of Q. So that
    of the last message costs almost nothing: `effective_rank(state.right)` with the
    state that `encode` returned. It must not be one of `init` or `resize`, which hold
    random columns, nor of stacks, which only their paths distinguish from tensors.

    Args:
      tree: matrices, or tensors folded as `low_rank` folds them, a stack of layers
        layer by layer; vectors have rank 1.
      has_layers: as of `low_rank`.

    Returns:
      float32 scalar, the mean over the leaves, and over the layers of a stack; 1 for
      zeros. It differs between regions, which must average it to agree on a rank.

    Raises:
      ValueError: if the tree has no leaves, as when all are sent whole.

    >>> import jax.numpy as jnp
    >>> print(effective_rank(jnp.diag(jnp.array([2.0, 2.0, 0.0]))))
    2.0
    """
    leaves = named_leaves(tree)
    if not leaves:
        raise ValueError("effective_rank of a tree without leaves is undefined")
    ranks = [_effective_rank(has_layers(path), x) for path, x in leaves]
    return jnp.mean(jnp.stack(ranks))


def _effective_rank(is_stacked, x):
    stack, shape = _matrices(is_stacked, x.shape)
    matrices = x.astype(jnp.float32).reshape(*stack, *shape)
    values = jnp.linalg.svd(matrices, compute_uv=False)
    total = jnp.sum(values, axis=-1, keepdims=True)
    shares = values / jnp.where(total > 0, total, 1.0)
    return jnp.mean(jnp.exp(jnp.sum(jax.scipy.special.entr(shares), axis=-1)))


def _matrices(is_stacked, shape):
    """Return a leaf's stack axes, (layers,) or (), and each matrix's shape."""
    stack = shape[: int(is_stacked)]
    return stack, matrix_shape(shape[len(stack) :])


def start(tree, rank: int, has_layers: Callable[[str], bool] = is_stack) -> tuple:
    """Return random right factors, equal in all regions; () for leaves sent whole."""

    def of_leaf(index: int, path: str, x: Any) -> Any:
        stack, (rows, columns) = _matrices(has_layers(path), jnp.shape(x))
        if rank * (rows + columns) >= rows * columns:
            return ()

        key = jax.random.fold_in(jax.random.key(0), index)
        return jax.random.normal(key, (*stack, columns, rank), jnp.float32)

    leaves = enumerate(named_leaves(tree))
    return tuple(of_leaf(i, path, x) for i, (path, x) in leaves)


def fold(x: jax.Array, right: jax.Array) -> jax.Array:
    """Fold a tensor to the [rows, columns], or a stack of them, that `right` is for."""
    return x.reshape(*right.shape[:-2], -1, right.shape[-2])


def refreshed(new_right: jax.Array, right: jax.Array) -> jax.Array:
    """Keep an old column where the new one is lost, as zeros would stay zeros."""
    is_lost = jnp.all(new_right == 0, axis=-2, keepdims=True)
    return jnp.where(is_lost, right, new_right)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply matrices, or stacks of them, without rounding the factors first."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _factorise(x, right):
    """Take one power iteration; return the factors and the next right factor."""
    matrix = fold(jnp.asarray(x).astype(jnp.float32), right)
    left, _ = jnp.linalg.qr(product(matrix, right))
    new_right = product(matrix.mT, left)
    return {"left": left, "right": new_right}, refreshed(new_right, right)
