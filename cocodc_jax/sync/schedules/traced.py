"""Slotted schedules inside a compiled program: what they remember, as arrays.

The same schedules and the same rule of choice as on the host (`adaptive.py`), asked
once for each step; in float32 where the host has float64, so that of two scores that
differ by less than float32 tells apart the other fragment may be chosen.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.sync.schedules.adaptive import Adaptive, highest
from cocodc_jax.sync.schedules.base import Observe, Schedule
from cocodc_jax.sync.schedules.fixed import Staggered
from cocodc_jax.sync.schedules.slotted import Slotted

_NEVER = -1


class Times(NamedTuple):
    """What a slotted schedule remembers, an entry a fragment.

    Attributes:
      last_start: int32 `[K]`, step of the last start, -1 for never.
      apply_step: int32 `[K]`, when what is in flight is applied, -1 for nothing.
      interval: int32 `[K]`, steps between the last two starts.
      observed_interval: int32 `[K]`, that `norm` was gathered over.
      norm: float32 `[K]`, of the last applied mean pseudo-gradient.
    """

    last_start: Any
    apply_step: Any
    interval: Any
    observed_interval: Any
    norm: Any


def why_not(schedule: Schedule) -> str | None:
    """Tell why a schedule cannot be had inside a program, None if it can."""
    if schedule.is_by_region:
        return "its regions come one by one, each at a time of its own"
    if schedule.is_measured:
        return "its events follow times that the host measures; give numbers"
    if not isinstance(schedule, Staggered | Adaptive):
        return f"{type(schedule).__name__} is a schedule of the host"
    return None


def first_times(schedule: Slotted) -> Times:
    """Return what is remembered before the first step."""
    apply_step = np.full(schedule.num_fragments, _NEVER, np.int32)
    for pending in schedule.init().in_flight:  # Messages of zero.
        apply_step[pending.fragment_id] = pending.apply_step
    never = jnp.full(len(apply_step), _NEVER, jnp.int32)
    none = jnp.zeros(len(apply_step), jnp.int32)
    times = never, jnp.asarray(apply_step), none, none, none.astype(jnp.float32)
    return Times(*times)


def is_slot(schedule: Slotted, step: jax.Array) -> jax.Array:
    """Tell whether a fragment may start at `step`, bool scalar."""
    return (step + schedule.phase_steps) % schedule.slot_steps == 0


def is_due(schedule: Slotted, times: Times, step: jax.Array) -> jax.Array:
    """Tell whether anything may happen at `step`, bool scalar."""
    due = is_slot(schedule, step) | arriving(times, step).any()
    return due | midway(schedule, times, step).any() if schedule.looks_midway else due


def arriving(times: Times, step: jax.Array) -> jax.Array:
    """Tell which fragment is applied at `step`, bool `[K]`."""
    return times.apply_step == step


def midway(schedule: Slotted, times: Times, step: jax.Array) -> jax.Array:
    """Tell which fragment is half of its delay old, bool `[K]`."""
    rest = schedule.delay_steps - schedule.delay_steps // 2
    return times.apply_step == step + rest


def leaving(
    schedule: Slotted,
    num_params: tuple[int, ...],
    times: Times,
    step: jax.Array,
    observe: Observe,
) -> jax.Array:
    """Tell which fragment starts at `step`, bool `[K]`, as `Slotted.serve` chooses.

    Args:
      schedule: one that `why_not` has nothing against.
      num_params: of each fragment.
      times: after what is applied before.
      step: int32 scalar, at least 1.
      observe: gives what a score is made of, see `Adaptive.scores`.
    """
    each = np.arange(len(num_params))
    free = times.apply_step <= step  # What arrives now makes room.
    open_to = is_slot(schedule, step) & free
    if not isinstance(schedule, Adaptive):
        return open_to & (schedule.slot(cast(Any, step)) % len(each) == each)
    chosen = schedule.forced(jnp, free, times.last_start, step, schedule.slot_steps)
    scores = schedule.scores(
        jnp,
        times.last_start,
        times.norm,
        np.array(num_params, np.float32),
        times.observed_interval,
        step,
        observe,
    )
    best = highest(jnp, free, times.last_start, scores)
    return open_to & (jnp.where(chosen < len(each), chosen, best) == each)


def started(times: Times, which: jax.Array, step: jax.Array, delay_steps: int) -> Times:
    """Return what is remembered once `which`, bool `[K]`, has started."""
    since = step - jnp.maximum(times.last_start, 0)
    return times._replace(
        last_start=jnp.where(which, step, times.last_start),
        apply_step=jnp.where(which, step + delay_steps, times.apply_step),
        interval=jnp.where(which, since, times.interval),
    )


def applied(times: Times, which: jax.Array, step: jax.Array, norm: jax.Array) -> Times:
    """Return what is remembered once `which`, bool `[K]`, is applied.

    Args:
      times: before it.
      which: that arrived; one that has started again at once stays in flight.
      step: int32 scalar.
      norm: float32 scalar or `[K]`, of its mean.
    """
    return times._replace(
        apply_step=jnp.where(times.apply_step == step, _NEVER, times.apply_step),
        observed_interval=jnp.where(which, times.interval, times.observed_interval),
        norm=jnp.where(which, norm, times.norm),
    )
