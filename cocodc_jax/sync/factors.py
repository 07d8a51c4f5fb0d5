"""Low-rank factors that are all-reduced, as PowerSGD does.

A message is two all-reduces, the second of which depends on the first, see
`transforms.power_sgd`. `messages.Ranked` sends each region's own factors instead.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from cocodc_jax.sync.messages import Message
from cocodc_jax.transforms import power_sgd
from cocodc_jax.transforms.compressor import Compressor, message_bytes
from cocodc_jax.transforms.numerics import check_positive

PyTree = Any


@dataclasses.dataclass(frozen=True)
class SummedFactors(Message):
    """Both factors of a mean pseudo-gradient, with error feedback.

    Attributes:
      first: the rank, or the initial rank if a schedule sets it.
      follows_rank: whether a schedule sets it.
    """

    first: int
    follows_rank: bool = False

    def __post_init__(self):
        """Validate the rank."""
        check_positive("rank", self.first)

    @property
    def only_in_program(self) -> str | None:
        """Why it must cross regions inside a compiled program."""
        return "its second factors are made of the sum of all regions' first"

    @property
    def only_weighted(self) -> str:
        """Why its mean must be a weighted one: there are no separate messages."""
        return "its factors are summed on their way"

    @property
    def is_ranked(self) -> bool:
        """Whether the schedule must set a rank for each message."""
        return self.follows_rank

    def compressed(self, compressor: Compressor) -> Message:
        """Refuse: the factors are already compressed.

        Raises:
          ValueError: always.
        """
        raise ValueError("its factors are summed as they are; pass sum_factors=False")

    def init(self, part: PyTree, rank: int = 0) -> power_sgd.PowerSgdState:
        """Return one region's initial state."""
        return power_sgd.init(part, rank or self.first)

    def restored(self, state: PyTree, fresh: PyTree) -> PyTree:
        """Reset the residual; the right factors are equal in all regions."""
        return fresh._replace(right=state.right)

    def resize(self, state: PyTree, tree: PyTree, rank: int) -> PyTree:
        """Resize a state of any rank to `rank`, for a `tree` of these shapes."""
        return power_sgd.resize(state, tree, rank)

    def encoded(self, part: PyTree, rank: int = 0) -> PyTree:
        """Return the shapes of what one region adds to the two sums."""

        def both(part):
            state = self.init(part, rank)
            meant = power_sgd.meant(part, state)
            left = power_sgd.first(meant, state.right)
            return left, power_sgd.second(meant, left, state.right)

        return jax.eval_shape(both, part)

    def num_bytes(self, part: PyTree, num_regions: int, rank: int = 0) -> int:
        """Return the bytes of both factors; see `Message.num_bytes`."""
        del num_regions
        return message_bytes(self.encoded(part, rank))
