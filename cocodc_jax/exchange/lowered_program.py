"""Programs of a run, by name, for compiling them without running."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cocodc_jax.sync.schedules.base import FINISH, START, Event, Schedule, events_at


class LoweredProgram(NamedTuple):
    """One compiled program of a run.

    Attributes:
      name: what it does, with the fragment's number if it handles one fragment.
      program: result of `jax.jit`.
      arguments: shapes, dtypes and shardings, for `program.lower(*arguments)`.
      sent_bytes: bytes that one region sends in it, as the run counts them.
      num_steps: inner steps in it.
      options: compiler options.
    """

    name: str
    program: Any
    arguments: tuple
    sent_bytes: int = 0
    num_steps: int = 0
    options: Mapping[str, Any] = {}


def first_starts(schedule: Schedule) -> Iterator[tuple[Event, int, Event | None]]:
    """Follow a schedule to the first start of each fragment.

    It chooses as if all fragments were equal.

    Yields:
      The start, the steps from it to the next event, and that event if it is the
      `FINISH` of the same sync.
    """
    num_fragments = schedule.num_fragments

    def observe(name: str) -> list:
        return [] if name == "applied" else [1.0] * num_fragments

    state, seen = schedule.init(), set()
    while len(seen) < num_fragments:
        step = schedule.next_step(state)
        events = list(events_at(schedule, state, step, observe))
        state = events[-1][0]
        ahead = schedule.next_step(state)
        first = schedule.next_event(state, ahead, observe)[1]
        for _, start in events:
            if start is None or start.kind != START or start.fragment_id in seen:
                continue
            seen.add(start.fragment_id)
            is_own = first == start._replace(kind=FINISH, since_step=0)
            yield start, ahead - step, first if is_own else None
