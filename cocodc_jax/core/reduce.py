"""Means over regions inside a program, by the name of a mapped axis.

The axis is one of a mesh inside `jax.shard_map`, or of `jax.vmap`. Pairwise and ring
averages use one permutation, as others are in `engine/crossing.py`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from cocodc_jax.sync.messages import Message, mean_of_finite
from cocodc_jax.sync.outer import RegionalOuter
from cocodc_jax.sync.regions import matchings
from cocodc_jax.sync.summed import ByRings, SummedFactors
from cocodc_jax.transforms import power_sgd
from cocodc_jax.transforms.compressor import Compressor, zeroed
from cocodc_jax.transforms.numerics import is_finite, vary_like

PyTree = Any


def same_in_all(tree: PyTree, axis_name: Any) -> PyTree:
    """Drop the region axis of values that are equal in all regions, under `jax.vmap`.

    A loop bound or predicate must not be batched over regions: the loop would run for
    all of them and select. Elsewhere this is the identity. It never communicates.
    """
    return _of_first(jax.lax.axis_index(axis_name), tree)


@jax.custom_batching.custom_vmap
def _of_first(index: jax.Array, tree: PyTree) -> PyTree:
    return tree  # The index exists only to be batched.


@_of_first.def_vmap
def _(size: int, is_batched: tuple, index: jax.Array, tree: PyTree):
    is_of_regions, each = is_batched
    if not is_of_regions:  # Another `vmap`'s axis.
        return _of_first(index, tree), each
    first = jax.tree.map(lambda x, batched: x[0] if batched else x, tree, each)
    return first, jax.tree.map(lambda _: False, each)


def weighted_mean(
    message: Message, axis_name: Any, weights: np.ndarray
) -> Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]:
    """Make the `reduce` argument of `core.sync.start`; weights `[M]` of sum 1."""
    weight = jnp.asarray(weights, float)[jax.lax.axis_index(axis_name)]

    def weighed(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x * weight.astype(x.dtype), tree)

    def summed(tree: PyTree) -> PyTree:
        return jax.lax.psum(weighed(tree), axis_name)

    def reduce(sent: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        if isinstance(message, SummedFactors):
            return factored(sent, memory, weight, summed, lambda fn: fn, lambda x: x)
        if isinstance(message, ByRings):
            total = ring_sum(weighed(sent), message, axis_name)
            return same_in_all(total, axis_name), memory
        if message.compressor() is None:
            return summed(sent), memory
        gathered = jax.lax.all_gather(sent, axis_name)
        return message.combine(gathered, jnp.asarray(weights, float)), memory

    return reduce


def group_mean(
    outer: RegionalOuter,
    compressor: Compressor,
    message: PyTree,
    axis_name: Any,
    key: jax.Array,
) -> PyTree:
    """Average the decoded messages of a region's group that are finite.

    The key, equal in every region, draws pairs.
    """
    if outer.group == "all":
        gathered = jax.lax.all_gather(message, axis_name)
        return mean_of_finite(gathered, compressor)
    num_regions = jax.lax.axis_size(axis_name)
    if outer.group == "pairs":
        partners = matchings(num_regions)
        matching = jax.random.randint(key, (), 0, len(partners))
        two = message, from_partner(message, matching, partners, axis_name)
    else:
        two = (from_neighbour(message, i, num_regions, axis_name) for i in (-1, 1))
    return mean_of_two(compressor, *two)


def mean_of_two(compressor: Compressor, one: PyTree, other: PyTree) -> PyTree:
    """Return the mean of two decoded messages, or the one that is finite."""
    one_decoded = compressor.decode(one)
    other_decoded = compressor.decode(other)
    one_finite = is_finite(one)
    other_finite = is_finite(other)

    def mean(x, y):
        first = jnp.where(one_finite, x, y)
        second = jnp.where(other_finite, y, x)
        return (first + second) / 2

    return jax.tree.map(mean, one_decoded, other_decoded)


def from_neighbour(
    message: PyTree, by: int, num_regions: int, axis_name: Any
) -> PyTree:
    """Fetch the message of the region `by` positions ahead on the ring, 1 or -1."""
    perm = [(m, (m - by) % num_regions) for m in range(num_regions)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis_name, perm), message)


def from_partner(
    message: PyTree, matching: jax.Array, partners: np.ndarray, axis_name: Any
) -> PyTree:
    """Fetch the partner's message, by the row `matching` of `partners` `[N, M]`.

    The row is an int32 scalar, equal in all regions.
    """
    send = functools.partial(jax.lax.ppermute, axis_name=axis_name)
    perms = [tuple(enumerate(row)) for row in partners.tolist()]
    branches = [functools.partial(send, perm=perm) for perm in perms]
    return jax.lax.switch(matching, branches, message)


def factored(
    delta: PyTree,
    memory: PyTree,
    weight: jax.Array,
    summed: Callable[[PyTree], PyTree],
    each: Callable[[Callable], Callable],
    one: Callable[[jax.Array], jax.Array],
) -> tuple[PyTree, PyTree]:
    """Average low-rank factors, see `transforms.power_sgd`; return also the new memory.

    `delta` and `memory` are of one region, or of several with a leading axis, which
    `each` maps a function over and of which `one` takes the first entry. `summed` is
    the weighted sum over all regions; a state of `weight` 0 keeps its residual, and so
    does that of a region whose `delta` is not finite, which is left out of the sums.
    """
    right = jax.tree.map(one, memory.right)  # Q is equal in all regions.

    def counted(delta, old):
        meant = power_sgd.meant(delta, old)
        finite = is_finite(meant)
        return zeroed(meant, finite), finite

    meant, finite = each(counted)(delta, memory)
    firsts = each(power_sgd.first)(meant, memory.right)
    firsts, shares = summed((firsts, each(shares_of)(finite)))
    left = power_sgd.orthonormal(rescaled(firsts, shares), right)
    seconds = each(lambda tree: power_sgd.second(tree, left, right))(meant)
    sums = rescaled(summed(seconds), shares)
    mean = power_sgd.decoded(left, sums, jax.tree.map(one, delta))
    # Without any, Q stays, as it is multiplied with what regions send next.
    shared = jax.tree.map(
        lambda new, old: jnp.where(shares[0] > 0, new, old),
        power_sgd.refreshed(sums, right),
        right,
    )

    def remembered(meant, own, old, weight, finite):
        missed = power_sgd.missed(meant, left, own)
        pick = functools.partial(jnp.where, (weight > 0) & finite)
        residual = jax.tree.map(pick, missed, old.residual)
        return vary_like(power_sgd.PowerSgdState(residual, shared), old)

    return mean, each(remembered)(meant, seconds, memory, weight, finite)


def shares_of(finite: jax.Array) -> jax.Array:
    """Return float32 `[..., 2]`: whether a region counts, and whether it does not.

    Their weighted sums over regions are the `shares` of `rescaled`.
    """
    return jnp.stack([finite, ~finite], axis=-1).astype(jnp.float32)


def rescaled(sums: PyTree, shares: jax.Array) -> PyTree:
    """Return weighted sums of which some regions were left out, as those of weight 1.

    `shares` `[2]` are the weights in the sum, and those left out. Sums without any are
    NaN. If no region was left out, nothing changes, not by a bit.
    """
    factor = jnp.where(shares[1] > 0, 1 / shares[0], 1)
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), sums)


def ring_sum(tree: PyTree, rings: ByRings, axis_name: Any) -> PyTree:
    """Sum over the axis by several rings at once, each with its own share.

    The leaves are concatenated and dealt to the rings. Each share is cut into one chunk
    per shard. With q a shard's position on a ring of D shards, at each step
    k = 0 .. D - 2 it passes one chunk to the next shard:

        reduce-scatter  chunk q - k, to which the next adds its own; in the end shard q
                        has the full sum of chunk q + 1
        all-gather      chunk q + 1 - k, which the next keeps

    Each shard sends 2 (D - 1) / D of the numbers. Each chunk is summed once and copied,
    so all shards end with the same bits. `sync/summed.py` has the orders of the rings.
    """
    num = jax.lax.axis_size(axis_name)
    flat, restore = ravel_pytree(tree)
    chunk = rings.chunk_size(flat.size, num)
    padded = jnp.pad(flat, (0, rings.num * num * chunk - flat.size))
    shares = tuple(padded.reshape(rings.num, num, chunk))
    shard, strides = jax.lax.axis_index(axis_name), rings.strides(num)
    perms = [[(p, (p + s) % num) for p in range(num)] for s in strides]
    # Position q is shard q s, so a shard's position is its index times s inverted.
    positions = [shard * (pow(s, -1, num) if num > 1 else 0) for s in strides]

    def pass_on(share, perm, sent):
        return jax.lax.ppermute(share[sent % num], axis_name, perm)

    def add(k, shares):
        return tuple(
            share.at[(q - k - 1) % num].add(pass_on(share, perm, q - k))
            for share, perm, q in zip(shares, perms, positions, strict=True)
        )

    def keep(k, shares):
        return tuple(
            share.at[(q - k) % num].set(pass_on(share, perm, q + 1 - k))
            for share, perm, q in zip(shares, perms, positions, strict=True)
        )

    shares = jax.lax.fori_loop(0, num - 1, add, shares)
    shares = jax.lax.fori_loop(0, num - 1, keep, shares)
    return restore(jnp.stack(shares).ravel()[: flat.size])
