"""PowerSGD in its own order: two sums over regions, the second made from the first.

With A_m what region m has to send, and Q the same in all regions:

    P   = sum_m w_m A_m Q                            the first all-reduce
    P^  = orthonormalise(P)
    Q   <- sum_m w_m A_m' P^                         the second
    A^  = P^ Q'                                      decoded, the same for everybody
    e_m <- A_m - P^ P^' A_m                          A_m = e_m + Delta_m

The power iteration is that of the mean. In `low_rank` each region iterates on its own
tensor, and factors of different tensors cannot be added. A sync costs two round trips.
Tensors that the factors would not shrink are sent whole with P.

Source: PowerSGD (Vogels et al., arXiv 1905.13727, algorithms 1 and 2, from memory). The
residuals' mean is what the mean missed, as with residuals A_m - A^, but the residuals
hold less of the regions' disagreement, and none for a tensor that is sent whole. The
difference shows when a region is left out. Each layer of a stack is factorised
separately.

Each function computes for one region; its caller takes the two sums in between.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cocodc_jax.transforms import low_rank
from cocodc_jax.transforms.layers import is_stack
from cocodc_jax.transforms.numerics import cast_like, wide_zeros, widen

PyTree = Any


class PowerSgdState(NamedTuple):
    """What a region keeps between syncs."""

    # Tree like the one sent, float32 or wider: what has not been sent yet.
    residual: PyTree
    # Q of each leaf, the same in all regions, [columns, rank] or a stack of them; ()
    # for a leaf that is sent whole.
    right: tuple


def init(
    tree: PyTree, rank: int, has_layers: Callable[[str], bool] = is_stack
) -> PowerSgdState:
    """Return the state before the first message."""
    residual = jax.tree.map(wide_zeros, tree)
    right = low_rank.start(tree, rank, has_layers)
    return PowerSgdState(residual, _as_wide(right, residual))


def resize(
    state: PowerSgdState,
    tree: PyTree,
    rank: int,
    has_layers: Callable[[str], bool] = is_stack,
) -> PowerSgdState:
    """Carry the warm start over to another rank; see `low_rank.resize`."""
    old = low_rank.LowRankState(state.right)
    resized = low_rank.resize(old, tree, rank, has_layers).right
    return state._replace(right=_as_wide(resized, state.residual))


def _as_wide(right: tuple, residual: PyTree) -> tuple:
    """Cast every Q to the dtype of its leaf's residual."""
    pairs = zip(right, jax.tree.leaves(residual), strict=True)
    return tuple(q if _is_whole(q) else q.astype(x.dtype) for q, x in pairs)


def _is_whole(right_of_leaf: Any) -> bool:
    """Return whether a leaf is sent whole: its entry of `right` is ()."""
    return isinstance(right_of_leaf, tuple)


def meant(tree: PyTree, state: PowerSgdState) -> PyTree:
    """Return A, what the region has to send: `tree` plus its residual."""
    return jax.tree.map(lambda e, x: e + widen(x), state.residual, tree)


def first(tree: PyTree, right: tuple) -> tuple:
    """Return what is summed first: A Q of each leaf, or the leaf if it is sent whole.

    Args:
      tree: A, see `meant`.
      right: Q of each leaf.
    """
    pairs = zip(jax.tree.leaves(tree), right, strict=True)
    return tuple(
        x if _is_whole(q) else low_rank.product(low_rank.fold(x, q), q)
        for x, q in pairs
    )


def orthonormal(sums: tuple, right: tuple) -> tuple:
    """Return P^ of each leaf; a leaf that is sent whole, as it is.

    Args:
      sums: P of each leaf, the sums of `first`.
      right: Q of each leaf.
    """
    pairs = zip(sums, right, strict=True)
    return tuple(p if _is_whole(q) else jnp.linalg.qr(p)[0] for p, q in pairs)


def second(tree: PyTree, left: tuple, right: tuple) -> tuple:
    """Return what is summed second: A' P^ of each leaf, () if it is sent whole.

    Args:
      tree: A, see `meant`.
      left: P^ of each leaf, see `orthonormal`.
      right: Q of each leaf; only shapes matter.
    """

    def of_leaf(x: Any, p: Any, q: Any) -> Any:
        if _is_whole(q):
            return ()
        return low_rank.product(low_rank.fold(x, q).mT, p)

    return tuple(map(of_leaf, jax.tree.leaves(tree), left, right))


def decoded(left: tuple, new_right: tuple, like: PyTree) -> PyTree:
    """Return A^ = P^ Q'.

    Args:
      left: P^ of each leaf, see `orthonormal`.
      new_right: the new Q of each leaf, the sums of `second`.
      like: tree with the shapes and dtypes of the result.
    """
    leaves, structure = jax.tree.flatten(like)

    def of_leaf(x: Any, p: Any, q: Any) -> Any:
        y = p if _is_whole(q) else low_rank.product(p, q.mT)
        return y.reshape(x.shape)

    return cast_like(structure.unflatten(map(of_leaf, leaves, left, new_right)), like)


def missed(tree: PyTree, left: tuple, region_right: tuple) -> PyTree:
    """Return A - P^ P^' A, the region's next residual.

    Args:
      tree: A, see `meant`.
      left: P^ of each leaf, see `orthonormal`.
      region_right: A' P^ of each leaf, the region's own `second`.
    """
    rows = zip(jax.tree.leaves(tree), left, region_right, strict=True)
    region_left = tuple(x if _is_whole(q) else p for x, p, q in rows)
    return jax.tree.map(jnp.subtract, tree, decoded(region_left, region_right, tree))


def refreshed(new_right: tuple, right: tuple) -> tuple:
    """Return Q for the next sync: the new one, with old columns where it has zeros."""
    return tuple(
        () if _is_whole(q) else low_rank.refreshed(new, q)
        for new, q in zip(new_right, right, strict=True)
    )
