"""What a run is made of at one step; everything here goes into a checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from cocodc_jax.sync.events import ScheduleState
from cocodc_jax.sync.fragments import Fragment

PyTree = Any


class RegionState(NamedTuple):
    """The regions' own training; every leaf is *regional*, `[R, ...]`.

    Attributes:
      params: local parameters.
      opt_state: the inner optimizer's state, never communicated.
      key: PRNG key data, uint32 `[R, 2]`.
      sender: state of what is sent at every step, `()` if nothing is.
    """

    params: PyTree
    opt_state: PyTree
    key: jax.Array
    sender: PyTree = ()


class OuterState(NamedTuple):
    """The outer side of a run, an entry a fragment.

    One copy for all regions, on the outer device or laid over the mesh; where outer
    parameters are regional every leaf is `[R, ...]`, on the mesh.

    Attributes:
      params: outer parameters, at least float32.
      opt_states: the outer optimizer's independent states.
    """

    params: tuple[Fragment, ...]
    opt_states: tuple[PyTree, ...]

    def updated(self, fragment: int, params: Fragment, opt_state: PyTree) -> OuterState:
        """The same with the entries of one fragment replaced."""
        return OuterState(
            replaced(self.params, fragment, params),
            replaced(self.opt_states, fragment, opt_state),
        )


class Sender(NamedTuple):
    """What regions keep of a fragment between two messages; regional, `[R, ...]`.

    Attributes:
      state: the compressor's, such as what error feedback has not sent yet.
      anchor: the outer fragment each region last took; None unless regions take it at
        different times.
    """

    state: PyTree
    anchor: Fragment | None = None


def replaced(entries: tuple, index: int, entry: Any) -> tuple:
    """`entries`, one a fragment, with one of them replaced."""
    return (*entries[:index], entry, *entries[index + 1 :])


class InFlight(NamedTuple):
    """A fragment on its way.

    Attributes:
      staged: the regions' own fragment when the sync started, `[R, ...]`, or None if
        the merge has no use for it.
      mean_pseudo_gradient: the mean that will arrive, no region axis unless every
        pair of regions has its own.
      midway: the regions' own fragment halfway to the merge, `[R, ...]`, or None if it
        is not there yet or the merge has no use for it.
      reference: the outer fragment when the sync started, or None if the outer
        optimizer has no use for it.
      times: what regions had measured when they sent it, float32 `[R, 2]`: seconds of
        an inner step and of a sync, 0 for not yet; it arrives with the mean. None
        unless the schedule measures.
    """

    staged: Fragment | None
    mean_pseudo_gradient: PyTree
    reference: Fragment | None = None
    midway: Fragment | None = None
    times: jax.Array | None = None


class Observation(NamedTuple):
    """What a schedule wants to know of an applied update.

    Still on its device, so that reading it can wait until the schedule has to choose.

    Attributes:
      fragment: whose.
      value: float32 scalar, its norm or effective rank (`Schedule.observes`).
      times: as `InFlight.times`.
    """

    fragment: int
    value: jax.Array
    times: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class TrainState:
    """A whole run at one step.

    Attributes:
      region: regional arrays, on the inner mesh.
      outer: outer parameters and optimizer states.
      in_flight: syncs started and not yet applied, by fragment.
      schedule: the schedule's memory; None for methods without one.
      senders: what regions keep between messages, an entry a fragment.
      observed: applied updates that the schedule has not been told of.
      step: inner steps done.
      bytes_sent: bytes one region has sent.
    """

    region: RegionState
    outer: OuterState
    in_flight: dict[int, InFlight]
    schedule: ScheduleState | None
    senders: tuple[Sender, ...] = ()
    observed: tuple[Observation, ...] = ()
    step: int = 0
    bytes_sent: int = 0
