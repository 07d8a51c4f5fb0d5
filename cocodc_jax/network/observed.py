"""What a schedule sees of a simulated run: nothing of a model, all of the network.

Adaptive schedules rank fragments by how fast they change, which a network model does
not know. Here all change equally fast, per parameter and step, so that of equals the
one that has waited longest is served. What syncs and steps take is simulated, and
reported as in a run: each message carries what had been measured as it left.
"""

from __future__ import annotations

from typing import Any

from cocodc_jax.sync.schedules import Applied, Event

Times = list[tuple[float, float]]


class Observer:
    """Answers a schedule's `observe`."""

    def __init__(self, num_fragments: int, effective_rank: float | None = None):
        """Begin with nothing."""
        self._rank = float("inf") if effective_rank is None else effective_rank
        self._last_start = [0] * num_fragments
        self._step = 0
        self._new: list[Applied] = []

    def at(self, step: int) -> None:
        """Move on to `step`."""
        self._step = step

    def started(self, event: Event) -> None:
        """Take note of a start."""
        self._last_start[event.fragment_id] = event.start_step

    def applied(self, start: Event, times: Times) -> None:
        """Take note of a sync that was applied."""
        # A fragment counts as one parameter; the longer it gathers, the more it moved.
        norm = float(start.start_step - start.since_step)
        seen = {"norm": norm, "effective_rank": self._rank, "times": times}
        self._new.append(Applied(start.fragment_id, 1, seen))

    def __call__(self, name: str) -> Any:
        """Return what a schedule asks for, see `Schedule.next_event`.

        Raises:
          ValueError: for what a network model cannot answer.
        """
        if name == "applied":
            new, self._new = self._new, []
            return new
        if name in ("drift", "distance", "tokens"):
            power = 2 if name == "distance" else 1
            return [float(self._step - x) ** power for x in self._last_start]
        raise ValueError(f"the schedule needs {name!r}, which no network model knows")
