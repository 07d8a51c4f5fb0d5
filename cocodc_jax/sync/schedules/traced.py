"""Slotted schedules inside a compiled program: what they remember, as arrays.

A program that holds a schedule's events among its inner steps (`runtime/embedded.py`)
cannot ask the host what a slot serves. Where nothing has to be observed for that, the
host says it before. Where norms decide (`adaptive.py`), this is the same choice in the
program's own operations, in float32 where the host has float64: between two scores that
differ by less than float32 tells apart, the other fragment may be chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.sync.needs import NORM
from cocodc_jax.sync.schedules.adaptive import Adaptive, AdaptiveState
from cocodc_jax.sync.schedules.base import Event, Schedule, ScheduleState
from cocodc_jax.sync.schedules.fixed import Staggered
from cocodc_jax.sync.schedules.slotted import Slotted

_NEVER = -1


class Memory(NamedTuple):
    """What a slotted schedule remembers, an entry a fragment.

    Attributes:
      last_start: int32 `[K]`, step of the last start, -1 for never.
      apply_step: int32 `[K]`, when what is in flight is applied, -1 for nothing.
      interval: int32 `[K]`, steps between the last two starts; this and the next two
        as of `AdaptiveState`, None for other schedules.
      observed_interval: int32 `[K]`, that `norm` was gathered over.
      norm: float32 `[K]`, of the last applied mean pseudo-gradient.
    """

    last_start: Any
    apply_step: Any
    interval: Any = None
    observed_interval: Any = None
    norm: Any = None


def can_trace(schedule: Schedule | None) -> bool:
    """Tell whether a schedule can be had inside a program."""
    if isinstance(schedule, Slotted) and schedule.looks_midway:
        return False
    # Not what is made of them: those have another order of events, or choose otherwise.
    if type(schedule) is Adaptive:
        return schedule.needs <= {NORM}
    return type(schedule) is Staggered


def memory_of(schedule: Slotted, state: ScheduleState) -> Memory:
    """Return what a schedule remembers as arrays of the host."""
    apply_step = [_NEVER] * schedule.num_fragments
    for pending in state.in_flight:
        apply_step[pending.fragment_id] = pending.apply_step
    times = (state.last_start, apply_step)
    memory = Memory(*(np.array(x, np.int32) for x in times))
    if not isinstance(state, AdaptiveState):
        return memory
    return memory._replace(
        interval=np.array(state.interval, np.int32),
        observed_interval=np.array(state.observed_interval, np.int32),
        norm=np.array(state.norm, np.float32),
    )


def arrival(memory: Memory, step: jax.Array) -> jax.Array:
    """Return the fragment that is applied at `step`, int32 scalar; K for none."""
    return _first(memory.apply_step == step)


def applied(memory: Memory, fragment_id: jax.Array, norm: jax.Array) -> Memory:
    """Return what is remembered once a fragment is applied; nothing new for K."""
    at = jnp.arange(len(memory.apply_step)) == fragment_id
    memory = memory._replace(apply_step=jnp.where(at, _NEVER, memory.apply_step))
    if memory.norm is None:
        return memory
    return memory._replace(
        observed_interval=jnp.where(at, memory.interval, memory.observed_interval),
        norm=jnp.where(at, norm, memory.norm),
    )


def started(
    memory: Memory, fragment_id: jax.Array, step: jax.Array, delay_steps: int
) -> Memory:
    """Return what is remembered once a fragment has started; nothing new for K."""
    at = jnp.arange(len(memory.apply_step)) == fragment_id
    since = step - jnp.maximum(memory.last_start, 0)
    memory = memory._replace(
        last_start=jnp.where(at, step, memory.last_start),
        apply_step=jnp.where(at, step + delay_steps, memory.apply_step),
    )
    if memory.interval is None:
        return memory
    return memory._replace(interval=jnp.where(at, since, memory.interval))


def choice(
    schedule: Adaptive, num_params: Sequence[int], memory: Memory, step: jax.Array
) -> jax.Array:
    """Return the fragment that starts at `step`, as `Adaptive.serve` chooses.

    Args:
      schedule: of a score that is made of norms.
      num_params: of each fragment.
      memory: after what is applied at `step`, unless it starts there.
      step: int32 scalar.

    Returns:
      Int32 scalar, K where `step` is no slot or each fragment is in flight.
    """
    last_start = memory.last_start
    free = memory.apply_step == _NEVER
    is_slot = (step + schedule.phase_steps) % schedule.slot_steps == 0
    is_slot &= free.any() & (last_start != step).all()
    since = jnp.maximum(last_start, 0)
    due = (since + schedule.sync_interval - step) // schedule.slot_steps
    is_tight = ((due[None, :] <= due[:, None]).sum(1) > due).any()
    never = free & (last_start < 0)
    scores = jnp.where(free, _scores(schedule, num_params, memory, step), -jnp.inf)
    # Not `==`: of scores that are NaN each is as good.
    best = free & ~(scores < scores.max())
    chosen = jnp.where(
        is_tight,
        _least(free, since),
        jnp.where(never.any(), _first(never), _least(best, last_start)),
    )
    return jnp.where(is_slot, chosen, len(num_params)).astype(jnp.int32)


def _scores(
    schedule: Adaptive, num_params: Sequence[int], memory: Memory, step: jax.Array
) -> jax.Array:
    """Return float32 `[K]`; 0 where nothing is known."""
    interval = memory.observed_interval
    size = np.array(num_params, np.float32)
    if schedule.transmission_score == "pseudo_gradient":
        moved = memory.norm / size / interval
    else:
        is_aged = schedule.transmission_score == "aged"
        steps = step - memory.last_start if is_aged else 1
        moved = memory.norm / np.sqrt(size) * steps / interval
    return jnp.where(interval > 0, moved, 0.0)


def _first(mask: jax.Array) -> jax.Array:
    """Return the first index of what is true, int32 scalar; the length if nothing."""
    found = jnp.where(mask.any(), jnp.argmax(mask), len(mask))
    return found.astype(jnp.int32)


def _least(mask: jax.Array, values: jax.Array) -> jax.Array:
    """Return the first index of the least value where the mask is true."""
    return jnp.argmin(jnp.where(mask, values, np.iinfo(np.int32).max))


def events_after(
    schedule: Slotted,
    state: Any,
    step: int,
    fragment_id: int | None,
    learn: Callable[[Any, Event], Any],
) -> tuple[Any, list[Event]]:
    """Return what happened at `step`, in order, where it is known what started.

    Args:
      schedule: any that can be traced.
      state: its state, up to `step`.
      step: inner steps done.
      fragment_id: what started; None is nothing.
      learn: `learn(state, finish) -> state`, which knows of what was applied.

    Returns:
      The schedule's state after it, and the events.
    """
    events = []

    def arrivals(state: Any) -> Any:
        while True:
            state, event = schedule.arrive(state, step)
            if event is None:
                return state
            events.append(event)
            state = learn(state, event)

    state = arrivals(state)
    if fragment_id is None:
        return state, events
    state, event = schedule.departed(state, step, fragment_id, schedule.delay_steps)
    events.append(event)
    return arrivals(state), events  # Without a delay it arrives at once.
