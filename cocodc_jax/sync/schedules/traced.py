"""Slotted schedules inside a compiled program, with their state as arrays.

The schedules and their rule of choice are those of the host (`adaptive.py`), evaluated
at each step. Scores are float32, but float64 on the host: if two scores are equal in
float32, another fragment may be chosen.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.sync.schedules.adaptive import Adaptive, highest
from cocodc_jax.sync.schedules.base import Observe, Schedule
from cocodc_jax.sync.schedules.slotted import Slotted, Staggered

_NEVER = -1


class Times(NamedTuple):
    """State of a slotted schedule, one entry per fragment."""

    last_start: Any  # int32 `[K]`, step of the last start, -1 for never.
    apply_step: Any  # int32 `[K]`, when the fragment in flight is applied, -1 for none.
    interval: Any  # int32 `[K]`, steps between the last two starts.
    # int32 `[K]`, the interval that `norm` was accumulated over.
    observed_interval: Any
    norm: Any  # float32 `[K]`, of the last applied mean pseudo-gradient.


def why_not(schedule: Schedule) -> str | None:
    """Return why a schedule cannot run inside a program, None if it can."""
    if schedule.is_by_region:
        return "its regions come one by one, each at a time of its own"
    if schedule.is_measured:
        return "its events follow times that the host measures; give numbers"
    if not isinstance(schedule, Staggered | Adaptive):
        return f"{type(schedule).__name__} is a schedule of the host"
    return None


def first_times(schedule: Slotted) -> Times:
    """Return the initial state."""
    apply_step = np.full(schedule.num_fragments, _NEVER, np.int32)
    for pending in schedule.init().in_flight:  # Zero messages.
        apply_step[pending.fragment_id] = pending.apply_step

    never = jnp.full(len(apply_step), _NEVER, jnp.int32)
    none = jnp.zeros(len(apply_step), jnp.int32)

    return Times(
        last_start=never,
        apply_step=jnp.asarray(apply_step),
        interval=none,
        observed_interval=none,
        norm=none.astype(jnp.float32),
    )


def is_slot(schedule: Slotted, step: jax.Array) -> jax.Array:
    """Return whether a fragment may start at `step`, bool scalar."""
    return (step + schedule.phase_steps) % schedule.slot_steps == 0


def is_due(schedule: Slotted, times: Times, step: jax.Array) -> jax.Array:
    """Return whether anything may happen at `step`, bool scalar."""
    due = is_slot(schedule, step) | arriving(times, step).any()
    return due | midway(schedule, times, step).any() if schedule.looks_midway else due


def arriving(times: Times, step: jax.Array) -> jax.Array:
    """Return which fragments are applied at `step`, bool `[K]`."""
    return times.apply_step == step


def midway(schedule: Slotted, times: Times, step: jax.Array) -> jax.Array:
    """Return which fragments are halfway through their delay, bool `[K]`."""
    rest = schedule.delay_steps - schedule.delay_steps // 2
    return times.apply_step == step + rest


def leaving(
    schedule: Slotted,
    num_params: tuple[int, ...],
    times: Times,
    step: jax.Array,
    observe: Observe,
) -> jax.Array:
    """Return which fragment starts at `step`, bool `[K]`; see `Slotted.serve`."""
    fragment_ids = np.arange(len(num_params))
    free = times.apply_step <= step  # An arrival frees it.
    open_to = is_slot(schedule, step) & free

    if not isinstance(schedule, Adaptive):
        return open_to & (
            schedule.slot(cast(Any, step)) % len(fragment_ids) == fragment_ids
        )

    chosen = schedule.forced(jnp, free, times.last_start, step, schedule.slot_steps)
    size = np.array(num_params, np.float32)
    scores = schedule.scores(jnp, times, size, step, observe)
    best = highest(jnp, free, times.last_start, scores)

    return open_to & (
        jnp.where(chosen < len(fragment_ids), chosen, best) == fragment_ids
    )


def started(times: Times, which: jax.Array, step: jax.Array, delay_steps: int) -> Times:
    """Return the state after `which`, bool `[K]`, has started."""
    since = step - jnp.maximum(times.last_start, 0)
    return times._replace(
        last_start=jnp.where(which, step, times.last_start),
        apply_step=jnp.where(which, step + delay_steps, times.apply_step),
        interval=jnp.where(which, since, times.interval),
    )


def applied(times: Times, which: jax.Array, step: jax.Array, norm: jax.Array) -> Times:
    """Return the state after `which`, bool `[K]`, is applied."""
    return times._replace(
        apply_step=jnp.where(times.apply_step == step, _NEVER, times.apply_step),
        observed_interval=jnp.where(which, times.interval, times.observed_interval),
        norm=jnp.where(which, norm, times.norm),
    )
