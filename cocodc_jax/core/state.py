"""State of a run at one step; all of it is checkpointed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax

from cocodc_jax.sync.needs import Fragment
from cocodc_jax.sync.schedules.base import Event, replaced

PyTree = Any
SyncId = tuple[int, int]


class RegionState(NamedTuple):
    """State of the regions' local training; every leaf is *regional*, `[R, ...]`."""

    params: PyTree  # Local parameters.
    opt_state: PyTree  # The inner optimizer's state.
    key: jax.Array  # PRNG key data, uint32 `[R, 2]`.
    per_step: PyTree = ()  # State of the exchange at every step, `()` if there is none.
    model_state: PyTree = ()  # Non-trained state of the model, `()` if it has none.


class OuterState(NamedTuple):
    """Outer parameters and optimizer states, one entry per fragment.

    One copy for all regions, on the outer device or sharded over the mesh; parameters
    are at least float32. Regional outer models have leaves `[R, ...]` on the mesh.
    """

    params: tuple[Fragment, ...]
    opt_states: tuple[PyTree, ...]

    def entry(self, fragment_id: int) -> tuple[Fragment, PyTree]:
        """Return parameters and optimizer state of one fragment."""
        return self.params[fragment_id], self.opt_states[fragment_id]

    def updated(
        self, fragment_id: int, params: Fragment, opt_state: PyTree
    ) -> OuterState:
        """Return a copy with the entries of one fragment replaced."""
        return OuterState(
            replaced(self.params, fragment_id, params),
            replaced(self.opt_states, fragment_id, opt_state),
        )


class InFlight(NamedTuple):
    """A fragment in flight."""

    # Mean pseudo-gradient that will arrive; `[R, ...]` if regions are averaged in
    # groups, a `PendingMean` if it comes from other regions.
    mean: PyTree
    # Values kept until the mean arrives, by name: copies of the fragment (`sync.needs`:
    # "staged" and "midway", `[R, ...]`; "stale_params"), and what arrives with the
    # mean: "times", "verdict" (`sync.robust`), `VERDICT_OF_ALL`, and `UNCOUNTED`.
    kept: dict[str, PyTree]

    def with_kept(self, name: str, value: PyTree) -> InFlight:
        """Return a copy that also keeps `value` under `name`."""
        return self._replace(kept={**self.kept, name: value})


# Of elastic regions, where each knows its own row of a verdict: int32 `[M]`.
VERDICT_OF_ALL = "verdict_of_all"
# A region's own decoded message, if the mean left it out and the region keeps its work.
UNCOUNTED = "uncounted"
ARRIVED = (VERDICT_OF_ALL, UNCOUNTED)


class PendingMean:
    """A mean that arrives from other regions on a thread, a single leaf of a pytree.

    Observers use `is_ready` and `block_until_ready`, as of an array. The program uses
    `landed`, which calls `wait`: it may end the wait of a run that is asked to stop.
    """

    def __init__(
        self,
        future: Future[InFlight],
        wait: Callable[[Future[InFlight]], InFlight] = Future.result,
    ):
        self._future = future
        self._wait = wait

    def is_ready(self) -> bool:
        """Return whether the mean has arrived, without waiting."""
        return self._future.done()

    def block_until_ready(self) -> PendingMean:
        """Wait for the mean; raise what the exchange raised."""
        jax.block_until_ready(self._future.result().mean)
        return self

    def result(self) -> InFlight:
        """Wait for the mean and what arrives with it."""
        return self._wait(self._future)


def landed(flight: InFlight) -> InFlight:
    """Return a fragment with its mean as arrays; waits if other regions send it."""
    if not isinstance(flight.mean, PendingMean):
        return flight
    mean, kept = flight.mean.result()
    return InFlight(mean, flight.kept | kept)


class AppliedSync(NamedTuple):
    """One applied sync."""

    fragment_id: int  # Fragment that was synchronized.
    start_step: int  # Step at which it started.
    apply_step: int  # Step at which it was merged.
    num_bytes: int  # Bytes one region sent for it.
    # L2 norm of the mean pseudo-gradient, float32 scalar on its device.
    norm: jax.Array
    # The merge's metrics, float32 `[R]` on their devices.
    metrics: dict[str, jax.Array]
    # Which regions the robust mean left out, int32 `[R]` on its device, see
    # `sync.robust`; None if there is no filter.
    verdict: jax.Array | None = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["outer", "compressors", "stale_params", "in_flight", "observed"],
    meta_fields=["schedule", "leaving"],
)
@dataclasses.dataclass(frozen=True)
class SyncState:
    """State of the exchange between regions; tuples have one entry per fragment.

    The schedule's state has plain values: no leaves, but part of the tree structure.
    """

    outer: OuterState  # Outer parameters and optimizer states.
    schedule: Any  # The schedule's state.
    # Each region's compressor state, such as the residual of error feedback, `[R,
    # ...]`; empty if the outer optimizer's state holds it.
    compressors: tuple[PyTree, ...] = ()
    # Outer fragment that each region last received and measures its pseudo-gradient
    # from, `[R, ...]`; empty unless regions sync asynchronously.
    stale_params: tuple[Fragment, ...] = ()
    # Syncs started and not yet applied, by fragment and start.
    in_flight: dict[SyncId, InFlight] = dataclasses.field(default_factory=dict)
    # Observations of applied updates that the schedule has not read yet, by fragment
    # and name of a need. They stay on their devices until it has to choose.
    observed: tuple[dict[int, dict[str, jax.Array]], ...] = ()
    # Starts of this step that wait for the inner steps after it, see
    # `engine/segment.py`; never in a checkpoint.
    leaving: tuple[Event, ...] = ()

    @property
    def num_in_flight(self) -> int:
        """Syncs started and not yet applied."""
        return len(self.in_flight) + len(self.leaving)

    @property
    def arrays(self) -> dict[str, PyTree]:
        """All arrays to checkpoint; waits for means that come from other regions.

        Observations are not included, as the schedule reads them before a save. Values
        that `ARRIVED` with a mean are not either: after a restore, the mean is merged
        without them.
        """
        in_flight = {}
        for (k, start_step), flight in self.in_flight.items():
            mean = landed(flight).mean
            kept = {name: x for name, x in flight.kept.items() if name not in ARRIVED}
            in_flight[f"{k}_{start_step}"] = InFlight(mean, kept)  # Keys are strings.

        return {
            "outer": self.outer,
            "compressors": self.compressors,
            "stale_params": self.stale_params,
            "in_flight": in_flight,
        }

    def with_arrays(self, arrays: dict[str, PyTree]) -> SyncState:
        """Return a copy with `arrays`, as `self.arrays` returns them."""
        flights = {
            tuple(int(part) for part in name.split("_")): flight
            for name, flight in arrays["in_flight"].items()
        }
        return dataclasses.replace(self, **{**arrays, "in_flight": flights})


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["region", "sync", "frozen"],
    meta_fields=["step", "bytes_sent"],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """State of a whole run at one step.

    A pytree of its arrays. Numbers and the schedule's state are part of its structure.

    Attributes:
      region: regional arrays, on the inner mesh.
      sync: state of the exchange; None for methods that exchange no parameters.
      step: inner steps done.
      bytes_sent: bytes one region has sent.
      frozen: parameters that are not trained, one copy for all regions, see
        `engine/frozen.py`; `()` if all are trained.
    """

    region: RegionState
    sync: SyncState | None = None
    step: int = 0
    bytes_sent: int = 0
    frozen: PyTree = ()
