"""Schedules whose numbers follow the network, as it is measured while a run goes on.

Two numbers of a schedule depend on the network:

- *delay*: a sync is merged once it has arrived. With T_c the seconds of an inner step
  and T_s those of a sync,

      tau = ceil(T_s / T_c), at least 1 and at most `delay_steps`

- *slots*: as many syncs start in an interval as the network carries (CoCoDC, arXiv
  2504.17672, section 3.2; `schedule.syncs_that_fit`),

      N = max(K, floor(gamma H T_c / T_s)) ;  h = floor(H / N)

All regions must come to the same numbers, so what each has measured travels with its
messages, and the schedule learns of it as a sync is applied. T_c is the slowest
region's. T_s is the shortest of any region: it is the last one to send that waits for
nothing but the network. Over the last few syncs the median of T_c counts, and for the
delay the longest T_s (a sync that comes late holds everybody up, one that comes early
nobody), for the slots the median.

A delay is chosen as its sync starts. To see the arrivals themselves first, regions
would have to talk beside their messages, a round trip of the network for each.

When h changes between two slots, the next may come sooner than h after the last, so
that all deadlines can still be kept: with d_0 <= d_1 <= ... the last steps by which the
fragments must have started, the next slot after step t is at most
min_i floor((d_i - t) / (i + 1)) steps away.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from cocodc_jax.sync import schedule
from cocodc_jax.sync.events import ScheduleState
from cocodc_jax.sync.schedule import Schedule, syncs_that_fit

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Paced(Schedule):
    """A schedule that measures; see `staggered` and `adaptive`.

    `delay_steps` is the longest delay, `slot_steps` that of the first slots.

    Attributes:
      paces_delay: whether the delay follows the network.
      network_share: gamma in (0, 1], the share of the network that may be used, where
        the slots follow it; None keeps them.
      window: how many syncs count.
    """

    paces_delay: bool = True
    network_share: float | None = None
    window: int = 5

    def __post_init__(self):
        """Checks that every fragment can be on time.

        Raises:
          ValueError: naming the field, its value and what would be right.
        """
        if self.paces_delay and not 1 <= self.delay_steps <= self.longest_delay:
            raise ValueError(
                f"max_delay_steps={self.delay_steps} must be at least 1 and at most "
                f"{self.longest_delay}: a fragment must arrive before it starts again"
            )
        super().__post_init__()
        if self.network_share is not None:  # Checks it.
            syncs_that_fit(1, 1, 1.0, 1.0, self.network_share)

    @property
    def longest_delay(self) -> int:
        """Slots that move can wait for a fragment, up to its deadline."""
        if self.network_share is None:
            return super().longest_delay
        return self.sync_interval

    @property
    def measures(self) -> bool:
        """Whether `observe_times` wants to know what syncs took."""
        return True

    def init(self) -> ScheduleState:
        """The state before the first step."""
        none = (0,) * self.num_fragments
        return dataclasses.replace(
            super().init(), delay=none, next_slot=self.slot_steps
        )

    def delay_of(self, state: ScheduleState, fragment: int) -> int:
        """Inner steps from the last start of `fragment` to its application."""
        return state.delay[fragment]

    def next_slot(self, state: ScheduleState) -> int:
        """The first step after `state.step` at which a fragment may start."""
        if self.network_share is None:
            return super().next_slot(state)
        return state.next_slot

    def may_start(self, state: ScheduleState, step: int) -> bool:
        """Whether a fragment may start at `step`, after the events up to `state`."""
        if self.network_share is None:
            return super().may_start(state, step)
        return step == state.next_slot

    def start(self, state, step, drift=None):
        """The sync that starts at `step`, if any; see `Schedule.start`."""
        if not self.may_start(state, step):
            return state, None
        state, event = super().start(state, step, drift)
        if event is not None:
            delay = list(state.delay)
            delay[event.fragment] = self._delay(state)
            state = dataclasses.replace(state, delay=tuple(delay))
        if self.network_share is not None:
            slot = step + self._steps_to_slot(state, step)
            state = dataclasses.replace(state, next_slot=slot)
        return state, event

    def observe_times(
        self, state: ScheduleState, times: Sequence[Sequence[float]]
    ) -> ScheduleState:
        """Tells the schedule T_c and T_s of every region, see `Schedule`."""
        step_time = max(step for step, _ in times)
        sync_time = min(sync for _, sync in times)
        if min(min(pair) for pair in times) <= 0:
            return state
        return dataclasses.replace(
            state,
            step_times=(*state.step_times, step_time)[-self.window :],
            sync_times=(*state.sync_times, sync_time)[-self.window :],
        )

    def _delay(self, state: ScheduleState) -> int:
        if not self.paces_delay:
            return self.delay_steps
        wanted = self.slot_steps  # One fragment on its way, until something is known.
        if state.sync_times:
            step_time = statistics.median(state.step_times)
            wanted = math.ceil(max(state.sync_times) / step_time)
        return max(1, min(wanted, self.delay_steps))

    def _slot_steps(self, state: ScheduleState) -> int:
        if self.network_share is None or not state.sync_times:
            return self.slot_steps
        num_syncs = syncs_that_fit(
            self.sync_interval,
            self.num_fragments,
            statistics.median(state.step_times),
            statistics.median(state.sync_times),
            self.network_share,
        )
        return self.sync_interval // num_syncs

    def _steps_to_slot(self, state: ScheduleState, step: int) -> int:
        last = sorted(max(start, 0) + self.sync_interval for start in state.last_start)
        in_time = [(deadline - step) // (i + 1) for i, deadline in enumerate(last)]
        return max(1, min(self._slot_steps(state), *in_time))


def staggered(
    sync_interval: int,
    num_fragments: int = 1,
    delay_steps: int | str = 0,
    max_delay_steps: int | None = None,
) -> Schedule:
    """As `schedule.staggered`, with a delay that may be measured.

    Args:
      sync_interval: H.
      num_fragments: K.
      delay_steps: tau, or "auto".
      max_delay_steps: the longest that "auto" may choose, at most H; None is H.

    Raises:
      ValueError: naming the argument, its value and what would be right.
    """
    _check_delay(delay_steps, max_delay_steps)
    if isinstance(delay_steps, int):
        return schedule.staggered(sync_interval, num_fragments, delay_steps)
    base = schedule.staggered(sync_interval, num_fragments)
    longest = sync_interval if max_delay_steps is None else max_delay_steps
    return _paced(base, delay_steps=longest)


def adaptive(
    sync_interval: int,
    num_fragments: int,
    delay_steps: int | str,
    syncs_per_interval: int | str,
    score: str = "pseudo_gradient",
    max_delay_steps: int | None = None,
    network_share: float | None = None,
) -> Schedule:
    """As `schedule.adaptive`, with a delay and slots that may be measured.

    Args:
      sync_interval: H.
      num_fragments: K.
      delay_steps: tau, or "auto".
      syncs_per_interval: N, or "auto", which begins with K.
      score: see `schedule.adaptive`.
      max_delay_steps: the longest that "auto" may choose; None is the longest there
        can be, about H.
      network_share: gamma in (0, 1] of an automatic N; None is 0.4.

    Raises:
      ValueError: naming the argument, its value and what would be right.
    """
    _check_delay(delay_steps, max_delay_steps)
    _check_count_or_auto("syncs_per_interval", syncs_per_interval)
    paces_delay = not isinstance(delay_steps, int)
    share = None
    if not isinstance(syncs_per_interval, int):
        share = 0.4 if network_share is None else network_share
    elif network_share is not None:
        raise ValueError(
            f"network_share={network_share} has no meaning with syncs_per_interval="
            f"{syncs_per_interval}; leave it out, or use syncs_per_interval={AUTO!r}"
        )
    first = num_fragments if share is not None else syncs_per_interval
    base = schedule.adaptive(sync_interval, num_fragments, 0, int(first), score)
    if share is None and isinstance(delay_steps, int):
        return dataclasses.replace(base, delay_steps=delay_steps)
    longest = base.longest_delay if share is None else sync_interval
    if isinstance(delay_steps, int):
        longest = delay_steps
    elif max_delay_steps is not None:
        longest = max_delay_steps
    return _paced(
        base, delay_steps=longest, paces_delay=paces_delay, network_share=share
    )


def _paced(base: Schedule, **more: Any) -> Paced:
    fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(Schedule)}
    return Paced(**fields | more)


def _check_delay(delay_steps: int | str, max_delay_steps: int | None) -> None:
    _check_count_or_auto("delay_steps", delay_steps)
    if isinstance(delay_steps, int) and max_delay_steps is not None:
        raise ValueError(
            f"max_delay_steps={max_delay_steps} has no meaning with delay_steps="
            f"{delay_steps}; leave it out, or use delay_steps={AUTO!r}"
        )


def _check_count_or_auto(name: str, value: int | str) -> None:
    if not isinstance(value, int) and value != AUTO:
        raise ValueError(f"{name}={value!r} must be a whole number or {AUTO!r}")
