"""Regions that come and go one by one, each on its own clock.

There is no round: a region sends its pseudo-gradient when it has done its steps, the
outer optimizer takes it at once, and the region goes on from what comes out. While it
trained, the outer parameters moved on under it, the more the slower it is.

With *dynamic local updates* a region of step time s does floor(H / s) steps (at least
one) between two arrivals instead of H, so that all come about equally often.

Source: asynchronous local SGD (Liu et al., arXiv 2401.09135); algorithms.md 10.
"""

from __future__ import annotations

import dataclasses
import math

from cocodc_jax.sync.events import Event, ScheduleState
from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Arrivals(Schedule):
    """A schedule of one fragment (the whole model) whose events each name a region.

    In its state the entries of every tuple stand for regions instead of fragments.

    Attributes:
      step_times: ticks of one inner step of each region, see `Regions`.
      is_dynamic: whether slower regions do fewer steps between arrivals.
    """

    step_times: tuple[float, ...] = ()
    is_dynamic: bool = True

    def for_regions(self, regions: Regions) -> Arrivals:
        """The same schedule for these regions."""
        return dataclasses.replace(self, step_times=regions.step_times)

    def local_steps(self, region: int) -> int:
        """Inner steps that `region` does between two arrivals."""
        if not self.is_dynamic:
            return self.sync_interval
        return max(1, math.floor(self.sync_interval / self.step_times[region] + 1e-9))

    def arrival(self, region: int, after: int) -> int:
        """The first tick after `after` at which `region` comes."""
        period = self.local_steps(region) * self.step_times[region]
        # The small number undoes the rounding of a product that is whole.
        count = math.floor(after / period + 1e-9)
        tick = after
        while tick <= after:
            count += 1
            tick = math.ceil(count * period - 1e-9)
        return tick

    def init(self) -> ScheduleState:
        """The state before the first step."""
        none = (0,) * len(self.step_times)
        never = (-1,) * len(self.step_times)
        zeros = (0.0,) * len(self.step_times)
        return ScheduleState(0, (), never, none, zeros, none, none)

    def next_step(self, state: ScheduleState) -> int:
        """The next tick at which some region comes."""
        each = range(len(self.step_times))
        return min(self.arrival(m, state.step) for m in each)

    def may_start(self, state: ScheduleState, step: int) -> bool:
        """Whether some region comes at `step`."""
        del state
        return any(self._comes(m, step) for m in range(len(self.step_times)))

    def start(self, state, step, drift=None):
        """The next region, in ascending order, that comes at `step`; None after all."""
        del drift
        for region in range(len(self.step_times)):
            if state.last_start[region] < step and self._comes(region, step):
                since = max(state.last_start[region], 0)
                last = list(state.last_start)
                last[region] = step
                interval = list(state.interval)
                interval[region] = step - since
                state = dataclasses.replace(
                    state,
                    step=step,
                    in_flight=((0, step),),
                    last_start=tuple(last),
                    interval=tuple(interval),
                )
                return state, Event("start", 0, step, (region,))
        return state, None

    def _comes(self, region: int, step: int) -> bool:
        return step > 0 and self.arrival(region, step - 1) == step


def arrivals(sync_interval: int, is_dynamic: bool = True) -> Arrivals:
    """Every region after `sync_interval` steps (or fewer), alone.

    Args:
      sync_interval: H, inner steps of the fastest region between two arrivals.
      is_dynamic: whether a slower region does fewer.

    Raises:
      ValueError: if `sync_interval` is below 1.
    """
    return Arrivals(1, sync_interval, 0, sync_interval, is_dynamic=is_dynamic)
