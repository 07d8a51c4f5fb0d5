"""Speed, stall and sync times of a timeline, measured or simulated."""

from __future__ import annotations

import dataclasses
import statistics

from cocodc_jax.network.timeline import Timeline


@dataclasses.dataclass(frozen=True)
class Pace:
    """The speed of the regions.

    Attributes:
      step_s: seconds per step of the slowest region, with waits.
      stall_s: seconds of waiting for syncs in 100 steps, mean over regions; None
        without syncs, as for methods that exchange at every step.
      sync_s: mean seconds of a sync from its start to its arrival; None without syncs.
    """

    step_s: float
    stall_s: float | None
    sync_s: float | None


def region_step_s(timeline: Timeline, first_step: int = 0) -> tuple[float, ...]:
    """Return seconds per step of each region after `first_step`, with waits."""
    last = timeline.num_steps
    took = timeline.times_s(last) - timeline.times_s(first_step)
    return tuple((took / (last - first_step)).tolist())


def pace(timeline: Timeline, first_step: int = 0) -> Pace:
    """Return the pace after `first_step`.

    Syncs count that start after it and before the last step. In full intervals, these
    are as many as are waited for.
    """
    last = timeline.num_steps
    syncs = [s for s in timeline.syncs if first_step <= s.start_step < last]
    stall = sum(s.mean_stall_s for s in syncs) / (last - first_step) * 100
    return Pace(
        step_s=max(region_step_s(timeline, first_step)),
        stall_s=stall if syncs else None,
        sync_s=statistics.fmean(s.arrival_s - s.start_s for s in syncs)
        if syncs
        else None,
    )
