"""Asynchronous regions: each syncs alone, at its own pace.

There are no rounds. A region sends its pseudo-gradient when it has done its steps, the
outer optimizer applies it at once, and the region continues from the result. Meanwhile
the outer parameters have changed, the more the slower the region is.

With *dynamic local updates* a region of step time s does floor(H / s) steps (at least
one) between two syncs instead of H, so that all regions sync about equally often.

Source: asynchronous local SGD (Liu et al., arXiv 2401.09135), read from its code.
"""

from __future__ import annotations

import dataclasses
import math

from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.schedules.base import (
    FINISH,
    START,
    Event,
    Observe,
    Pending,
    Schedule,
    ScheduleState,
    nothing,
    set_whole_fields,
)


@dataclasses.dataclass(frozen=True)
class Asynchronous(Schedule):
    """A schedule of one fragment (the full model) whose events each name a region.

    In its state `last_start` has one entry per region.
    """

    sync_interval: int  # H, inner steps of the fastest region between two syncs.
    is_dynamic: bool = True  # Whether slower regions do fewer steps between syncs.
    # Ticks of one inner step of each region, see `Regions`.
    step_times: tuple[float, ...] = ()

    num_fragments = 1
    delay_steps = 0
    is_by_region = True

    def __post_init__(self):
        set_whole_fields(self, sync_interval=1)

    def bind(self, regions: Regions, looks_midway: bool = False) -> Asynchronous:
        """Return the schedule for these regions; see `Schedule.bind`."""
        super().bind(regions, looks_midway)
        return dataclasses.replace(self, step_times=regions.step_times)

    def local_steps(self, region: int) -> int:
        """Return the inner steps that `region` does between two syncs."""
        if not self.is_dynamic:
            return self.sync_interval
        return max(1, math.floor(self.sync_interval / self.step_times[region] + 1e-9))

    def arrival(self, region: int, after: int) -> int:
        """Return the first tick after `after` at which `region` syncs."""
        period = self.local_steps(region) * self.step_times[region]
        # The epsilon corrects the rounding of a whole product.
        count = math.floor(after / period + 1e-9)
        tick = after
        while tick <= after:
            count += 1
            tick = math.ceil(count * period - 1e-9)
        return tick

    def init(self) -> ScheduleState:
        """Return the state before the first step."""
        return ScheduleState(0, (), (-1,) * len(self.step_times))

    def next_step(self, state: ScheduleState) -> int:
        """Return the next tick at which a region syncs."""
        return min(self.arrival(m, state.step) for m in range(len(self.step_times)))

    def next_event(
        self, state: ScheduleState, step: int, observe: Observe = nothing
    ) -> tuple[ScheduleState, Event | None]:
        """Return a region's start, then its finish, regions in ascending order."""
        if state.in_flight:
            (pending,) = state.in_flight
            return dataclasses.replace(state, in_flight=()), pending.event(FINISH)

        for region, last in enumerate(state.last_start):
            if max(last, 0) < step == self.arrival(region, step - 1):
                pending = Pending(0, step, step, participating=(region,))
                event = pending.event(START, max(last, 0))
                return state.sent(pending, region), event

        return dataclasses.replace(state, step=step), None


def asynchronous(sync_interval: int, is_dynamic: bool = True) -> Asynchronous:
    """Let every region sync alone after `sync_interval` steps, or fewer."""
    return Asynchronous(sync_interval, is_dynamic)
