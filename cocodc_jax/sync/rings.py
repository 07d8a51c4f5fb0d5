"""Several rings at once: who passes on to whom, and how much a region sends.

The places stand in a circle; ring j passes from place p to place p + s_j (mod D). For
every stride s_j that has no factor in common with D this visits each place once, and
different strides use different links. A stride of -s is that of s reversed.

Source: Ravnest (arXiv 2401.01728), from memory; algorithms.md section 10. The choice
of orders is ours.
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Rings:
    """A sum over regions by rings, each of which carries its share of the numbers.

    Attributes:
      num: how many rings, at least 1.
    """

    num: int = 2

    def __post_init__(self):
        """Checks the number.

        Raises:
          ValueError: if it is below 1.
        """
        if self.num < 1:
            raise ValueError(f"num_rings={self.num} must be at least 1")

    def strides(self, num_places: int) -> tuple[int, ...]:
        """The stride of each ring, in [0, num_places).

        Rings differ as long as there are strides left, then begin anew: up to four
        places have two orders at most, the two directions.

        >>> Rings(6).strides(5)
        (1, 4, 2, 3, 1, 4)
        """
        half = range(1, num_places // 2 + 1)
        known = [s for s in half if math.gcd(s, num_places) == 1]
        both = [t for s in known for t in dict.fromkeys((s, num_places - s))]
        both = both or [0]  # One place passes to itself.
        return tuple(both[j % len(both)] for j in range(self.num))

    def chunk_size(self, size: int, num_places: int) -> int:
        """Numbers in a message of one ring: `size` over rings and places, padded."""
        return -(-size // (self.num * num_places))

    def num_sent(self, size: int, num_places: int) -> int:
        """Numbers that each place sends to sum `size` of them over all places.

        About 2 (M - 1) / M of them: M - 1 chunks while summing, and as many while the
        sums go round.

        >>> Rings(2).num_sent(1200, 4)
        1800
        """
        chunks = 2 * (num_places - 1) * self.num
        return chunks * self.chunk_size(size, num_places)
