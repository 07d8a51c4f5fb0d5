"""Fixed orders: tables worked by hand."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.schedules import (
    FINISH,
    START,
    Event,
    OneStepStale,
    Pending,
    Staggered,
    asynchronous,
    measured,
    one_step_stale,
    periodic,
    ranked_rounds,
    staggered,
)
from tests.sync.schedules.walks import starts, table, walk

# --- Staggered ----------------------------------------------------------------


def test_the_whole_model_every_h_steps_is_diloco():
    assert table(staggered(4), 12) == {4: "+0 -0", 8: "+0 -0", 12: "+0 -0"}


def test_each_fragment_has_a_period_of_its_own():
    """At a step that both are due at, one is applied before the other starts."""
    assert table(periodic(6, 2), 12) == {
        2: "+1 -1",
        4: "+1 -1",
        6: "+0 -0 +1 -1",
        8: "+1 -1",
        10: "+1 -1",
        12: "+0 -0 +1 -1",
    }
    assert table(periodic(2, 3), 6) == {
        2: "+0 -0",
        3: "+1 -1",
        4: "+0 -0",
        6: "+0 -0 +1 -1",
    }


def test_a_period_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="periods=0 must be at least 1"):
        periodic(4, 0)


def test_a_staggered_schedule_with_a_delay_longer_than_a_slot_by_hand():
    """Fragment p starts at p H / K = 2 p, then every 6 steps; each takes 3."""
    assert table(staggered(6, 3, 3), 14) == {
        2: "+1",
        4: "+2",
        5: "-1",
        6: "+0",
        7: "-2",
        8: "+1",
        9: "-0",
        10: "+2",
        11: "-1",
        12: "+0",
        13: "-2",
        14: "+1",
    }


def test_with_a_delay_of_h_a_fragment_finishes_and_starts_in_one_step():
    assert table(staggered(4, 2, 4), 10) == {
        2: "+1",
        4: "+0",
        6: "-1 +1",
        8: "-0 +0",
        10: "-1 +1",
    }


def test_a_phase_of_the_delay_lets_merges_fall_on_the_multiples():
    """H / K = 3: starts 2 steps before 3, 6, 9 .., merges on them."""
    assert table(staggered(6, 2, 2, phase_steps=2), 13) == {
        1: "+1",
        3: "-1",
        4: "+0",
        6: "-0",
        7: "+1",
        9: "-1",
        10: "+0",
        12: "-0",
        13: "+1",
    }
    # A delay of 4 has a rest of 1; the one that comes is merged before one leaves.
    events = table(staggered(6, 2, 4, phase_steps=1), 11)
    assert events == {2: "+1", 5: "+0", 6: "-1", 8: "+1", 9: "-0", 11: "+0"}


def test_with_a_phase_and_a_delay_of_h_a_fragment_finishes_before_it_starts():
    """The order is that without a phase: back, and out again."""
    events = table(staggered(4, 2, 4, phase_steps=1), 9)
    assert events == {1: "+1", 3: "+0", 5: "-1 +1", 7: "-0 +0", 9: "-1 +1"}


def test_a_measured_delay_has_the_same_slots():
    schedule = measured.staggered(6, 2, "auto", phase_steps=2)
    assert [step for step, _ in starts(schedule, 12)] == [1, 4, 7, 10]


def test_events_have_the_step_of_their_sync_and_of_the_one_before():
    schedule = staggered(6, 3, 3)
    steps = {step: events for step, _, events in walk(schedule, schedule.init(), 8)}
    assert steps[2] == [Event(START, 1, 2, 0)]
    assert steps[7] == [Event(FINISH, 2, 4)]
    assert steps[8] == [Event(START, 1, 8, 2)]


def test_halfway_is_rounded_down():
    """Delay 3: a look 1 step after the start; two fragments in flight keep apart."""
    schedule = staggered(4, 2, 3).bind(Regions.alike(2), looks_midway=True)
    assert table(schedule, 9) == {
        2: "+1",
        3: "/1",
        4: "+0",
        5: "/0 -1",
        6: "+1",
        7: "/1 -0",
        8: "+0",
        9: "/0 -1",
    }


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_a_staggered_fragment_starts_every_h_steps(k, slot, data):
    delay = data.draw(st.integers(0, k * slot))
    phase = data.draw(st.integers(0, slot - 1))
    started = starts(staggered(k * slot, k, delay, phase), 5 * k * slot)
    for p in range(k):
        steps = [step for step, fragment in started if fragment == p]
        first = (p * slot or k * slot) - phase
        assert steps == list(range(first, 5 * k * slot + 1, k * slot))


# --- One step stale -------------------------------------------------------------


def test_one_step_stale_begins_with_messages_of_zero():
    """A message of each fragment is in flight, as if sent a round before its slot."""
    assert one_step_stale(4).init().in_flight == (Pending(0, 0, 4),)
    assert table(one_step_stale(4), 12) == {4: "+0 -0", 8: "+0 -0", 12: "+0 -0"}

    assert one_step_stale(6, 3).init().in_flight == (
        Pending(1, -4, 2),
        Pending(2, -2, 4),
        Pending(0, 0, 6),
    )
    assert table(one_step_stale(6, 3), 8) == {
        2: "+1 -1",
        4: "+2 -2",
        6: "+0 -0",
        8: "+1 -1",
    }


def test_one_step_stale_a_message_is_applied_a_round_after_it_left():
    schedule = one_step_stale(6, 3)
    for step, _, events in walk(schedule, schedule.init(), 30):
        assert [(e.kind, step - e.start_step) for e in events] == [
            ("start", 0),
            ("finish", 6),
        ]


@pytest.mark.parametrize("delay_steps", [0, 3, 5])
def test_one_step_stale_refuses_a_delay_other_than_the_interval(delay_steps):
    message = "delay_steps=.* (must be sync_interval=4|is l)"
    with pytest.raises(ValueError, match=message):
        OneStepStale(1, 4, delay_steps, 4)


# --- For regions, and errors ----------------------------------------------------


def test_events_name_the_regions_that_take_part():
    schedule = dataclasses.replace(staggered(4, 2, 1), participating=(0, 2))
    events = [e for _, _, now in walk(schedule, schedule.init(), 8) for e in now]
    assert [e.participating for e in events if e.kind == START] == [(0, 2)] * 4
    assert [e.participating for e in events if e.kind == FINISH] == [(0, 2)] * 3


def test_regions_that_take_part_must_exist():
    schedule = dataclasses.replace(staggered(4, 2, 1), participating=(0, 2))
    assert schedule.bind(Regions.alike(3)) is schedule
    with pytest.raises(ValueError, match=r"participating=\(0, 2\) names a region that"):
        schedule.bind(Regions.alike(2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: staggered(100, 3),
         "sync_interval=100 is not a multiple of num_fragments=3; use 99 or 102"),
        (lambda: one_step_stale(100, 3),
         "sync_interval=100 is not a multiple of num_fragments=3; use 99 or 102"),
        (lambda: staggered(2, 4),
         "sync_interval=2 is not a multiple of num_fragments=4; use 4"),
        (lambda: staggered(0), "sync_interval=0 must be at least 1"),
        (lambda: asynchronous(0), "sync_interval=0 must be at least 1"),
        (lambda: ranked_rounds(0, 4, 1), "sync_interval=0 must be at least 1"),
        (lambda: staggered(4, 0), "num_fragments=0 must be at least 1"),
        (lambda: staggered(4, 2, -1), "delay_steps=-1 must be at least 0"),
        (lambda: staggered(4.5), "sync_interval=4.5 must be a whole number, at least"),
        (lambda: staggered(20, 2, 1, 0.5), "phase_steps=0.5 must be a whole number"),
        (lambda: staggered(4, 2, 5),
         "delay_steps=5 is longer than sync_interval=4 allows; .* use at most 4"),
        (lambda: staggered(4, 2, 1).bind(Regions.alike(2), looks_midway=True),
         "delay_steps=1 must be at least 2 where a merge compares the two halves"),
        (lambda: Staggered(3, 10, 0, 5),
         "slot_steps=5 gives 2 starts in sync_interval=10, too few for "
         "num_fragments=3; lower slot_steps or raise sync_interval"),
        (lambda: staggered(6, 2, 2, 3),
         "phase_steps=3 must be at least 0 and below 3, the steps between two"),
        (lambda: staggered(6, 2, 2, -1), "phase_steps=-1 must be at least 0"),
        (lambda: OneStepStale(1, 4, 4, 4, phase_steps=1),
         "phase_steps=1 has no meaning where a message is one round late; use 0"),
        (lambda: Staggered(3, 10, 0, 0), "slot_steps=0 must be at least 1"),
        (lambda: Staggered(0, 10, 0, 1), "num_fragments=0 must be at least 1"),
        (lambda: Staggered(1, 0, 0, 1), "sync_interval=0 must be at least 1"),
    ],
)  # fmt: skip
def test_errors_name_the_argument_and_the_repair(call, message):
    with pytest.raises(ValueError, match=message):
        call()
