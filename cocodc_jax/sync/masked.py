"""A message with a core that all regions share, and entries that one region owns."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from cocodc_jax.sync.messages import Message
from cocodc_jax.transforms.compressor import Compressor
from cocodc_jax.transforms.masked import masked, weigh_owned

PyTree = Any


@dataclasses.dataclass(frozen=True)
class MaskedCore(Message):
    """A core of everything, and the residual of the entries that a region owns.

    Attributes:
      core: compressor of the core.
      density: share of the entries that a region owns.
      seed: of the owned entries, equal in every region.
      num_regions: M, set by `bind`.
    """

    core: Compressor
    density: float
    seed: int = 0
    num_regions: int = 1

    @property
    def is_numbered(self) -> bool:
        """Whether a region needs its index: it selects its entries."""
        return True

    @property
    def only_weighted(self) -> str:
        """Why its mean must be a weighted one: entries have owners."""
        return "a region's message does not have every entry"

    def compressor(self, rank: int = 0) -> Compressor:
        """Return the compressor, the same for every rank."""
        del rank
        return masked(self.core, self.density, self.num_regions, self.seed)

    def compressed(self, compressor: Compressor) -> Message:
        """Return the message with another core."""
        return dataclasses.replace(self, core=compressor)

    def combine(self, messages: PyTree, weights: jax.Array, rank: int = 0) -> PyTree:
        """Return the mean of cores over all, of entries over their owners."""
        messages = weigh_owned(messages, weights, self.core, self.density)
        return super().combine(messages, weights, rank)

    def bind(self, num_regions: int) -> Message:
        """Return the message for this number of regions."""
        return dataclasses.replace(self, num_regions=num_regions)

    def of_regions(self, state: PyTree) -> PyTree:
        """Return the regions' compressor states, each with its index."""
        return state._replace(region=jnp.arange(self.num_regions, dtype=jnp.int32))
