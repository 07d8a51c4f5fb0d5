"""Fragments in a fixed order, independent of the updates.

- `staggered` (Streaming DiLoCo, arXiv 2501.18512): slot j serves fragment j mod K with
  slots H / K apart, so fragment p starts at p H / K, then every H steps; it is applied
  tau steps later. With K = 1 this is DiLoCo: the full model every H steps. With a phase
  f every start is f steps sooner: if f is tau, or tau mod H / K, merges are at the
  multiples of H / K, as in programs that count from the merge.
- `one_step_stale`: a message is applied one full round after it was sent (CO2, DiLoCoX,
  eager updates). It is sent, with the progress of the round, before the previous one is
  applied. The message of the round before the first is zero, so that at the first slot
  the regions go back to the outer parameters: an update never counts twice.

At a step, arriving fragments are applied before others are sent: with tau >= H / K, a
fragment that starts where another one arrives is sent with that one merged already. The
same holds for a single fragment with tau = H: it arrives in the step of its next start,
is merged first, and the merged one is sent, with a pseudo-gradient measured from the
new outer fragment. Only one-step-stale messages have the opposite order.
"""

from __future__ import annotations

import dataclasses

from cocodc_jax.sync.schedules.base import (
    Observe,
    Pending,
    ScheduleState,
    check_at_least,
    nothing,
)
from cocodc_jax.sync.schedules.slotted import Slotted, free_fragments


@dataclasses.dataclass(frozen=True)
class Staggered(Slotted):
    """Slot j serves fragment j mod K; see `staggered`."""

    def init(self) -> ScheduleState:
        """Return the state before the first step."""
        return ScheduleState(0, (), (-1,) * self.num_fragments)

    def restore(self, value: dict) -> ScheduleState:
        """Return the state that `to_json` was called on."""
        return ScheduleState.from_json(value)

    def serve(self, state, step, observe: Observe, slot_steps: int):
        """Return the next fragment in order, None while it is in flight."""
        del observe
        del slot_steps
        k = self.slot(step) % self.num_fragments
        return state, k if k in free_fragments(self, state) else None


@dataclasses.dataclass(frozen=True)
class OneStepStale(Staggered):
    """Each fragment is applied when its next message is sent; see `one_step_stale`."""

    def __post_init__(self):
        """Check that the delay is one round."""
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
        flying = []
        for j in range(1 - self.num_fragments, 1):
            start = j * self.slot_steps
            midway = start + self.delay_steps // 2
            flying.append(
                Pending(
                    j % self.num_fragments,
                    start,
                    start + self.delay_steps,
                    midway if self.looks_midway and midway > 0 else None,
                )
            )
        return dataclasses.replace(super().init(), in_flight=tuple(flying))

    def begin_at(self, step: int) -> ScheduleState:
        """Return the state with zero messages, each to arrive at its next slot."""
        if not step:
            return self.init()
        flying, half = [], self.delay_steps - self.delay_steps // 2
        for pending in self.init().in_flight:
            rounds = (step - pending.apply_step) // self.sync_interval + 1
            apply_step = pending.apply_step + rounds * self.sync_interval
            is_ahead = self.looks_midway and apply_step - half > step
            midway = apply_step - half if is_ahead else None
            flying.append(pending._replace(apply_step=apply_step, midway_step=midway))
        flying.sort(key=lambda pending: pending.apply_step)
        return dataclasses.replace(super().begin_at(step), in_flight=tuple(flying))

    def next_event(self, state, step, observe: Observe = nothing):
        """Return starts, then arrivals; see `Schedule.next_event`."""
        if step > 0 and step % self.slot_steps == 0:
            # An arrival frees its fragment.
            due = tuple(p for p in state.in_flight if p.apply_step <= step)
            rest = tuple(p for p in state.in_flight if p.apply_step > step)
            left, event = self.leave(
                dataclasses.replace(state, in_flight=rest),
                step,
                observe,
                self.delay_steps,
                self.slot_steps,
            )
            if event is not None:
                flying = (*due, *left.in_flight)
                return dataclasses.replace(left, in_flight=flying), event
        return self.arrive(state, step)


def staggered(
    sync_interval: int,
    num_fragments: int = 1,
    delay_steps: int = 0,
    phase_steps: int = 0,
) -> Staggered:
    """Start each fragment every `sync_interval` steps, evenly spaced.

    Raises:
      ValueError: if `sync_interval` is not a multiple of `num_fragments`, the delay is
        longer than the interval, or the phase is not shorter than a slot.
    """
    slot_steps = _slot_steps(sync_interval, num_fragments)
    return Staggered(
        num_fragments, sync_interval, delay_steps, slot_steps, phase_steps=phase_steps
    )


def one_step_stale(sync_interval: int, num_fragments: int = 1) -> OneStepStale:
    """Start each fragment every `sync_interval` steps, apply it as its next one starts.

    Raises:
      ValueError: if `sync_interval` is not a multiple of `num_fragments`.
    """
    slot_steps = _slot_steps(sync_interval, num_fragments)
    return OneStepStale(num_fragments, sync_interval, sync_interval, slot_steps)


def _slot_steps(sync_interval: int, num_fragments: int) -> int:
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
