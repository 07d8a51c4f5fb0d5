"""Schedules inside a program choose as those of the host do, step by step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax.sync.schedules import (
    FINISH,
    MIDWAY,
    START,
    OneStepStale,
    adaptive,
    one_step_stale,
    staggered,
    traced,
)
from cocodc_jax.sync.schedules.adaptive import SCORES
from tests.sync.schedules.walks import walk

END = 40


def on_host(schedule, sizes, norms, gaps):
    """Return the set of `(kind, fragment)` of every step."""

    def see(step, event):
        return sizes[event.fragment_id], {"norm": float(norms[step])}

    def drift(step):
        return gaps[step].tolist()

    events_of = [set() for _ in range(END + 1)]
    for step, _, events in walk(schedule, schedule.init(), END, see, drift):
        events_of[step] = {(e.kind, e.fragment_id) for e in events}
    return events_of[1:]


@functools.partial(jax.jit, static_argnums=(0, 1))
def in_program(schedule, sizes, norms, gaps):
    """The same, bool `[T, K]` by kind."""
    starts_first = not schedule.delay_steps or isinstance(schedule, OneStepStale)

    def one(times, step):
        norm = norms[step]
        observe = lambda name: gaps[step]  # noqa: E731

        half = traced.midway(schedule, times, step)
        due = traced.is_due(schedule, times, step)

        if starts_first:
            begun = traced.leaving(schedule, sizes, times, step, observe)
            ended = traced.arriving(times, step) if schedule.delay_steps else begun
            times = traced.started(times, begun, step, schedule.delay_steps)
            times = traced.applied(times, ended, step, norm)
        else:
            ended = traced.arriving(times, step)
            times = traced.applied(times, ended, step, norm)
            begun = traced.leaving(schedule, sizes, times, step, observe)
            times = traced.started(times, begun, step, schedule.delay_steps)

        half &= schedule.looks_midway
        return times, ({START: begun, MIDWAY: half, FINISH: ended}, due)

    return jax.lax.scan(one, traced.first_times(schedule), jnp.arange(1, END + 1))[1]


@st.composite
def schedules(draw):
    num_fragments = draw(st.integers(1, 5))
    slots = draw(st.integers(num_fragments, 12))
    slot_steps = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(("staggered", "stale", *SCORES)))

    if kind in SCORES:
        interval = slots * slot_steps + draw(st.integers(0, slot_steps - 1))
        longest = interval // slot_steps * slot_steps
        delay = draw(st.integers(0, min(longest, 7)))
        schedule = adaptive(interval, num_fragments, delay, slots, kind)
    elif kind == "stale":
        schedule = one_step_stale(num_fragments * slot_steps, num_fragments)
    else:
        interval = num_fragments * slot_steps
        delay = draw(st.integers(0, interval))
        phase = draw(st.integers(0, slot_steps - 1))
        schedule = staggered(interval, num_fragments, delay, phase)

    looks_midway = schedule.delay_steps >= 2 and draw(st.booleans())
    return dataclasses.replace(schedule, looks_midway=looks_midway)


@settings(max_examples=12)
@given(schedules(), st.integers(0, 2**16))
def test_host_and_traced_schedules_choose_the_same_events(schedule, seed):
    """Numbers are far enough apart for float32: quotients of 24 bits are not."""
    rng = np.random.default_rng(seed)
    sizes = tuple(int(x) for x in rng.integers(1, 5000, schedule.num_fragments))
    norms = np.exp(rng.normal(0, 1, END + 1)).astype(np.float32)
    shape = (END + 1, schedule.num_fragments)
    gaps = np.exp(rng.normal(0, 1, shape)).astype(np.float32)

    expected = on_host(schedule, sizes, norms, gaps)
    happened, due = in_program(schedule, sizes, norms, gaps)

    for i, events in enumerate(expected):
        seen = {
            (kind, int(k))
            for kind in happened
            for k in np.nonzero(happened[kind][i])[0]
        }
        assert seen == events
        assert due[i] or not events
