"""PowerSGD in its own order: what regions send is two sums, one made of the other.

With A_m what region m means to send, and Q the same in all regions:

    P   = sum_m w_m A_m Q                            the first all-reduce
    P^  = orthonormalise(P)
    Q   <- sum_m w_m A_m' P^                         the second
    A^  = P^ Q'                                      decoded, the same for everybody
    e_m <- A_m - P^ P^' A_m                          A_m = e_m + Delta_m

The power iteration is that of the mean, where `low_rank` has one of each region's own
tensor, whose factors cannot be added. A sync costs two round trips. Tensors that the
factors would not shrink go whole with P.

Source: PowerSGD (Vogels et al., arXiv 1905.13727, algorithms 1 and 2, from memory). The
residuals' mean is what the mean missed, as with A_m - A^, but less of the regions'
disagreement is in them, which shows when a region is left out: none of a tensor that is
sent whole. Layers of a stack are factorised each by itself.

Each function is of one region; who calls them takes the two sums in between.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cocodc_jax.transforms import low_rank
from cocodc_jax.transforms.layers import is_stack
from cocodc_jax.transforms.numerics import cast_like, wide_zeros, widen


class PowerSgdState(NamedTuple):
    """What a region remembers."""

    residual: Any  # tree like the one sent, float32 or wider, what has not arrived yet.
    # Q of each leaf, the same in all regions, [columns, rank] or a stack of them; ()
    # for a leaf that is sent whole.
    right: tuple


def init(
    tree, rank: int, has_layers: Callable[[str], bool] = is_stack
) -> PowerSgdState:
    """Return the state before the first message."""
    residual = jax.tree.map(wide_zeros, tree)
    return PowerSgdState(
        residual, _as_wide(low_rank.start(tree, rank, has_layers), residual)
    )


def resize(
    state: PowerSgdState,
    tree,
    rank: int,
    has_layers: Callable[[str], bool] = is_stack,
) -> PowerSgdState:
    """Carry the warm start over to another rank; see `low_rank.resize`."""
    old = low_rank.LowRankState(state.right)
    resized = low_rank.resize(old, tree, rank, has_layers).right
    return state._replace(right=_as_wide(resized, state.residual))


def _as_wide(right: tuple, residual) -> tuple:
    """Cast every Q to the dtype of its leaf's residual."""
    pairs = zip(right, jax.tree.leaves(residual), strict=True)
    # An empty tuple, of a leaf sent whole, has nothing to cast.
    return tuple(jax.tree.map(lambda q, x=x: q.astype(x.dtype), q) for q, x in pairs)


def meant(tree, state: PowerSgdState):
    """Return A, what the region means to send: `tree` and what has not arrived yet."""
    return jax.tree.map(lambda e, x: e + widen(x), state.residual, tree)


def first(tree, right: tuple) -> tuple:
    """Return what is summed first: of A, A Q of each leaf, or the leaf itself."""
    pairs = zip(jax.tree.leaves(tree), right, strict=True)
    return tuple(
        x if isinstance(q, tuple) else low_rank.product(low_rank.fold(x, q), q)
        for x, q in pairs
    )


def orthonormal(sums: tuple, right: tuple) -> tuple:
    """Return P^ of each leaf; what is sent whole, as it is."""
    pairs = zip(sums, right, strict=True)
    return tuple(p if isinstance(q, tuple) else jnp.linalg.qr(p)[0] for p, q in pairs)


def second(tree, left: tuple, right: tuple) -> tuple:
    """Return what is summed then: of A, A' P^ of each leaf, () for one sent whole.

    Of `right`, Q of each leaf, only shapes count.
    """

    def of_leaf(x, p, q):
        if isinstance(q, tuple):
            return ()
        return low_rank.product(low_rank.fold(x, q).mT, p)

    return tuple(map(of_leaf, jax.tree.leaves(tree), left, right))


def decoded(left: tuple, sums: tuple, like):
    """Return A^ of P^ and the new Q of each leaf, in shapes and dtypes of `like`."""
    leaves, structure = jax.tree.flatten(like)

    def of_leaf(x, p, q):
        is_whole = isinstance(q, tuple)
        y = p if is_whole else low_rank.product(p, q.mT)
        return y.reshape(x.shape)

    return cast_like(structure.unflatten(map(of_leaf, leaves, left, sums)), like)


def missed(tree, left: tuple, region_sums: tuple):
    """Return what P^ leaves out of A, given the region's own second factors."""
    rows = zip(jax.tree.leaves(tree), left, region_sums, strict=True)
    left = tuple(x if isinstance(q, tuple) else p for x, p, q in rows)
    return jax.tree.map(jnp.subtract, tree, decoded(left, region_sums, tree))


def refreshed(sums: tuple, right: tuple) -> tuple:
    """Return Q for the next time; columns that were lost are the old ones."""
    return tuple(
        () if isinstance(q, tuple) else low_rank.refreshed(new, q)
        for new, q in zip(sums, right, strict=True)
    )
