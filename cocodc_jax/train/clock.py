"""Timeline of the devices: when steps ended, and syncs started, arrived and merged.

The host dispatches work ahead of the devices. So threads wait for arrays and read the
clock: one thread for the steps, in order, and one for each message in flight. All times
are seconds since the recorder started, plus the seconds of earlier runs.
"""

import collections
import dataclasses
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, Self

import jax

from cocodc_jax.core.state import AppliedSync, PendingMean, PyTree, SyncId, TrainState
from cocodc_jax.program.region_program import Output

_STEPS = 9  # Scans to take the minimum step time over.


@dataclasses.dataclass
class Flight:
    """Times of one sync by this process's clock; None until they are known."""

    fragment: int
    start_step: int  # Inner steps done when it started.
    start_s: float | None = None  # When those steps were done.
    arrival_s: float | None = None  # When the mean arrived.
    apply_step: int | None = None  # Inner steps done when it was merged.
    num_bytes: int = 0  # That one region sent for it.
    merge_s: float | None = None  # When the steps and the outer fragment were ready.
    stall_s: float | None = None  # How long regions had waited for it by then.


class FlightRecorder:
    """Records a run's timeline; use as a context manager.

    Attributes:
      recent_step_s: seconds of an inner step in the last scan, 0 before the first.
      sync_s: seconds that the last arrived sync was in flight, 0 before the first.
      stall_s: total seconds in which regions waited for an outer fragment.
    """

    def __init__(self, earlier_s: float = 0.0):
        self._zero = time.perf_counter() - earlier_s
        self.flights: list[Flight] = []
        self.marks: list[tuple[int, float]] = []  # Steps, and when they ended.
        self.recent_step_s = 0.0
        self.sync_s = 0.0
        self.stall_s = 0.0

        self._went_on_s = 0.0  # When the devices continued after the last merge.
        self._step_s: collections.deque[float] = collections.deque(maxlen=_STEPS)
        self._own_step_s: collections.deque[float] = collections.deque(maxlen=_STEPS)

        self._open: dict[SyncId, Flight] = {}
        self._leaving: dict[SyncId, jax.Array] = {}
        self._of_elastic: set[SyncId] = set()  # Means of other regions.

        self._steps: queue.SimpleQueue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._marked = threading.Condition()
        self._error: Exception | None = None
        self._walker = threading.Thread(target=self._walk, daemon=True)
        self._walker.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: Any) -> None:
        """Wait for all watched arrays; an exception in the body takes precedence."""
        self._steps.put(None)
        self._walker.join()
        if kind is not None:
            return

        for thread in self._threads:
            thread.join()
        if self._error is not None:
            why = f"the timeline could not be measured: {self._error}"
            raise RuntimeError(why) from self._error

    @property
    def step_s(self) -> float:
        """Recent seconds of an inner step, 0 before the first."""
        with self._marked:
            # A scan that compiles first takes many times as long.
            return min(self._step_s, default=0.0)

    @property
    def own_step_s(self) -> float | None:
        """Seconds of an inner step from its dispatch, so without compilation.

        None if they are not known, as when dispatching waits for the devices.
        """
        with self._marked:
            recent = sorted(self._own_step_s)
        return recent[len(recent) // 2] if recent else None

    def done_s(self, step: int) -> float:
        """Return when the devices ended inner step `step`, waiting for it."""
        with self._marked:
            self._marked.wait_for(lambda: self._error or self._is_marked(step))
            marks = reversed(self.marks)
            marked_s = next((s for marked, s in marks if marked == step), None)
        return time.perf_counter() if marked_s is None else self._zero + marked_s

    def _is_marked(self, step: int) -> bool:
        return bool(self.marks) and self.marks[-1][0] >= step

    def watch(self, state: TrainState, output: Output) -> None:
        """Record when the devices finish the work just dispatched."""
        before = state.step - len(output.bytes_sent)
        for sync in output.syncs:
            if sync.start_step > before:  # Started and applied in one call.
                self.started(
                    sync.fragment_id, sync.start_step, output.losses, sync.norm
                )

        in_flight = state.sync.in_flight if state.sync else {}
        for (fragment_id, start_step), flight in in_flight.items():
            if start_step > before:
                self.started(fragment_id, start_step, output.losses, flight.mean)

        # Syncs that waited for these inner steps left with them.
        means = {(s.fragment_id, s.start_step): s.norm for s in output.syncs}
        means |= {sync_id: flight.mean for sync_id, flight in in_flight.items()}
        for (fragment_id, start_step), losses in self._leaving.items():
            mean = means[fragment_id, start_step]
            self.started(fragment_id, start_step, losses, mean)

        leaving = state.sync.leaving if state.sync else ()
        self._leaving = {start.sync_id: output.losses for start in leaving}
        self.stepped(state.step, output.losses, output.syncs)

    def started(self, fragment: int, step: int, inner: jax.Array, mean: PyTree) -> None:
        """Watch a message."""
        flight = Flight(fragment, step)
        self.flights.append(flight)
        self._open[fragment, step] = flight
        last = jax.tree.leaves(mean)[-1]
        if isinstance(last, PendingMean):
            self._of_elastic.add((fragment, step))

        thread = threading.Thread(
            target=self._arrive, args=(flight, inner, last), daemon=True
        )
        thread.start()
        running = [other for other in self._threads if other.is_alive()]
        self._threads = [*running, thread]

    def stepped(
        self, step: int, inner: jax.Array, merges: Sequence[AppliedSync] = ()
    ) -> None:
        """Watch the merges after steps, and the steps if they are not yet watched.

        Steps are watched before their events are dispatched, because dispatching merges
        may wait for other regions' means, and that time is not the steps'.
        """
        # If they have ended already, dispatching them has waited for the devices. JAX
        # crashes where it is asked whether a deleted array is ready.
        has_ended = inner.is_deleted() or inner.is_ready()  # pyright: ignore
        handed_s = None if has_ended else self._now()
        self._steps.put((step, inner, merges, handed_s))

    def _arrive(self, flight: Flight, inner: jax.Array, mean: jax.Array) -> None:
        try:
            inner.block_until_ready()
            flight.start_s = self._now()
            mean.block_until_ready()
            flight.arrival_s = self._now()
            self.sync_s = flight.arrival_s - flight.start_s
        except Exception as error:
            self._fail(error)

    def _walk(self) -> None:
        while (watched := self._steps.get()) is not None:
            if self._error is not None:
                continue  # Releases the arrays.
            try:
                self._follow(*watched)
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._marked:
            self._error = error
            self._marked.notify_all()

    def _follow(
        self,
        step: int,
        inner: jax.Array,
        merges: Sequence[AppliedSync],
        handed_s: float | None,
    ) -> None:
        inner.block_until_ready()
        if not self._is_marked(step):
            self._mark(step, handed_s)

        for sync in merges:
            began_s = self._now()
            sync.norm.block_until_ready()
            stall_s = self._now() - began_s

            sync_id = (sync.fragment_id, sync.start_step)
            flight = self._open.pop(sync_id, None)
            if flight is not None and flight.arrival_s and sync_id in self._of_elastic:
                # The host waited for it before dispatching the merge.
                self._of_elastic.discard(sync_id)
                stall_s += max(min(flight.arrival_s, began_s) - self._went_on_s, 0.0)

            self.stall_s += stall_s
            self._went_on_s = self._now()
            if flight is not None:  # Else it started in an earlier process.
                flight.apply_step = sync.apply_step
                flight.stall_s = stall_s
                flight.num_bytes = sync.num_bytes
                flight.merge_s = self._went_on_s

    def _mark(self, step: int, handed_s: float | None) -> None:
        now = self._now()
        with self._marked:
            if self.marks:
                seconds = now - self._went_on_s
                num_steps = step - self.marks[-1][0]
                self.recent_step_s = seconds / num_steps
                self._step_s.append(self.recent_step_s)
                if handed_s is not None:
                    own_s = now - max(handed_s, self._went_on_s)
                    self._own_step_s.append(own_s / num_steps)

            self.marks.append((step, now))
            self._marked.notify_all()

        self._went_on_s = now

    def _now(self) -> float:
        return time.perf_counter() - self._zero

    def to_json(self) -> dict[str, Any]:
        """Return the timeline: "marks" (step, second) and "syncs", JSON-able."""
        return {
            "marks": [list(mark) for mark in self.marks],
            "syncs": [dataclasses.asdict(flight) for flight in self.flights],
        }
