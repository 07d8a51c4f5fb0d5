"""Messages that are summed on their way, by collectives of a compiled program.

- `ByRings`: by several rings at once. The shards of a region axis form a circle; ring j
  passes from shard p to shard p + s_j (mod D). A stride s_j that is coprime to D visits
  each shard once, and different strides use different links. A stride of -s is that of
  s reversed.
- `SummedFactors`: low-rank factors, as PowerSGD has them: two all-reduces, the second
  of which depends on the first, see `transforms.power_sgd`. `messages.Ranked` sends
  each region's own factors instead.

Source of the rings: Ravnest (arXiv 2401.01728), from memory. The orders are ours.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.flatten_util import ravel_pytree

from cocodc_jax.sync.messages import Message
from cocodc_jax.transforms import power_sgd
from cocodc_jax.transforms.layers import is_stack
from cocodc_jax.transforms.numerics import check_at_least

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

    def num_bytes(self, part: PyTree, num_regions: int, rank: int = 0) -> int:
        """Return the bytes that a region passes on: 2 (M - 1) / M, and padding.

        Each region counts as a shard, also if shards hold several.
        """
        flat = jax.eval_shape(lambda x: ravel_pytree(x)[0], self.encoded(part))
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

        >>> ByRings(2).num_sent(1200, 4)
        1800
        """
        chunks = 2 * (num_shards - 1) * self.num
        return chunks * self.chunk_size(size, num_shards)


@dataclasses.dataclass(frozen=True)
class SummedFactors(Message):
    """Both factors of a mean pseudo-gradient, with error feedback.

    Attributes:
      first: the rank, or the initial rank if a schedule sets it.
      follows_rank: whether a schedule sets it.
      has_layers: whether a leaf's first axis is of layers; by default a guess by its
        name.
    """

    first: int
    follows_rank: bool = False
    has_layers: Callable[[str], bool] = is_stack

    only_in_program = "its second factors are made of the sum of all regions' first"
    only_weighted = "its factors are summed on their way"
    why_uncompressed = "its factors are summed as they are; pass sum_factors=False"

    def __post_init__(self):
        check_at_least("rank", self.first, 1)

    @property
    def is_ranked(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the schedule must set a rank for each message."""
        return self.follows_rank

    def init(self, part: PyTree, rank: int = 0) -> power_sgd.PowerSgdState:
        """Return one region's initial state."""
        return power_sgd.init(part, rank or self.first, self.has_layers)

    def restored(self, state: PyTree, fresh: PyTree) -> PyTree:
        """Reset the residual; the right factors are equal in all regions."""
        return fresh._replace(right=state.right)

    def resize(self, state: PyTree, tree: PyTree, rank: int) -> PyTree:
        """Resize a state of any rank to `rank`, for a `tree` of these shapes."""
        return power_sgd.resize(state, tree, rank, self.has_layers)

    def encoded(self, part: PyTree, rank: int = 0) -> PyTree:
        """Return the shapes of what one region adds to the two sums."""

        def both(part):
            state = self.init(part, rank)
            meant = power_sgd.meant(part, state)
            left = power_sgd.first(meant, state.right)
            return left, power_sgd.second(meant, left, state.right)

        return jax.eval_shape(both, part)
