"""A mean that no device knows of yet: it comes from other jobs, by a thread."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NamedTuple

import jax

PyTree = Any


class MeanResult(NamedTuple):
    """What came of a sync.

    Attributes:
      mean: on the outer device.
      uncounted: this region's own message, decoded there, if the mean is not of it and
        its work is kept; else None.
      verdict: who was left out of the mean, int32 `[M]` there, see `sync.robust`; None
        where nobody is judged.
    """

    mean: PyTree
    uncounted: PyTree = None
    verdict: Any = None


class PendingMean:
    """What stands for a mean until it is there; JAX takes it for one leaf of a tree.

    Who only watches asks it as one asks an array (`is_ready`, `block_until_ready`);
    who needs the mean calls `arrived`.
    """

    def __init__(self, future: Future):
        """Wait for nothing yet.

        Args:
          future: its result is a `MeanResult`.
        """
        self._future = future

    def is_ready(self) -> bool:
        """Tell, without waiting, whether the mean is there."""
        return self._future.done()

    def block_until_ready(self) -> PendingMean:
        """Wait for the mean.

        Raises:
          Exception: whatever kept it from coming.
        """
        jax.block_until_ready(self._future.result().mean)
        return self

    def result(self) -> MeanResult:
        """Wait for the mean, and return what came."""
        return self._future.result()


def arrived(mean: PyTree) -> PyTree:
    """Return a mean as arrays; waits where it comes from other jobs."""
    return landed(mean).mean


def landed(mean: PyTree) -> MeanResult:
    """Return what came of a sync; waits where it comes from other jobs."""
    return mean.result() if isinstance(mean, PendingMean) else MeanResult(mean)
