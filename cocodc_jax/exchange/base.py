"""The interface of every way that messages cross regions; `transport.py` chooses one.

An `Exchange` sends a fragment's message and never waits: the mean that it returns
arrives later.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.exchange.sync_spec import SyncSpec
from cocodc_jax.sync.robust import VERDICT
from cocodc_jax.sync.schedules.base import Event

PyTree = Any
# Measured seconds of an inner step and of a sync, 0 if not yet known.
Times = tuple[float, float]
# The staged copy if a merge needs it, the mean in flight, what arrives with it by name,
# and the compressors' state after it.
Sent = tuple[PyTree, Any, dict[str, jax.Array], PyTree]


class Exchange(abc.ABC):
    """A way for messages to cross regions.

    The arrays of a message are a `RegionState`, which is only read; the outer fragment
    on the mesh, or what each region last received; and the compressors' state of the
    message's rank.

    Attributes:
      shares_mesh: whether a message crosses in a program of the inner mesh.
      goes_on: whether inner steps go on while a mean is late.
    """

    shares_mesh: bool = False
    goes_on: bool = False

    def __init__(self, spec: SyncSpec):
        """Compile nothing."""
        self._spec = spec

    @property
    def num_regions(self) -> int:
        """Maximum number of regions that send messages."""
        return self._spec.regions.num

    @abc.abstractmethod
    def send(
        self, event: Event, weights: tuple[float, ...], times: Times, *arrays: Any
    ) -> Sent:
        """Send a fragment.

        Args:
          event: the start.
          weights: of the regions in the mean, of sum 1. A region of weight 0 does not
            send.
          times: sent with the message if the schedule is measured.
          *arrays: of the message, see the class.
        """

    @abc.abstractmethod
    def list_programs(self, fragment_id: int, *arrays: Any) -> tuple[Callable, tuple]:
        """Return the program of the inner mesh that `send` runs, and its arguments.

        Args:
          fragment_id: which.
          *arrays: shapes and shardings of a message without a rank, see the class.
        """

    def arrives_with(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes of what arrives with a mean, by name, as `send` returns it."""
        spec, found = self._spec, {}
        if spec.sync.robust is not None:
            found[VERDICT] = jax.ShapeDtypeStruct((spec.regions.num,), jnp.int32)
        if spec.is_measured:
            found["times"] = jax.ShapeDtypeStruct((spec.regions.num, 2), jnp.float32)
        return found

    def weights(self, weights: tuple[float, ...]) -> jax.Array:
        """Place the regions' weights on the mesh, for segments of inner steps."""
        raise NotImplementedError

    def own_verdict(self, verdict: np.ndarray) -> np.ndarray:
        """Select this program's regions from a verdict on all regions."""
        return verdict
