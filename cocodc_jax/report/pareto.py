"""Points of bytes and loss, and those that nothing beats.

A point is on the frontier if no other has less loss for at most its bytes. `frontier`
draws them, and needs Matplotlib.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Point:
    """A configuration on the plane of bytes and loss.

    Attributes:
      label: what it is, in a few words.
      family: method; points of one have one marker and color.
      bytes_per_step: that a region sends, above 0.
      loss: nats per token.
      half: half of the loss's interval, 0 if unknown.
    """

    label: str
    family: str
    bytes_per_step: float
    loss: float
    half: float = 0.0


def pareto(points: Sequence[Point]) -> list[int]:
    """Return the indices of the points on the frontier, by bytes.

    Of points with the same bytes the one of least loss counts; of equal ones the first.

    >>> at = lambda sent, loss: Point("", "", sent, loss)
    >>> pareto([at(4, 2.0), at(1, 3.0), at(2, 3.0), at(8, 1.5)])
    [1, 0, 3]
    """
    order = sorted(
        range(len(points)), key=lambda i: (points[i].bytes_per_step, points[i].loss)
    )
    found: list[int] = []
    for i in order:
        if not found or points[i].loss < points[found[-1]].loss:
            found.append(i)
    return found
