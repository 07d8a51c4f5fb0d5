"""The interface of every way that messages cross regions; `transport.py` chooses one.

An `Exchange` sends a fragment's message and never waits: the mean that it returns
arrives later.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from cocodc_jax.core.state import RegionState
from cocodc_jax.sync.fragments import Fragment
from cocodc_jax.sync.schedules.base import Event

PyTree = Any
# Measured seconds of an inner step and of a sync, 0 if not yet known.
Times = tuple[float, float]


class Exchange(abc.ABC):
    """A way for messages to cross regions.

    Attributes:
      shares_mesh: whether a message crosses in a program of the inner mesh.
      goes_on: whether inner steps go on while a mean is late.
    """

    shares_mesh: bool = False
    goes_on: bool = False

    @property
    @abc.abstractmethod
    def num_regions(self) -> int:
        """Maximum number of regions that send messages."""

    @abc.abstractmethod
    def send(
        self,
        event: Event,
        weights: tuple[float, ...],
        times: Times,
        region: RegionState,
        stale_params: Fragment,
        compressor_state: PyTree,
    ) -> tuple[Fragment | None, Any, dict[str, jax.Array], PyTree]:
        """Send a fragment.

        Args:
          event: the start.
          weights: of the regions in the mean, of sum 1. A region of weight 0 does not
            send.
          times: sent with the message if the schedule is measured.
          region: read only.
          stale_params: the outer fragment on the mesh, or what each region last
            received.
          compressor_state: of the regions, of the message's rank.

        Returns:
          The staged copy, if a merge needs it; the mean in flight; side information
          that arrives with it, see `abstract_told`; the compressors' state after it.
        """

    @abc.abstractmethod
    def list_programs(
        self,
        fragment_id: int,
        region: RegionState,
        stale_params: Fragment,
        compressor_state: PyTree,
    ) -> tuple[Callable, tuple]:
        """Return the program of the inner mesh that `send` runs, and its arguments.

        Args:
          fragment_id: which.
          region: abstract, like the other arguments.
          stale_params: as for `send`.
          compressor_state: of the regions, for messages without a rank.
        """

    @abc.abstractmethod
    def abstract_mean(self, fragment_id: int, part: Fragment) -> Fragment:
        """Return a mean in flight as shapes and shardings; `part`: outer fragment."""

    @abc.abstractmethod
    def abstract_told(self, fragment_id: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes and shardings of side information of a mean, by name."""

    def weights(self, weights: tuple[float, ...]) -> jax.Array:
        """Place the regions' weights on the mesh, for segments of inner steps."""
        raise NotImplementedError

    def own_verdict(self, verdict: np.ndarray) -> np.ndarray:
        """Select this program's regions from a verdict on all regions."""
        return verdict
