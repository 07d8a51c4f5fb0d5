"""What schedules say and what they remember: plain values that JSON can hold."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple


class Event(NamedTuple):
    """A fragment's sync starts or is applied.

    Attributes:
      kind: "start" or "finish".
      fragment: which fragment.
      start_step: the step at which this sync started.
      regions: who takes part, ascending; None is all of them.
      rank: of the message, where the schedule sets one (`rounds.py`), else 0.
    """

    kind: str
    fragment: int
    start_step: int
    regions: tuple[int, ...] | None = None
    rank: int = 0


@dataclasses.dataclass(frozen=True)
class ScheduleState:
    """What a schedule remembers; `delay` and tuples up to `rank`: an entry a fragment.

    Attributes:
      step: the step up to which events were given out.
      in_flight: `(fragment, start_step)` of the syncs not yet applied, oldest first.
      last_start: step of the last start, -1 for never.
      interval: steps between the last two starts (from step 0 for the first).
      norm: L2 norm of the last applied mean pseudo-gradient, 0 before the first.
      size: parameters in each fragment, 0 before its first sync was applied.
      observed_interval: the interval that `norm` was gathered over.
      rank: of the messages sent now, 0 where the schedule sets none.
      round_steps: steps of the round that goes on, 0 where all are alike.
      effective_ranks: of the last means applied, newest last.
      delay: steps from each fragment's last start to its application, where the
        schedule sets them; empty where all are alike.
      next_slot: step of the next start, where the schedule sets it, else 0.
      step_times: seconds of an inner step as the last messages told, newest last.
      sync_times: seconds of a sync, likewise.
    """

    step: int
    in_flight: tuple[tuple[int, int], ...]
    last_start: tuple[int, ...]
    interval: tuple[int, ...]
    norm: tuple[float, ...]
    size: tuple[int, ...]
    observed_interval: tuple[int, ...]
    rank: int = 0
    round_steps: int = 0
    effective_ranks: tuple[float, ...] = ()
    delay: tuple[int, ...] = ()
    next_slot: int = 0
    step_times: tuple[float, ...] = ()
    sync_times: tuple[float, ...] = ()

    def to_json(self) -> dict:
        """Plain values, for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict) -> ScheduleState:
        """Inverse of `to_json`, also after a trip through JSON text."""
        fields: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in value.items()
        }
        fields["in_flight"] = tuple(tuple(x) for x in value["in_flight"])
        return cls(**fields)
