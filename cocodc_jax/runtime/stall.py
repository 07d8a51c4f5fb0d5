"""Measures stall: seconds in which regions had no inner step to run.

A region stalls when it has done its inner steps up to the step of a merge and the
outer fragment is not there yet. To see it from the host loop would mean to wait in
it; so a thread of its own waits for both, and the loop goes on.
"""

from __future__ import annotations

import queue
import threading
import time

import jax


class StallMeter:
    """Adds up the stall of a run; use as a context manager."""

    def __init__(self):
        """Starts the thread that waits."""
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def __enter__(self) -> StallMeter:
        """Nothing to do: the thread is running."""
        return self

    def __exit__(self, kind, *exception) -> None:
        """Waits for what is still watched; hides no exception under its own."""
        self._end()
        if kind is None:
            self._raise_error()

    @property
    def seconds(self) -> float:
        """Stall so far in seconds."""
        with self._lock:
            return self._seconds

    def watch(self, inner_steps: jax.Array, arrival: jax.Array) -> None:
        """Counts the time from `inner_steps` being ready to `arrival` being ready.

        Args:
          inner_steps: an output of the last inner steps before the merge.
          arrival: an output of the outer step that the merge waits for.
        """
        self._queue.put((inner_steps, arrival))

    def close(self) -> None:
        """Waits for what is still watched, and ends the thread.

        Raises:
          RuntimeError: if an array could not be waited for; after the first such
            array nothing more was counted.
        """
        self._end()
        self._raise_error()

    def _end(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RuntimeError(
                f"stall could not be measured: {self._error}"
            ) from self._error

    def _wait(self) -> None:
        while (watched := self._queue.get()) is not None:
            if self._error is not None:
                continue  # Lets go of the arrays.
            try:
                self._measure(*watched)
            except Exception as error:
                self._error = error

    def _measure(self, inner_steps: jax.Array, arrival: jax.Array) -> None:
        inner_steps.block_until_ready()
        begin = time.perf_counter()
        arrival.block_until_ready()
        with self._lock:
            self._seconds += time.perf_counter() - begin
