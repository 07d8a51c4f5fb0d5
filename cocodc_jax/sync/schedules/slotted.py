"""Schedules whose fragments start at slots, `slot_steps` inner steps apart.

`Slotted.serve` returns the fragment that a slot serves: by a choice (`adaptive.py`), or
in the fixed order of the schedules here. `measured.py` moves the slots.

- `staggered` (Streaming DiLoCo, arXiv 2501.18512): slot j serves fragment j mod K with
  slots H / K apart, so fragment p starts at p H / K, then every H steps; it is applied
  tau steps later. With K = 1 this is DiLoCo: the full model every H steps. With a phase
  f every start is f steps sooner: if f is tau, or tau mod H / K, merges are at the
  multiples of H / K, as in programs that count from the merge.
- `one_step_stale`: a message is applied one full round after it was sent (CO2, DiLoCoX,
  eager updates). It is sent, with the progress of the round, before the previous one is
  applied. The message of the round before the first is zero, so that at the first slot
  the regions go back to the outer parameters: an update never counts twice.

At a step, arriving fragments are applied before others are sent. So a single fragment
with tau = H is merged in the step of its next start, and then sent with a
pseudo-gradient measured from the new outer fragment. Only one-step-stale messages have
the opposite order.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any

from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.schedules.base import (
    START,
    Event,
    Observe,
    Pending,
    Schedule,
    ScheduleState,
    nothing,
    set_whole_fields,
)
from cocodc_jax.transforms.numerics import check_at_least


@dataclasses.dataclass(frozen=True)
class Slotted(Schedule):
    """A schedule whose fragments start at slots; subclasses define `serve`."""

    num_fragments: int  # K.
    sync_interval: int  # H.
    delay_steps: int  # tau.
    slot_steps: int  # h, inner steps between two slots.
    # The regions whose messages count, ascending; None is all of them.
    participating: tuple[int, ...] | None = None
    looks_midway: bool = False  # Whether there are `MIDWAY` events.
    # Steps by which every slot precedes a multiple of `slot_steps`.
    phase_steps: int = dataclasses.field(default=0, kw_only=True)

    def __post_init__(self):
        set_whole_fields(
            self,
            num_fragments=1,
            sync_interval=1,
            delay_steps=0,
            slot_steps=1,
            phase_steps=0,
        )

        slots = self.sync_interval // self.slot_steps
        if slots < self.num_fragments:
            raise ValueError(
                f"slot_steps={self.slot_steps} gives {slots} starts in sync_interval="
                f"{self.sync_interval}, too few for num_fragments="
                f"{self.num_fragments}; lower slot_steps or raise sync_interval"
            )
        if self.phase_steps >= self.slot_steps:
            raise ValueError(
                f"phase_steps={self.phase_steps} must be at least 0 and below "
                f"{self.slot_steps}, the steps between two starts"
            )

        check_delay(self.delay_steps, self.sync_interval, self.longest_delay)

    @property
    def longest_delay(self) -> int:
        """Maximum delay: a fragment must arrive before the slot of its deadline."""
        return self.sync_interval // self.slot_steps * self.slot_steps

    def bind(self, regions: Regions, looks_midway: bool = False) -> Slotted:
        """Return the schedule for these regions; see `Schedule.bind`."""
        if self.participating and max(self.participating) >= regions.num:
            raise ValueError(
                f"participating={self.participating} names a region that is none of "
                f"the {regions.num}; regions are counted from 0"
            )
        if looks_midway and self.delay_steps < 2:
            raise ValueError(
                f"delay_steps={self.delay_steps} must be at least 2 where a merge "
                "compares the two halves of it"
            )
        if looks_midway == self.looks_midway:
            return self

        return dataclasses.replace(self, looks_midway=looks_midway)

    @abc.abstractmethod
    def serve(
        self, state: Any, step: int, observe: Observe, slot_steps: int
    ) -> tuple[Any, int | None]:
        """Return which fragment a slot serves, and the state after the choice."""

    def slot(self, step: Any) -> Any:
        """Return the number of the last slot up to `step`; 0 is before the first."""
        return (step + self.phase_steps) // self.slot_steps

    def next_slot(self, step: int) -> int:
        """Return the step of the first slot after `step`."""
        return (self.slot(step) + 1) * self.slot_steps - self.phase_steps

    def next_step(self, state: ScheduleState) -> int:
        """Return the first step after `state.step` at which something happens."""
        return min([self.next_slot(state.step), *ahead(state)])

    def next_event(
        self, state: Any, step: int, observe: Observe = nothing
    ) -> tuple[Any, Event | None]:
        """Return arrivals, then starts; see `Schedule.next_event`."""
        state, event = self.arrive(state, step)
        if event is not None or step <= 0 or step != self.next_slot(step - 1):
            return state, event
        return self.leave(
            state,
            step,
            observe,
            delay_steps=self.delay_steps,
            slot_steps=self.slot_steps,
        )

    def leave(
        self, state: Any, step: int, observe: Observe, delay_steps: int, slot_steps: int
    ) -> tuple[Any, Event | None]:
        """Return the start at a slot at `step`, if any."""
        if step in state.last_start:
            return state, None

        state, k = self.serve(state, step, observe, slot_steps)
        if k is None:
            return state, None
        return self.departed(state, step, k, delay_steps)

    def departed(
        self, state: Any, step: int, fragment_id: int, delay_steps: int
    ) -> tuple[Any, Event]:
        """Return the start of a fragment at `step`, and the state after it."""
        pending = Pending(
            fragment_id=fragment_id,
            start_step=step,
            apply_step=step + delay_steps,
            midway_step=step + delay_steps // 2 if self.looks_midway else None,
            participating=self.participating,
        )
        event = pending.event(START, max(state.last_start[fragment_id], 0))
        return state.sent(pending, fragment_id), event


@dataclasses.dataclass(frozen=True)
class Staggered(Slotted):
    """Slot j serves fragment j mod K; see `measured.staggered`."""

    def init(self) -> ScheduleState:
        """Return the state before the first step."""
        return ScheduleState(0, (), (-1,) * self.num_fragments)

    def serve(
        self, state: Any, step: int, observe: Observe, slot_steps: int
    ) -> tuple[Any, int | None]:
        """Return the next fragment in order, None while it is in flight."""
        k = self.slot(step) % self.num_fragments
        return state, k if k in free_fragments(self, state) else None


@dataclasses.dataclass(frozen=True)
class OneStepStale(Staggered):
    """Each fragment is applied when its next message is sent; see `one_step_stale`."""

    def __post_init__(self):
        super().__post_init__()
        if self.phase_steps:
            raise ValueError(
                f"phase_steps={self.phase_steps} has no meaning where a message is one "
                "round late; use 0"
            )
        if self.delay_steps != self.sync_interval:
            raise ValueError(
                f"delay_steps={self.delay_steps} must be sync_interval="
                f"{self.sync_interval} where a message leaves before the one of the "
                "round before is applied"
            )

    def init(self) -> ScheduleState:
        """Return the state with zero messages, sent a round before the first."""
        return self.begin_at(0)

    def begin_at(self, step: int) -> ScheduleState:
        """Return the state with zero messages, each to arrive at its next slot."""
        num = self.num_fragments
        interval = self.sync_interval

        flying = []
        for j in range(1 - num, 1):
            start = j * self.slot_steps
            apply_step = start + ((step - start) // interval + 1) * interval
            midway_step = apply_step - self.delay_steps + self.delay_steps // 2
            has_midway = self.looks_midway and midway_step > step
            pending = Pending(
                fragment_id=j % num,
                start_step=start,
                apply_step=apply_step,
                midway_step=midway_step if has_midway else None,
            )
            flying.append(pending)

        flying.sort(key=lambda pending: pending.apply_step)
        return ScheduleState(step, tuple(flying), (step or -1,) * num)

    def next_event(
        self, state: ScheduleState, step: int, observe: Observe = nothing
    ) -> tuple[ScheduleState, Event | None]:
        """Return starts, then arrivals; see `Schedule.next_event`."""
        if step > 0 and step % self.slot_steps == 0:
            # An arrival frees its fragment.
            due = tuple(p for p in state.in_flight if p.apply_step <= step)
            rest = tuple(p for p in state.in_flight if p.apply_step > step)
            free = dataclasses.replace(state, in_flight=rest)
            after, event = self.leave(
                free,
                step,
                observe,
                delay_steps=self.delay_steps,
                slot_steps=self.slot_steps,
            )
            if event is not None:
                flying = (*due, *after.in_flight)
                return dataclasses.replace(after, in_flight=flying), event

        return self.arrive(state, step)


def one_step_stale(sync_interval: int, num_fragments: int = 1) -> OneStepStale:
    """Start each fragment every `sync_interval` steps, applied at its next start."""
    slot_steps = even_slots(sync_interval, num_fragments)
    return OneStepStale(num_fragments, sync_interval, sync_interval, slot_steps)


def even_slots(sync_interval: int, num_fragments: int) -> int:
    """Return the steps between the slots of fragments that start evenly spaced."""
    check_at_least("num_fragments", num_fragments, 1)
    check_at_least("sync_interval", sync_interval, 1)
    if sync_interval % num_fragments:
        below = sync_interval // num_fragments * num_fragments
        options = [str(n) for n in (below, below + num_fragments) if n]
        raise ValueError(
            f"sync_interval={sync_interval} is not a multiple of num_fragments="
            f"{num_fragments}; use {' or '.join(options)}"
        )
    return sync_interval // num_fragments


def ahead(state: ScheduleState) -> Iterator[int]:
    """Yield the steps of events of the fragments in flight."""
    for pending in state.in_flight:
        if pending.midway_step is not None:
            yield pending.midway_step
        yield pending.apply_step


def check_delay(delay_steps: int, sync_interval: int, longest: int) -> None:
    """Refuse a delay after which a fragment may arrive too late."""
    if not 0 <= delay_steps <= longest:
        raise ValueError(
            f"delay_steps={delay_steps} is longer than sync_interval={sync_interval} "
            "allows; a fragment must arrive before it starts again: use at most "
            f"{longest}"
        )


def free_fragments(schedule: Schedule, state: ScheduleState) -> list[int]:
    """List the fragments that are not in flight."""
    flying = {p.fragment_id for p in state.in_flight}
    return [k for k in range(schedule.num_fragments) if k not in flying]
