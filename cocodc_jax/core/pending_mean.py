"""A mean that arrives from other regions on a thread, used like an array."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NamedTuple

import jax

PyTree = Any


class MeanResult(NamedTuple):
    """Result of a sync with other regions.

    Attributes:
      mean: mean pseudo-gradient, on the outer device.
      uncounted: this region's own decoded message, if the mean left it out and the
        region keeps its work; else None.
      verdict: which regions the robust mean left out, int32 `[M]`, see `sync.robust`;
        None if there is no filter.
    """

    mean: PyTree
    uncounted: PyTree = None
    verdict: Any = None


class PendingMean:
    """A future mean, a single leaf of a pytree.

    Observers use `is_ready` and `block_until_ready`, as of an array. Consumers call
    `arrived`.
    """

    def __init__(self, future: Future):
        """Wrap a future without waiting for it."""
        self._future = future

    def is_ready(self) -> bool:
        """Return whether the mean has arrived, without waiting."""
        return self._future.done()

    def block_until_ready(self) -> PendingMean:
        """Wait for the mean.

        Raises:
          Exception: the one that the exchange raised.
        """
        jax.block_until_ready(self._future.result().mean)
        return self

    def result(self) -> MeanResult:
        """Wait for the mean and return it."""
        return self._future.result()


def arrived(mean: PyTree) -> PyTree:
    """Return a mean as arrays, waiting for it if it comes from other regions."""
    return landed(mean).mean


def landed(mean: PyTree) -> MeanResult:
    """Return a sync's result, waiting for it if it comes from other regions."""
    return mean.result() if isinstance(mean, PendingMean) else MeanResult(mean)
