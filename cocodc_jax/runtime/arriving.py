"""A mean that no device knows of yet: it comes from other jobs, by a thread."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import jax

PyTree = Any


class Arriving:
    """What stands for a mean until it is there; JAX takes it for one leaf of a tree.

    Who only watches asks it as one asks an array (`is_ready`, `block_until_ready`);
    who needs the mean calls `arrived`.
    """

    def __init__(self, future: Future):
        """Wait for nothing yet.

        Args:
          future: its result is the mean, on the outer device.
        """
        self._future = future

    def is_ready(self) -> bool:
        """Tell, without waiting, whether the mean is there."""
        return self._future.done()

    def block_until_ready(self) -> Arriving:
        """Wait for the mean.

        Raises:
          Exception: whatever kept it from coming.
        """
        jax.block_until_ready(self._future.result())
        return self

    def result(self) -> PyTree:
        """Wait for the mean, and return it."""
        return self._future.result()


def arrived(mean: PyTree) -> PyTree:
    """Return a mean as arrays; waits where it comes from other jobs."""
    return mean.result() if isinstance(mean, Arriving) else mean
