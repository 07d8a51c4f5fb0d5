"""All-reduce by several rings at once: their orders, and how much a region sends.

The shards of a region axis form a circle; ring j passes from shard p to shard
p + s_j (mod D). A stride s_j that is coprime to D visits each shard once, and different
strides use different links. A stride of -s is that of s reversed.

Source: Ravnest (arXiv 2401.01728), from memory. The choice of orders is ours.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.flatten_util import ravel_pytree

from cocodc_jax.sync.messages import Message
from cocodc_jax.transforms.compressor import Compressor
from cocodc_jax.transforms.numerics import check_count

PyTree = Any


@dataclasses.dataclass(frozen=True)
class ByRings(Message):
    """A sum over regions by rings, each of which carries its share of the numbers.

    Attributes:
      num: number of rings, at least 1.
    """

    num: int = 2

    def __post_init__(self):
        """Validate the number."""
        check_count("num_rings", self.num)

    @property
    def only_in_program(self) -> str:
        """Why it must cross inside a compiled program: it uses the inner mesh."""
        return "its rings use the inner mesh"

    @property
    def only_weighted(self) -> str:
        """Why its mean must be a weighted one: there are no separate messages."""
        return "its rings pass on sums"

    def compressed(self, compressor: Compressor) -> Message:
        """Refuse: rings add partial sums.

        Raises:
          ValueError: always.
        """
        raise ValueError(
            "its rings pass on partial sums, which cannot be summed while they are "
            "encoded"
        )

    def num_bytes(self, part: PyTree, num_regions: int, rank: int = 0) -> int:
        """Return the bytes that a region passes on, including padding.

        Reduce-scatter and all-gather: 2 (M - 1) / M of the fragment. Each region counts
        as a shard, also if shards hold several.
        """
        del rank
        flat = jax.eval_shape(lambda x: ravel_pytree(x)[0], part)
        return self.num_sent(flat.size, num_regions) * flat.dtype.itemsize

    def strides(self, num_shards: int) -> tuple[int, ...]:
        """Return the stride of each ring, in [0, num_shards).

        Rings have different strides as long as there are any left, then repeat: up to
        four shards have two orders at most, the two directions.

        >>> ByRings(6).strides(5)
        (1, 4, 2, 3, 1, 4)
        """
        half = range(1, num_shards // 2 + 1)
        known = [s for s in half if math.gcd(s, num_shards) == 1]
        both = [t for s in known for t in dict.fromkeys((s, num_shards - s))]
        both = both or [0]  # A single shard.
        return tuple(both[j % len(both)] for j in range(self.num))

    def chunk_size(self, size: int, num_shards: int) -> int:
        """Return the padded size of one ring's messages."""
        return -(-size // (self.num * num_shards))

    def num_sent(self, size: int, num_shards: int) -> int:
        """Return how many numbers each shard sends to sum `size` of them over all.

        About 2 (M - 1) / M of them: M - 1 chunks of the reduce-scatter, and as many of
        the all-gather.

        >>> ByRings(2).num_sent(1200, 4)
        1800
        """
        chunks = 2 * (num_shards - 1) * self.num
        return chunks * self.chunk_size(size, num_shards)
