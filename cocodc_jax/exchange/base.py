"""What every way between regions offers; `transport.py` resolves it once.

An `Exchange` sends a fragment's message and never waits: what it returns as the mean
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
# Seconds of an inner step and of a sync as a process has measured them, 0 for not yet.
Times = tuple[float, float]


class Exchange(abc.ABC):
    """A way for messages to cross.

    Attributes:
      shares_mesh: whether a message crosses in a program of the inner mesh.
      goes_on: whether inner steps go on where a mean is late.
    """

    shares_mesh: bool = False
    goes_on: bool = False

    @property
    @abc.abstractmethod
    def num_regions(self) -> int:
        """Regions whose messages there are at most."""

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
          weights: of the regions in the mean, of sum 1. One of weight 0 does not send.
          times: they go with the message where the schedule is measured.
          region: read only.
          stale_params: the outer fragment on the mesh, or what each region last took.
          compressor_state: of the regions, of the message's rank.

        Returns:
          The staged copy, if anyone needs it; the mean, on its way; side information
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
          region: abstract, as the others are.
          stale_params: as of `send`.
          compressor_state: of the regions, of a message without a rank.
        """

    @abc.abstractmethod
    def abstract_mean(self, fragment_id: int, part: Fragment) -> Fragment:
        """Return shapes and shardings of a mean on its way; `part` the outer one's."""

    @abc.abstractmethod
    def abstract_told(self, fragment_id: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes and shardings of what arrives with a mean, by name."""

    def weights(self, weights: tuple[float, ...]) -> jax.Array:
        """Place the regions' weights with them, for segments of inner steps."""
        raise NotImplementedError

    def own_verdict(self, verdict: np.ndarray) -> np.ndarray:
        """Return of a verdict on all regions that on the regions of this program."""
        return verdict
