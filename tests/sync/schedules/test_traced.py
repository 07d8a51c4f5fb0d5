"""Schedules inside a program choose as those of the host do, step by step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax.sync.schedules import (
    FINISH,
    START,
    Applied,
    Measured,
    adaptive,
    one_step_stale,
    staggered,
)
from cocodc_jax.sync.schedules.traced import (
    applied,
    arrival,
    can_trace,
    choice,
    events_after,
    memory_of,
    started,
)
from tests.sync.schedules.walks import walk

SCORES = ("pseudo_gradient", "aged", "rms")


def on_host(schedule, sizes, norms, end):
    """Walk to `end`; returns the events of every step, and the state after them."""

    def see(step, event):
        return sizes[event.fragment_id], {"norm": float(norms[step])}

    found, state = [[] for _ in range(end)], schedule.init()
    for step, after, events in walk(schedule, state, end, see, learns=True):
        found[step - 1], state = events, after
    return found, dataclasses.replace(state, step=end)


@functools.partial(jax.jit, static_argnums=(0, 1, 4))
def in_program(schedule, sizes, memory, norms, end):
    """Walk by the array form; what started and finished at each step, K for none."""

    def one(memory, step):
        norm = norms[step]
        if schedule.delay_steps:
            ended = arrival(memory, step)
            memory = applied(memory, ended, norm)
        begun = choice(schedule, sizes, memory, step)
        memory = started(memory, begun, step, schedule.delay_steps)
        if not schedule.delay_steps:
            ended = arrival(memory, step)
            memory = applied(memory, ended, norm)
        return memory, (begun, ended)

    return jax.lax.scan(one, memory, jnp.arange(1, end + 1))


@st.composite
def cases(draw):
    num_fragments = draw(st.integers(1, 5))
    slots = draw(st.integers(num_fragments, 12))
    slot_steps = draw(st.integers(1, 3))
    interval = slots * slot_steps + draw(st.integers(0, slot_steps - 1))
    longest = interval // slot_steps * slot_steps
    delay = draw(st.integers(0, min(longest, 7)))
    score = draw(st.sampled_from(SCORES))
    seed = draw(st.integers(0, 2**16))
    return adaptive(interval, num_fragments, delay, slots, score), seed


@settings(max_examples=25)
@given(cases())
def test_both_forms_choose_alike(case):
    """Norms are far enough apart for float32: the quotients of 24 bits are not."""
    schedule, seed = case
    rng = np.random.default_rng(seed)
    end, num_fragments = 40, schedule.num_fragments
    sizes = tuple(int(x) for x in rng.integers(1, 5000, num_fragments))
    norms = np.exp(rng.normal(0, 1, end + 1)).astype(np.float32)
    events, state = on_host(schedule, sizes, norms, end)
    memory = jax.tree.map(jnp.asarray, memory_of(schedule, schedule.init()))
    memory, (begun, ended) = in_program(schedule, sizes, memory, norms, end)
    for kind, which in ((START, begun), (FINISH, ended)):
        expected = [
            next((e.fragment_id for e in at if e.kind == kind), num_fragments)
            for at in events
        ]
        assert np.asarray(which).tolist() == expected
    jax.tree.map(np.testing.assert_array_equal, memory, memory_of(schedule, state))

    # And what is told afterwards of what happened is what happened.
    again = schedule.init()
    for step, (k, at) in enumerate(zip(np.asarray(begun), events, strict=True), 1):

        def learn(state, event, norm=float(norms[step])):
            k = event.fragment_id
            return schedule.learn(state, Applied(k, sizes[k], {"norm": norm}))

        which = None if k == num_fragments else int(k)
        again, found = events_after(schedule, again, step, which, learn)
        assert found == at
    assert again == state


def test_scores_that_are_no_numbers_still_choose_who_is_free():
    """A run ends by them; not by a fragment that is sent twice at once."""
    schedule = adaptive(12, 3, 2, 6)
    memory = memory_of(schedule, schedule.init())
    memory = memory._replace(
        last_start=np.array([6, 2, 4], np.int32),
        apply_step=np.array([8, -1, -1], np.int32),
        interval=np.array([4, 2, 4], np.int32),
        observed_interval=np.array([2, 2, 4], np.int32),
        norm=np.array([1.0, np.nan, np.nan], np.float32),
    )
    assert int(choice(schedule, (5, 5, 5), memory, jnp.int32(8))) == 1


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (staggered(8, 2, 3), True),
        (staggered(8), True),
        (adaptive(8, 2, 3, 4), True),
        (adaptive(8, 2, 3, 4, "round_robin"), True),
        (adaptive(8, 2, 3, 4, "drift"), False),
        (adaptive(8, 2, 3, 4, "disagreement"), False),
        (one_step_stale(8, 2), False),
        (Measured(staggered(8, 2, 3), 3), False),
        (None, False),
    ],
)
def test_what_can_be_had_in_a_program(schedule, expected):
    assert can_trace(schedule) == expected
