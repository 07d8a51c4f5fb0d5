"""The specification that all programs of a run are made from."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh

from cocodc_jax.core.sync import outer_parts
from cocodc_jax.sharding.local_regions import LocalRegions
from cocodc_jax.sharding.outer_placement import OuterPlacement
from cocodc_jax.sharding.shardings import Shardings
from cocodc_jax.sync.fragments import Fragment, Fragments
from cocodc_jax.sync.method import Sync
from cocodc_jax.sync.model_state import AnyLossFn, ModelState
from cocodc_jax.sync.needs import UserInputs
from cocodc_jax.sync.regions import Regions

PyTree = Any


@dataclasses.dataclass(frozen=True)
class SyncSpec:
    """A method's syncs, with the model, regions and shardings that they apply to.

    Attributes:
      sync: bound to the regions.
      regions: all of them.
      fragments: the cut of the parameters.
      place: where the outer state is, and the shardings of all arrays.
      params: shapes of one region's parameters.
      loss_fn: `(params, batch, key) -> (loss, aux)` of one region; with a `model_state`
        see there.
      user_inputs: what only the user knows.
      local: how a device computes its regions.
      model_state: of the model, None if it has none.
    """

    sync: Sync
    regions: Regions
    fragments: Fragments
    place: OuterPlacement
    params: PyTree
    loss_fn: AnyLossFn
    user_inputs: UserInputs
    local: LocalRegions
    model_state: ModelState | None = None

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

    @functools.cached_property
    def outer_shapes(self) -> tuple[Fragment, ...]:
        """Shapes of the outer fragments."""
        return jax.eval_shape(lambda x: outer_parts(self.fragments, x), self.params)
