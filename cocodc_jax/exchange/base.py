"""What the programs of a run are made from, and how messages cross regions.

A `SyncSpec` specifies the syncs. An `Exchange` sends a fragment's message and never
waits: the mean that it returns arrives later; `transport.py` chooses one.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cocodc_jax.core.sync import outer_parts
from cocodc_jax.exchange.programs import Devices
from cocodc_jax.sharding.outer_placement import OuterPlacement
from cocodc_jax.sharding.region_map import LocalRegions
from cocodc_jax.sharding.shardings import Shardings
from cocodc_jax.sync.fragments import Fragment, Fragments
from cocodc_jax.sync.method import Sync
from cocodc_jax.sync.model_state import AnyLossFn, ModelState
from cocodc_jax.sync.needs import STAGED, UserInputs
from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.robust import LENGTH_BYTES, VERDICT
from cocodc_jax.sync.schedules.base import Event

PyTree = Any


@dataclasses.dataclass(frozen=True)
class SyncSpec:
    """A method's syncs, with the model, regions and shardings that they apply to."""

    sync: Sync  # Bound to the regions.
    regions: Regions  # All of them.
    fragments: Fragments  # The cut of the parameters.
    place: OuterPlacement  # Where the outer state is, and the shardings of all arrays.
    params: PyTree  # Shapes of one region's parameters.
    # `(params, batch, key) -> (loss, aux)` of one region; with a `model_state` see
    # there.
    loss_fn: AnyLossFn
    user_inputs: UserInputs  # What only the user knows.
    local: LocalRegions  # How a device computes its regions.
    devices: Devices  # What compiles and runs programs.
    model_state: ModelState | None = None  # Of the model, None if it has none.

    @property
    def shardings(self) -> Shardings:
        """Shardings of all arrays but the outer state's."""
        return self.place.shardings

    @property
    def mesh(self) -> Mesh:
        """The inner mesh."""
        return self.shardings.mesh

    @property
    def is_measured(self) -> bool:
        """Whether measured times are sent with messages."""
        return self.sync.schedule.is_measured

    def staged(self, fragment_id: int) -> Any:
        """Return shardings of the copy that a merge needs, None if it needs none."""
        needed = STAGED in self.sync.copies
        return self.shardings.staged[fragment_id] if needed else None

    def start_step(self, event: Event) -> np.int32 | None:
        """Return the step that a sync's key derives from; None if no average draws."""
        draws = self.sync.message.average.draws
        return np.int32(event.start_step) if draws else None

    @functools.cached_property
    def outer_shapes(self) -> tuple[Fragment, ...]:
        """Shapes of the outer fragments."""
        return jax.eval_shape(lambda x: outer_parts(self.fragments, x), self.params)


# Measured seconds of an inner step and of a sync, 0 if not yet known.
Times = tuple[float, float]
# The staged copy if a merge needs it, the mean in flight, what arrives with it by name,
# and the compressors' state after it.
Sent = tuple[PyTree, Any, dict[str, jax.Array], PyTree]


class Exchange(abc.ABC):
    """A way for messages to cross regions."""

    shares_mesh: bool = False  # A message crosses in a program of the inner mesh.
    goes_on: bool = False  # Inner steps go on while a mean is late.

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
          *arrays: a `RegionState`, which is only read; the outer fragment on the mesh,
            or what each region last received; and the compressors' state of the
            message's rank.
        """

    def num_bytes(self, fragment_id: int, rank: int = 0) -> int:
        """Return the bytes of one region's message; 0 for a single region."""
        spec, num_regions = self._spec, self.num_regions
        if num_regions == 1:
            return 0
        message, part = spec.sync.message, spec.outer_shapes[fragment_id]
        size = message.num_bytes(part, num_regions, rank)
        size += LENGTH_BYTES if spec.sync.robust else 0
        # A pseudo-gradient has columns for the times of all regions.
        times = 1 if message.compressor(rank) is not None else num_regions
        return size + (8 * times if spec.is_measured else 0)

    def arrives_with(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes of what arrives with a mean, by name, as `send` returns it."""
        spec, found = self._spec, {}
        if spec.sync.robust is not None:
            found[VERDICT] = jax.ShapeDtypeStruct((spec.regions.num,), jnp.int32)
        if spec.is_measured:
            found["times"] = jax.ShapeDtypeStruct((spec.regions.num, 2), jnp.float32)
        return found

    def own_verdict(self, verdict: np.ndarray) -> np.ndarray:
        """Select this program's regions from a verdict on all regions."""
        return verdict
