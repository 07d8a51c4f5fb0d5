"""Messages that are summed while they cross, by collectives of a compiled program.

- `ByRings`: by several rings at once. The shards of a region axis form a circle; ring j
  passes from shard p to shard p + s_j (mod D). A stride s_j that is coprime to D visits
  each shard once, and different strides use different links. A stride of -s is that of
  s reversed.
- `SummedFactors`: low-rank factors as in PowerSGD: two all-reduces, the second of which
  depends on the first, see `transforms.power_sgd`. `messages.Ranked` sends each
  region's own factors instead.

Source of the rings: Ravnest (arXiv 2401.01728), from memory. The orders are ours.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from cocodc_jax.sync.averages import rescaled, shares_of
from cocodc_jax.sync.axis import BY_RINGS, Axis
from cocodc_jax.sync.messages import Message
from cocodc_jax.transforms import power_sgd
from cocodc_jax.transforms.compressor import zeroed
from cocodc_jax.transforms.layers import is_stack
from cocodc_jax.transforms.numerics import check_at_least, is_finite, vary_like

PyTree = Any


@dataclasses.dataclass(frozen=True)
class ByRings(Message):
    """A sum over regions by rings, each of which carries its share of the numbers.

    Attributes:
      num: number of rings, at least 1.
    """

    num: int = 2

    only_in_program = "its rings use the inner mesh"
    only_weighted = "its rings pass on sums"
    why_uncompressed = (
        "its rings pass on partial sums, which cannot be summed while they are encoded"
    )

    def __post_init__(self):
        check_at_least("num_rings", self.num, 1)

    @property
    def way(self) -> str:
        """How it crosses regions, see `sync.axis`."""
        return BY_RINGS

    def leave(
        self, axis: Axis, sent: PyTree, memory: PyTree, weights: jax.Array
    ) -> tuple[PyTree, PyTree]:
        """Return what the rings sum, see `Message.leave`."""
        return axis.weighed(sent, weights), memory

    def ring_sum(self, tree: PyTree, axis_name: Any) -> PyTree:
        """Sum over an axis by the rings, see `ring_sum` below."""
        return ring_sum(tree, self, axis_name)

    def num_bytes(self, part: PyTree, num_regions: int) -> int:
        """Return the bytes that a region sends: 2 (M - 1) / M of all, and padding.

        Each region counts as a shard, also if shards hold several.
        """
        flat = jax.eval_shape(lambda x: ravel_pytree(x)[0], self.encoded(part))
        return self.num_sent(flat.size, num_regions) * flat.dtype.itemsize

    def strides(self, num_shards: int) -> tuple[int, ...]:
        """Return the stride of each ring, in [0, num_shards).

        Rings have different strides until all are used, then strides repeat. Up to four
        shards have at most two orders, the two directions.

        >>> ByRings(6).strides(5)
        (1, 4, 2, 3, 1, 4)
        """
        strides = []
        for stride in range(1, num_shards // 2 + 1):
            if math.gcd(stride, num_shards) == 1:
                # Both directions, which are one stride where they are equal.
                strides += dict.fromkeys((stride, num_shards - stride))

        strides = strides or [0]  # A single shard.
        return tuple(strides[j % len(strides)] for j in range(self.num))

    def chunk_size(self, size: int, num_shards: int) -> int:
        """Return the padded size of one ring's messages."""
        return -(-size // (self.num * num_shards))

    def num_sent(self, size: int, num_shards: int) -> int:
        """Return how many numbers each shard sends to sum `size` numbers over shards.

        >>> ByRings(2).num_sent(1200, 4)
        1800
        """
        chunks = 2 * (num_shards - 1) * self.num
        return chunks * self.chunk_size(size, num_shards)


@dataclasses.dataclass(frozen=True)
class SummedFactors(Message):
    """Both factors of a mean pseudo-gradient, with error feedback.

    Attributes:
      rank: of this message; in a method, the initial one if a schedule sets it.
      follows_rank: whether a schedule sets it.
      has_layers: whether a leaf's first axis is of layers; by default a guess by its
        name.
    """

    rank: int
    follows_rank: bool = False
    has_layers: Callable[[str], bool] = is_stack

    only_in_program = "its second factors are made of the sum of all regions' first"
    only_weighted = "its factors are summed on their way"
    why_uncompressed = "its factors are summed as they are; pass sum_factors=False"

    def __post_init__(self):
        check_at_least("rank", self.rank, 1)

    @property
    def is_ranked(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the schedule must set a rank for each message."""
        return self.follows_rank

    def at(self, rank: int) -> SummedFactors:
        """Return the message of a rank; 0 is this one."""
        return dataclasses.replace(self, rank=rank) if rank else self

    def leave(
        self, axis: Axis, sent: PyTree, memory: PyTree, weights: jax.Array
    ) -> tuple[PyTree, PyTree]:
        """Average the factors, see `transforms.power_sgd`, and update the memory.

        A region of weight 0 keeps its residual, and so does one whose pseudo-gradient
        is not finite, which is left out of the sums.
        """
        right = jax.tree.map(axis.first, memory.right)  # Q is equal in all regions.

        def counted(delta: PyTree, old: power_sgd.PowerSgdState):
            meant = power_sgd.meant(delta, old)
            finite = is_finite(meant)
            return zeroed(meant, finite), finite

        meant, finite = axis.map(counted)(sent, memory)
        firsts = axis.map(power_sgd.first)(meant, memory.right)
        firsts, shares = axis.sum((firsts, axis.map(shares_of)(finite)), weights)
        left = power_sgd.orthonormal(rescaled(firsts, shares), right)

        seconds = axis.map(lambda tree: power_sgd.second(tree, left, right))(meant)
        sums = rescaled(axis.sum(seconds, weights), shares)
        mean = power_sgd.decoded(left, sums, jax.tree.map(axis.first, sent))
        # Without any, Q stays, as it is multiplied with what regions send next.
        shared = jax.tree.map(
            lambda new, old: jnp.where(shares[0] > 0, new, old),
            power_sgd.refreshed(sums, right),
            right,
        )

        def remembered(
            meant: PyTree,
            second: PyTree,
            old: power_sgd.PowerSgdState,
            weight: jax.Array,
            finite: jax.Array,
        ) -> power_sgd.PowerSgdState:
            missed = power_sgd.missed(meant, left, second)
            pick = functools.partial(jnp.where, (weight > 0) & finite)
            residual = jax.tree.map(pick, missed, old.residual)
            return vary_like(power_sgd.PowerSgdState(residual, shared), old)

        memory = axis.map(remembered)(meant, seconds, memory, weights, finite)
        return mean, memory

    def init(self, part: PyTree) -> power_sgd.PowerSgdState:
        """Return one region's initial state."""
        return power_sgd.init(part, self.rank, self.has_layers)

    def restored(self, state: PyTree, fresh: PyTree) -> PyTree:
        """Reset the residual; the right factors are equal in all regions."""
        return fresh._replace(right=state.right)

    def resized(self, state: PyTree, part: PyTree) -> PyTree:
        """Return a state of any rank as one of this; see `Message.resized`."""
        return power_sgd.resize(state, part, self.rank, self.has_layers)

    def encoded(self, part: PyTree) -> PyTree:
        """Return the shapes of one region's terms of the two sums."""

        def factors(part: PyTree) -> tuple[PyTree, PyTree]:
            state = self.init(part)
            meant = power_sgd.meant(part, state)
            left = power_sgd.first(meant, state.right)
            return left, power_sgd.second(meant, left, state.right)

        return jax.eval_shape(factors, part)


def ring_sum(tree: PyTree, rings: ByRings, axis_name: Any) -> PyTree:
    """Sum over the axis by several rings at once, each with its own share.

    The leaves are concatenated and divided between the rings. Each share is cut into
    one chunk per shard. With q a shard's position on a ring of D shards, at each step
    k = 0 .. D - 2 it sends one chunk to the next shard:

        reduce-scatter  chunk q - k, to which the next adds its own; in the end shard q
                        has the full sum of chunk q + 1
        all-gather      chunk q + 1 - k, which the next keeps

    Each shard sends 2 (D - 1) / D of the numbers. Each chunk is summed once and copied,
    so all shards end with the same bits. `ByRings.strides` has the orders of the rings.
    """
    num = jax.lax.axis_size(axis_name)
    flat, restore = ravel_pytree(tree)
    chunk = rings.chunk_size(flat.size, num)
    padded = jnp.pad(flat, (0, rings.num * num * chunk - flat.size))
    shares = tuple(padded.reshape(rings.num, num, chunk))

    # Position q is shard q s, so a shard's position is its index times s inverted.
    shard = jax.lax.axis_index(axis_name)
    strides = rings.strides(num)
    perms = [[(p, (p + s) % num) for p in range(num)] for s in strides]
    positions = [shard * (pow(s, -1, num) if num > 1 else 0) for s in strides]

    def pass_on(share: jax.Array, perm: list, sent: jax.Array) -> jax.Array:
        return jax.lax.ppermute(share[sent % num], axis_name, perm)

    def add(k: jax.Array, shares: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(
            share.at[(q - k - 1) % num].add(pass_on(share, perm, q - k))
            for share, perm, q in zip(shares, perms, positions, strict=True)
        )

    def keep(k: jax.Array, shares: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(
            share.at[(q - k) % num].set(pass_on(share, perm, q + 1 - k))
            for share, perm, q in zip(shares, perms, positions, strict=True)
        )

    sums = jax.lax.fori_loop(0, num - 1, add, shares)
    sums = jax.lax.fori_loop(0, num - 1, keep, sums)
    return restore(jnp.stack(sums).ravel()[: flat.size])
