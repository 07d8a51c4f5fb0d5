"""What a stretch of a timeline comes to, measured or simulated alike."""

from __future__ import annotations

import dataclasses
import statistics

from cocodc_jax.network.timeline import Timeline


@dataclasses.dataclass(frozen=True)
class Pace:
    """How fast regions went.

    Attributes:
      step_s: seconds per step of the slowest region, waiting included.
      stall_s: seconds in 100 steps that regions waited for syncs, mean over regions;
        None if there were none, as where steps themselves exchange something.
      sync_s: mean seconds of a sync, from its start to its arrival; or None.
    """

    step_s: float
    stall_s: float | None
    sync_s: float | None


def region_step_s(timeline: Timeline, first_step: int = 0) -> tuple[float, ...]:
    """Seconds per step of each region after `first_step`, waiting included."""
    last = timeline.num_steps
    took = timeline.times_s(last) - timeline.times_s(first_step)
    return tuple((took / (last - first_step)).tolist())


def pace(timeline: Timeline, first_step: int = 0) -> Pace:
    """Return the pace after `first_step`.

    Of the syncs, those count that start there or later, but before the last step: in
    whole intervals as many as are waited for.
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
