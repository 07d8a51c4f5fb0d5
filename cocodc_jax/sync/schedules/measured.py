"""Schedules that adapt to the network's measured speed during a run.

Two numbers of a schedule depend on the network:

- *delay*: a sync is merged once it has arrived. With T_c the seconds of an inner step
  and T_s those of a sync,

      tau = ceil(T_s / T_c), at least 1 and at most `delay_steps`

- *slots*: as many syncs start in an interval as the network carries (CoCoDC, arXiv
  2504.17672, section 3.2; `adaptive.syncs_that_fit`),

      N = max(K, floor(gamma H T_c / T_s)) ;  h = floor(H / N)

All regions must use the same numbers, so measured times are sent with the messages, and
the schedule reads them when a sync is applied. T_c is the slowest region's. T_s is the
minimum over regions: the last region to send waits only for the network. Of the last
few syncs, T_c is the median; T_s is the maximum for the delay (a late sync blocks all
regions, an early one none), and the median for the slots.

A delay is chosen when its sync starts: to wait for arrivals costs a round trip each.

When h changes between two slots, the next slot may come sooner than h after the last,
so that all deadlines can still be met: with d_0 <= d_1 <= ... the last steps by which
the fragments must have started, the next slot after step t is at most
min_i floor((d_i - t) / (i + 1)) steps away.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any, ClassVar, cast

from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.schedules.adaptive import Adaptive, Score, syncs_that_fit
from cocodc_jax.sync.schedules.base import (
    Applied,
    Event,
    Observe,
    Pending,
    Schedule,
    nothing,
    set_whole_fields,
)
from cocodc_jax.sync.schedules.slotted import (
    Slotted,
    Staggered,
    ahead,
    check_delay,
    even_slots,
)
from cocodc_jax.transforms.numerics import check_at_least, check_unused

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class MeasuredState:
    """State of a measured schedule."""

    base: Any  # Of the schedule that chooses what starts.
    next_slot: int = 0  # Step of the next slot, if slots are measured, else 0.
    # Seconds of an inner step from the last messages, newest last.
    step_times: tuple[float, ...] = ()
    sync_times: tuple[float, ...] = ()  # Seconds of a sync, likewise.

    rank: ClassVar[int] = 0  # No measured schedule sets that of messages.

    @property
    def step(self) -> int:
        """The step up to which events were returned."""
        return self.base.step

    @property
    def in_flight(self) -> tuple[Pending, ...]:
        """Syncs not yet applied, oldest first."""
        return self.base.in_flight

    def to_json(self) -> dict:
        """Return plain values, for a checkpoint."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Measured(Schedule):
    """A schedule whose delay, or slots, or both, adapt to the network."""

    base: Slotted  # Chooses what starts; its `slot_steps` are those of the first slots.
    delay_steps: int  # The maximum delay; the delay itself, if that is not measured.
    measures_delay: bool = True  # Whether the delay is measured.
    # gamma in (0, 1], the share of the network that may be used, if slots are measured;
    # None keeps them.
    network_share: float | None = None
    window: int = 5  # How many syncs count.

    def __post_init__(self):
        # Measured slots can wait for a fragment, up to its deadline.
        fixed = self.network_share is None
        longest = self.base.longest_delay if fixed else self.sync_interval
        if self.measures_delay:
            check_at_least("max_delay_steps", self.delay_steps, 1)
        set_whole_fields(self, delay_steps=0, window=1)

        if self.measures_delay and self.delay_steps > longest:
            raise ValueError(
                f"max_delay_steps={self.delay_steps} must be at least 1 and at most "
                f"{longest}: a fragment must arrive before it starts again"
            )

        check_delay(self.delay_steps, self.sync_interval, longest)
        if self.network_share is not None:  # Checks it.
            syncs_that_fit(1, 1, 1.0, 1.0, self.network_share)

    @property
    def num_fragments(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """K."""
        return self.base.num_fragments

    @property
    def sync_interval(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """H."""
        return self.base.sync_interval

    @property
    def slot_steps(self) -> int:
        """h, of the first slots."""
        return self.base.slot_steps

    @property
    def needs(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Measured times, and the needs of the base."""
        return self.base.needs | {"times"}

    def init(self) -> MeasuredState:
        """Return the state before the first step."""
        return MeasuredState(self.base.init(), next_slot=self.slot_steps)

    def restore(self, value: dict) -> MeasuredState:
        """Return a state; see `Schedule.restore`."""
        return MeasuredState(
            base=self.base.restore(value["base"]),
            next_slot=value["next_slot"],
            step_times=tuple(value["step_times"]),
            sync_times=tuple(value["sync_times"]),
        )

    def landed(self, state: MeasuredState) -> MeasuredState:
        """Return the state with nothing in flight."""
        return dataclasses.replace(state, base=self.base.landed(state.base))

    def begin_at(self, step: int) -> MeasuredState:
        """Return the state of a schedule that starts, without measurements."""
        return MeasuredState(self.base.begin_at(step), step + self.slot_steps)

    def bind(self, regions: Regions, looks_midway: bool = False) -> Measured:
        """Return the schedule for these regions; see `Schedule.bind`."""
        if looks_midway:
            name = "delay_steps" if self.measures_delay else "syncs_per_interval"
            raise ValueError(
                f"{name}={AUTO!r} is not possible where a merge compares the two "
                "halves of the delay; use a number"
            )
        return dataclasses.replace(self, base=self.base.bind(regions))

    def next_step(self, state: MeasuredState) -> int:
        """Return the first step after `state.step` at which something happens."""
        return min([self._next_slot(state), *ahead(state.base)])

    def next_event(
        self, state: MeasuredState, step: int, observe: Observe = nothing
    ) -> tuple[MeasuredState, Event | None]:
        """Return arrivals, then starts; see `Schedule.next_event`."""
        # Slots are read from the state before its step advances.
        is_slot = step > 0 and step == self._next_slot(state, step - 1)
        base, event = self.base.arrive(state.base, step)
        state = dataclasses.replace(state, base=base)
        if event is not None or not is_slot or step in base.last_start:
            return state, event

        for applied in observe("applied"):
            state = self.learn(state, applied)
        delay = self._delay(state)
        slot_steps = self._slot_steps(state)

        def seen_already(name: str) -> Any:  # Updates have been passed on.
            return [] if name == "applied" else observe(name)

        base, event = self.base.leave(state.base, step, seen_already, delay, slot_steps)
        state = dataclasses.replace(state, base=base)
        if self.network_share is None:
            return state, event

        # The next slot comes soon enough for every deadline, see the module.
        starts = sorted(max(start, 0) for start in base.last_start)
        steps_left = [start + self.sync_interval - step for start in starts]
        in_time = [steps // (i + 1) for i, steps in enumerate(steps_left)]
        next_slot = step + max(1, min(slot_steps, *in_time))
        return dataclasses.replace(state, next_slot=next_slot), event

    def learn(self, state: MeasuredState, applied: Applied) -> MeasuredState:
        """Return the state with T_c and T_s of every region, and the update."""
        base = self.base.learn(state.base, applied)
        state = dataclasses.replace(state, base=base)

        times = applied.seen.get("times")
        if times is None or min(min(pair) for pair in times) <= 0:  # Not yet measured.
            return state

        step_time = max(step for step, _ in times)
        sync_time = min(sync for _, sync in times)
        return dataclasses.replace(
            state,
            step_times=(*state.step_times, step_time)[-self.window :],
            sync_times=(*state.sync_times, sync_time)[-self.window :],
        )

    def _next_slot(self, state: MeasuredState, after: int | None = None) -> int:
        if self.network_share is not None:
            return state.next_slot
        return self.base.next_slot(state.step if after is None else after)

    def _delay(self, state: MeasuredState) -> int:
        if not self.measures_delay:
            return self.delay_steps
        wanted = self.slot_steps  # One fragment in flight, until measured.
        if state.sync_times:
            step_time = statistics.median(state.step_times)
            wanted = math.ceil(max(state.sync_times) / step_time)
        return max(1, min(wanted, self.delay_steps))

    def _slot_steps(self, state: MeasuredState) -> int:
        if self.network_share is None or not state.sync_times:
            return self.slot_steps

        num_syncs = syncs_that_fit(
            sync_interval=self.sync_interval,
            num_fragments=self.num_fragments,
            step_time=statistics.median(state.step_times),
            sync_time=statistics.median(state.sync_times),
            network_share=self.network_share,
        )
        return self.sync_interval // num_syncs


def staggered(
    sync_interval: int,
    num_fragments: int = 1,
    delay_steps: int | str = 0,
    phase_steps: int = 0,
    max_delay_steps: int | None = None,
) -> Staggered | Measured:
    """Start each fragment every `sync_interval` steps, evenly spaced.

    With `delay_steps` "auto" the delay is measured, and at most `max_delay_steps`.
    """
    is_measured = _is_auto("delay_steps", delay_steps, max_delay_steps=max_delay_steps)
    base = Staggered(
        num_fragments=num_fragments,
        sync_interval=sync_interval,
        delay_steps=0 if is_measured else cast(int, delay_steps),
        slot_steps=even_slots(sync_interval, num_fragments),
        phase_steps=phase_steps,
    )

    if not is_measured:
        return base
    return Measured(base, sync_interval if max_delay_steps is None else max_delay_steps)


def adaptive(
    sync_interval: int,
    num_fragments: int,
    delay_steps: int | str,
    syncs_per_interval: int | str,
    transmission_score: Score = "pseudo_gradient",
    max_delay_steps: int | None = None,
    network_share: float | None = None,
) -> Adaptive | Measured:
    """Start `syncs_per_interval` syncs per interval, of what changes fastest.

    With `delay_steps` "auto" the delay is measured, and at most `max_delay_steps`; with
    `syncs_per_interval` "auto" the slots, for `network_share` of the network, by
    default 0.4.
    """
    is_measured = _is_auto("delay_steps", delay_steps, max_delay_steps=max_delay_steps)

    # The network's share, and syncs in the first interval.
    share = None
    num_syncs = syncs_per_interval
    if _is_auto("syncs_per_interval", num_syncs, network_share=network_share):
        share = 0.4 if network_share is None else network_share
        num_syncs = num_fragments
    check_at_least("num_fragments", num_fragments, 1)
    check_at_least("sync_interval", sync_interval, 1)

    num_syncs = cast(int, num_syncs)
    if not num_fragments <= num_syncs <= sync_interval:
        raise ValueError(
            f"syncs_per_interval={num_syncs} must be at least num_fragments="
            f"{num_fragments} and at most sync_interval={sync_interval}"
        )

    is_fixed = not is_measured and share is None
    base = Adaptive(
        num_fragments=num_fragments,
        sync_interval=sync_interval,
        delay_steps=cast(int, delay_steps) if is_fixed else 0,
        slot_steps=sync_interval // num_syncs,
        transmission_score=transmission_score,
    )
    if is_fixed:
        return base

    longest = cast(int, delay_steps)
    if is_measured:
        longest = base.longest_delay if share is None else sync_interval
        longest = longest if max_delay_steps is None else max_delay_steps
    return Measured(base, longest, is_measured, share)


def _is_auto(name: str, value: int | str, **of_auto: float | None) -> bool:
    """Return whether a number is to be measured; `of_auto` has no meaning if not."""
    if not hasattr(value, "__index__"):
        if value != AUTO:
            raise ValueError(f"{name}={value!r} must be a whole number or {AUTO!r}")
        return True
    for other, setting in of_auto.items():
        check_unused(other, setting, None, f"{name}={value}")
    return False
