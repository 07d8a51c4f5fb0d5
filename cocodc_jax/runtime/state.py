"""What a run is made of at one step; everything here goes into a checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from cocodc_jax.sync.fragments import Fragment
from cocodc_jax.sync.schedule import ScheduleState

PyTree = Any


class RegionState(NamedTuple):
    """The regions' own training; every leaf is *regional*, `[R, ...]`.

    Attributes:
      params: local parameters.
      opt_state: the inner optimizer's state, never communicated.
      key: PRNG key data, uint32 `[R, 2]`.
    """

    params: PyTree
    opt_state: PyTree
    key: jax.Array


class OuterState(NamedTuple):
    """What all regions share: one copy, on the outer device, an entry a fragment.

    Attributes:
      params: outer parameters, at least float32.
      opt_states: the outer optimizer's independent states.
    """

    params: tuple[Fragment, ...]
    opt_states: tuple[PyTree, ...]


class InFlight(NamedTuple):
    """A fragment on its way.

    Attributes:
      staged: the regions' own fragment when the sync started, `[R, ...]`, or None if
        the merge has no use for it.
      mean_pseudo_gradient: the mean that will arrive, no region axis.
    """

    staged: Fragment | None
    mean_pseudo_gradient: Fragment


class Observation(NamedTuple):
    """The size of an applied update, which adaptive transmission ranks by.

    Attributes:
      fragment: whose.
      norm: float32 scalar still on its device, so that reading it can wait until
        the schedule has to choose.
    """

    fragment: int
    norm: jax.Array


@dataclasses.dataclass(frozen=True)
class TrainState:
    """A whole run at one step.

    Attributes:
      region: regional arrays, on the inner mesh.
      outer: outer arrays, on the outer device.
      in_flight: syncs started and not yet applied, by fragment.
      schedule: the schedule's memory; None for methods without one.
      observed: applied updates that the schedule has not been told of.
      step: inner steps done.
      bytes_sent: bytes one region has sent.
    """

    region: RegionState
    outer: OuterState
    in_flight: dict[int, InFlight]
    schedule: ScheduleState | None
    observed: tuple[Observation, ...] = ()
    step: int = 0
    bytes_sent: int = 0
