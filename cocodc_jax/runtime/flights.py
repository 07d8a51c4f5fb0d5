"""When things happened on the devices: steps done, syncs started, arrived, merged.

The host hands out work ahead of the devices and never waits for them, so it does not
know when anything happens. Threads of their own wait for arrays and read the clock: one
for the steps, in order, and one for each message on its way (a few at a time).

All times are seconds since the recorder began, plus what it was told went before.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax

from cocodc_jax.runtime.syncs import Sync

PyTree = Any


@dataclasses.dataclass
class Flight:
    """One sync by the clock of this process.

    Attributes:
      fragment: which.
      start_step: inner steps done when it started.
      start_s: when those steps were done.
      arrival_s: when the mean was there; None while it is not.
      apply_step: inner steps done when it was merged; None before.
      num_bytes: bytes one region sent for it.
      merge_s: when the steps were done and the outer fragment was there.
      stall_s: how long regions had waited for it by then.
    """

    fragment: int
    start_step: int
    start_s: float | None = None
    arrival_s: float | None = None
    apply_step: int | None = None
    num_bytes: int = 0
    merge_s: float | None = None
    stall_s: float | None = None


class FlightRecorder:
    """Records a run's timeline; use as a context manager."""

    def __init__(self, earlier_s: float = 0.0):
        """Begins the clock.

        Args:
          earlier_s: seconds that the run has taken before.
        """
        self._zero = time.perf_counter() - earlier_s
        self._steps: queue.SimpleQueue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], Flight] = {}
        self._stall_s = 0.0
        self.flights: list[Flight] = []
        self.marks: list[tuple[int, float]] = []
        self._error: Exception | None = None
        self._walker = threading.Thread(target=self._walk, daemon=True)
        self._walker.start()

    def __enter__(self) -> FlightRecorder:
        """Nothing to do: the clock is running."""
        return self

    def __exit__(self, kind, *exception) -> None:
        """Waits for what is still watched; hides no exception under its own."""
        self._steps.put(None)
        self._walker.join()
        for thread in self._threads:
            thread.join()
        if kind is None and self._error is not None:
            raise RuntimeError(
                f"the timeline could not be measured: {self._error}"
            ) from self._error

    @property
    def stall_s(self) -> float:
        """Seconds in which regions have waited for an outer fragment so far."""
        with self._lock:
            return self._stall_s

    def started(self, fragment: int, step: int, inner: jax.Array, mean: PyTree) -> None:
        """Watches a message.

        Args:
          fragment: whose.
          step: inner steps done when it leaves.
          inner: an output of the last of those steps.
          mean: what will arrive.
        """
        flight = Flight(fragment, step)
        self.flights.append(flight)
        self._open[fragment, step] = flight
        thread = threading.Thread(
            target=self._arrive, args=(flight, inner, jax.tree.leaves(mean)[-1])
        )
        thread.daemon = True
        thread.start()
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    def stepped(self, step: int, inner: jax.Array, merges: Sequence[Sync]) -> None:
        """Watches steps, and the merges after them.

        Args:
          step: inner steps done.
          inner: an output of the last of them.
          merges: applied after them.
        """
        self._steps.put((step, inner, merges))

    def _arrive(self, flight: Flight, inner: jax.Array, mean: jax.Array) -> None:
        try:
            inner.block_until_ready()
            flight.start_s = self._now()
            mean.block_until_ready()
            flight.arrival_s = self._now()
        except Exception as error:
            self._error = error

    def _walk(self) -> None:
        while (watched := self._steps.get()) is not None:
            if self._error is not None:
                continue  # Lets go of the arrays.
            try:
                self._follow(*watched)
            except Exception as error:
                self._error = error

    def _follow(self, step: int, inner: jax.Array, merges: Sequence[Sync]) -> None:
        inner.block_until_ready()
        self.marks.append((step, self._now()))
        for sync in merges:
            begin = self._now()
            sync.norm.block_until_ready()
            stall = self._now() - begin
            with self._lock:
                self._stall_s += stall
            flight = self._open.pop((sync.fragment, sync.start_step), None)
            if flight is not None:  # Otherwise it began before this process did.
                flight.apply_step, flight.stall_s = step, stall
                flight.num_bytes, flight.merge_s = sync.num_bytes, self._now()

    def _now(self) -> float:
        return time.perf_counter() - self._zero

    def to_json(self) -> dict[str, Any]:
        """The timeline so far: "marks" (step, second) and "syncs", plain values."""
        return {
            "marks": [list(mark) for mark in self.marks],
            "syncs": [dataclasses.asdict(flight) for flight in self.flights],
        }
