"""What a run is made of at one step; everything here goes into a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from cocodc_jax.core.pending_mean import arrived
from cocodc_jax.sync.needs import Fragment
from cocodc_jax.sync.schedules.base import Event, replaced

PyTree = Any
SyncId = tuple[int, int]


class RegionState(NamedTuple):
    """The regions' own training; every leaf is *regional*, `[R, ...]`.

    Attributes:
      params: local parameters.
      opt_state: the inner optimizer's state.
      key: PRNG key data, uint32 `[R, 2]`.
      per_step: state of what is sent at every step, `()` if nothing is.
      model_state: state of the model that is not trained, `()` if it has none.
    """

    params: PyTree
    opt_state: PyTree
    key: jax.Array
    per_step: PyTree = ()
    model_state: PyTree = ()


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

    def entry(self, fragment_id: int) -> tuple[Fragment, PyTree]:
        """Return parameters and optimizer state of one fragment."""
        return self.params[fragment_id], self.opt_states[fragment_id]

    def updated(
        self, fragment_id: int, params: Fragment, opt_state: PyTree
    ) -> OuterState:
        """Return the same with the entries of one fragment replaced."""
        return OuterState(
            replaced(self.params, fragment_id, params),
            replaced(self.opt_states, fragment_id, opt_state),
        )


class InFlight(NamedTuple):
    """A fragment on its way.

    Attributes:
      mean: the mean pseudo-gradient that will arrive, no region axis unless every pair
        of regions has its own; an `PendingMean` where it comes from other jobs.
      kept: what is kept until then for those who need it, by name: copies of the
        fragment (`sync.needs`: "staged" and "midway", `[R, ...]`; "stale_params"), and
        "times", which arrive with the mean.
    """

    mean: PyTree
    kept: dict[str, PyTree]

    def with_kept(self, name: str, value: PyTree) -> InFlight:
        """Return the same with something more kept."""
        return self._replace(kept={**self.kept, name: value})


class AppliedSync(NamedTuple):
    """One applied sync.

    Attributes:
      fragment_id: which fragment.
      start_step: step it started at.
      apply_step: step it was merged at.
      num_bytes: bytes one region sent for it.
      norm: L2 norm of the mean pseudo-gradient, float32 scalar on its device.
      metrics: the merge's metrics, float32 `[R]` on their devices.
      verdict: who was left out of the mean, int32 `[R]` on its device, see
        `sync.robust`; None where nobody is.
    """

    fragment_id: int
    start_step: int
    apply_step: int
    num_bytes: int
    norm: jax.Array
    metrics: dict[str, jax.Array]
    verdict: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class SyncState:
    """What a run has besides its regions' own training; entries are one a fragment.

    Attributes:
      outer: outer parameters and optimizer states.
      schedule: the schedule's state.
      compressors: what each region's compressor remembers between two messages, such as
        what error feedback has not sent yet, `[R, ...]`; none where the outer
        optimizer's state has it.
      stale_params: the outer fragment that each region last took and measures its
        pseudo-gradient from, `[R, ...]`; none unless regions take it one by one.
      in_flight: syncs started and not yet applied, by fragment and start.
      observed: fragment, and what was seen by the name of a need, of applied updates
        that the schedule does not know of yet: still on their devices, so that reading
        them can wait until it has to choose.
      leaving: starts of this step that wait for the inner steps after it, see
        `program/segment.py`; no checkpoint has any.
    """

    outer: OuterState
    schedule: Any
    compressors: tuple[PyTree, ...] = ()
    stale_params: tuple[Fragment, ...] = ()
    in_flight: dict[SyncId, InFlight] = dataclasses.field(default_factory=dict)
    observed: tuple[tuple[int, dict[str, jax.Array]], ...] = ()
    leaving: tuple[Event, ...] = ()

    @property
    def num_in_flight(self) -> int:
        """Syncs started and not yet applied."""
        return len(self.in_flight) + len(self.leaving)

    @property
    def arrays(self) -> dict[str, PyTree]:
        """All arrays that must not be lost; observations are told before a save.

        Means that come from other jobs are waited for.
        """
        return {
            "outer": self.outer,
            "compressors": self.compressors,
            "stale_params": self.stale_params,
            # Keys of dicts must be text.
            "in_flight": {
                f"{k}_{s}": flight._replace(mean=arrived(flight.mean))
                for (k, s), flight in self.in_flight.items()
            },
        }

    def with_arrays(self, arrays: dict[str, PyTree]) -> SyncState:
        """Return the same with the arrays of another, as `arrays` gave them."""
        flights = {
            (int(k), int(s)): flight
            for (k, s), flight in (
                (name.split("_"), flight)
                for name, flight in arrays["in_flight"].items()
            )
        }
        return dataclasses.replace(self, **{**arrays, "in_flight": flights})


def _sync_children(sync: SyncState) -> tuple[tuple, tuple]:
    key = jax.tree_util.GetAttrKey
    names = ("outer", "compressors", "stale_params", "in_flight")
    children = [(key(name), getattr(sync, name)) for name in names]
    ids = tuple(fragment_id for fragment_id, _ in sync.observed)
    seen = tuple(each for _, each in sync.observed)
    return (*children, (key("observed"), seen)), (sync.schedule, ids, sync.leaving)


def _sync_of_children(static: tuple, children: Iterable[Any]) -> SyncState:
    *arrays, seen = children
    schedule, ids, leaving = static
    observed = tuple(zip(ids, seen, strict=True))
    outer, compressors, stale_params, in_flight = arrays
    return SyncState(
        outer, schedule, compressors, stale_params, in_flight, observed, leaving
    )


# What a schedule remembers is plain values: no leaves, but part of the structure.
jax.tree_util.register_pytree_with_keys(SyncState, _sync_children, _sync_of_children)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["region", "sync", "frozen"],
    meta_fields=["step", "bytes_sent"],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """A whole run at one step.

    A pytree of all its arrays; numbers of the host, and what the schedule remembers,
    are part of its structure.

    Attributes:
      region: regional arrays, on the inner mesh.
      sync: what is exchanged; None for methods that exchange no parameters.
      step: inner steps done.
      bytes_sent: bytes one region has sent.
      frozen: parameters that are not trained, one copy for all regions, see
        `program/frozen.py`; `()` where all are trained.
    """

    region: RegionState
    sync: SyncState | None = None
    step: int = 0
    bytes_sent: int = 0
    frozen: PyTree = ()
