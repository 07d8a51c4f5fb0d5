"""Blocking syncs of fragments with different periods.

Fragment p starts at every multiple of its period and is applied at once. Fragments that
are due at one step sync one after another, in their order. With equal periods that is
DiLoCo, in as many messages as there are fragments.
"""

import dataclasses
from typing import Any

from cocodc_jax.sync.schedules.base import (
    START,
    Event,
    Observe,
    Pending,
    Schedule,
    ScheduleState,
    nothing,
)
from cocodc_jax.transforms.numerics import check_at_least


@dataclasses.dataclass(frozen=True)
class Periodic(Schedule):
    """A schedule whose fragments have a period each; see `periodic`."""

    periods: tuple[int, ...]  # Inner steps between two starts of a fragment.
    num_fragments: int = dataclasses.field(init=False)  # K.
    sync_interval: int = dataclasses.field(init=False)  # H, the longest period.

    delay_steps = 0

    def __post_init__(self):
        for period in self.periods:
            check_at_least("periods", period, 1)

        periods = tuple(int(period) for period in self.periods)
        object.__setattr__(self, "periods", periods)
        object.__setattr__(self, "num_fragments", len(periods))
        object.__setattr__(self, "sync_interval", max(periods))

    def init(self) -> ScheduleState:
        """Return the state before the first step."""
        return ScheduleState(0, (), (-1,) * self.num_fragments)

    def next_step(self, state: ScheduleState) -> int:
        """Return the first step after `state.step` at which a fragment is due."""
        starts = [(state.step // period + 1) * period for period in self.periods]
        arrivals = [pending.apply_step for pending in state.in_flight]
        return min([*starts, *arrivals])

    def next_event(
        self, state: ScheduleState, step: int, observe: Observe = nothing
    ) -> tuple[ScheduleState, Event | None]:
        """Return a fragment's start, then its finish, then the next fragment's."""
        state, event = self.arrive(state, step)
        if event is not None or step <= 0:
            return state, event

        for k, period in enumerate(self.periods):
            if step % period or state.last_start[k] == step:
                continue
            pending = Pending(fragment_id=k, start_step=step, apply_step=step)
            started = pending.event(START, since_step=max(state.last_start[k], 0))
            return state.sent(pending, k), started

        return state, None


def periodic(*periods: Any) -> Periodic:
    """Sync fragment p at every multiple of `periods[p]`, while all regions wait.

    >>> periodic(4, 2).num_fragments, periodic(4, 2).sync_interval
    (2, 4)
    """
    return Periodic(periods)
