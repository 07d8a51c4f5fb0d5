"""Schedules: tables worked by hand, and what holds for every schedule."""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.schedule import (
    SCORES,
    Event,
    Schedule,
    ScheduleState,
    adaptive,
    one_round_late,
    staggered,
    syncs_that_fit,
)


def walk(schedule, state, end, measure=lambda p, step: (1.0, 1), drift=None):
    """Yields `(step, state, events)` as a runtime would get them, up to `end`.

    Args:
      measure: (fragment, start step) -> norm and size of the applied update.
      drift: step -> what the schedule may measure.
    """
    while (step := schedule.next_step(state)) <= end:
        assert step > state.step
        state, events = schedule.finishes(state, step)
        for _, p, start, *_ in events:
            state = schedule.observe(state, p, *measure(p, start))
        state, event = schedule.start(state, step, drift and (lambda s=step: drift(s)))
        if event:
            events.append(event)
            if schedule.delay_steps == 0:
                state, late = schedule.finishes(state, step)
                for _, p, start, *_ in late:
                    state = schedule.observe(state, p, *measure(p, start))
                events += late
        yield step, state, events


def table(schedule, end, **options):
    """`{step: events}`, "+p" for a start and "-p" for a finish."""
    sign = {"start": "+", "finish": "-"}
    return {
        step: " ".join(f"{sign[e.kind]}{e.fragment}" for e in events)
        for step, _, events in walk(schedule, schedule.init(), end, **options)
    }


def starts(schedule, end, **options):
    return [
        (step, e.fragment)
        for step, _, events in walk(schedule, schedule.init(), end, **options)
        for e in events
        if e.kind == "start"
    ]


# --- Staggered ----------------------------------------------------------------


def test_the_whole_model_every_h_steps_is_diloco():
    assert table(staggered(4), 12) == {4: "+0 -0", 8: "+0 -0", 12: "+0 -0"}


def test_staggered_with_a_delay_longer_than_a_slot():
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


def test_with_a_delay_of_h_a_fragment_comes_back_and_leaves_in_one_step():
    assert table(staggered(4, 2, 4), 10) == {
        2: "+1",
        4: "+0",
        6: "-1 +1",
        8: "-0 +0",
        10: "-1 +1",
    }


def test_events_tell_when_their_sync_started():
    schedule = staggered(6, 3, 3)
    steps = {step: events for step, _, events in walk(schedule, schedule.init(), 7)}
    assert steps[2] == [Event("start", 1, 2)]
    assert steps[7] == [Event("finish", 2, 4)]


def test_asking_between_events_changes_nothing():
    schedule = staggered(6, 3, 3)
    *_, (_, state, _) = walk(schedule, schedule.init(), 4)
    expected = schedule.next_step(state)
    state, events = schedule.finishes(state, 4)
    state, event = schedule.start(dataclasses.replace(state, step=3), 3)
    assert (events, event) == ([], None)
    assert schedule.next_step(state) == 4
    assert expected == 5


# --- Adaptive -----------------------------------------------------------------

# Fragment 0's mean pseudo-gradient has norm 8 over 1 parameter, fragment 1's norm 12
# over 4. K = 2, H = 12, N = 4: a slot every 3 steps. The first two slots serve what
# was never sent.
NORMS = {0: (8.0, 1), 1: (12.0, 4)}


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        # Rates: 0 has 8/1/interval of 3, 6, 3, ...; 1 has 12/4/6 = 0.5. So 0 goes
        # until the deadline of 1, at 6 + 12.
        ("pseudo_gradient", [(3, 0), (6, 1), (9, 0), (12, 0), (15, 0), (18, 1)]),
        # RMS 8 and 6. At 9: 8*6/3 against 6*3/6. At 12: 8*3/6 against 6*6/6.
        # At 15: 8*6/6 against 6*3/6. At 18: 8*3/6 against 6*6/6.
        ("aged", [(3, 0), (6, 1), (9, 0), (12, 1), (15, 0), (18, 1)]),
        # Drift 3 and 4 over the age. At 9: 3/6 against 4/3. At 12: 3/9 against 4/3.
        # At 15 fragment 0 is at its deadline, 3 + 12. At 18: 3/3 against 4/6.
        ("drift", [(3, 0), (6, 1), (9, 1), (12, 1), (15, 0), (18, 0)]),
    ],
)
def test_adaptive_serves_the_fastest_until_a_deadline(score, expected):
    schedule = adaptive(12, 2, 0, 4, score)
    found = starts(
        schedule, 18, measure=lambda p, _: NORMS[p], drift=lambda _: (3.0, 4.0)
    )
    assert found == expected


def test_the_rate_is_per_step_of_the_interval_it_was_gathered_over():
    """Norms 4 and 6 over intervals: 4/3 > 6/6, 4/6 < 6/6, 4/6 < 6/6, 4/6 < 6/3."""
    found = starts(adaptive(12, 2, 0, 4), 18, measure=lambda p, _: (4.0 + 2 * p, 1))
    assert found == [(3, 0), (6, 1), (9, 0), (12, 1), (15, 1), (18, 1)]


def test_a_fragment_in_flight_is_passed_over():
    """Fragment 0 is by far the fastest, but needs 5 steps, two slots, to come back."""
    schedule = adaptive(12, 2, 5, 4)
    found = starts(schedule, 18, measure=lambda p, _: (1.0 + 99 * (p == 0), 1))
    assert found == [(3, 0), (6, 1), (9, 0), (12, 1), (15, 0), (18, 1)]


def test_a_slot_stays_empty_when_all_are_in_flight():
    assert table(adaptive(12, 2, 9, 4), 15) == {
        3: "+0",
        6: "+1",
        9: "",
        12: "-0 +0",
        15: "-1 +1",
    }


def test_n_equal_to_k_is_the_fixed_round():
    """With no slot to spare, every slot is a deadline, whatever the scores."""
    schedule = adaptive(9, 3, 4, 3)
    found = starts(schedule, 36, measure=lambda p, _: (10.0**p, 1))
    assert found == [(3 * (i + 1), i % 3) for i in range(12)]


def test_drift_is_measured_only_when_it_decides():
    schedule = adaptive(12, 2, 0, 4, "drift")
    asked = []
    starts(schedule, 18, drift=lambda step: asked.append(step) or (3.0, 4.0))
    assert asked == [9, 12, 18]


@st.composite
def adaptive_schedules(draw):
    k = draw(st.integers(1, 6))
    h = draw(st.integers(k, 40))
    n = draw(st.integers(k, h))
    slot = h // n
    tau = draw(st.integers(0, h // slot * slot))
    return adaptive(h, k, tau, n, draw(st.sampled_from(SCORES)))


class Rates:
    """Change rates that are drawn anew at every step, alike for all who ask."""

    def __init__(self, seed, num_fragments):
        self.seed, self.num_fragments = seed, num_fragments

    def rate(self, p, step):
        # Powers of ten: some fragments always win, others never, and some tie.
        return 10.0 ** (hash((self.seed, p, step // (1 + self.seed % 50))) % 7 - 3)

    def measure(self, p, start):
        return self.rate(p, start), 1 + hash((self.seed, p)) % 100

    def drift(self, step):
        return [self.rate(p, step) for p in range(self.num_fragments)]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(adaptive_schedules(), st.integers(0, 2**30))
def test_no_fragment_waits_more_than_h_steps_or_flies_twice(schedule, seed):
    rates = Rates(seed, schedule.num_fragments)
    h, end = schedule.sync_interval, 6 * schedule.sync_interval
    last = dict.fromkeys(range(schedule.num_fragments), 0)
    flying = {}
    for step, state, events in walk(
        schedule, schedule.init(), end, rates.measure, rates.drift
    ):
        for event in events:
            if event.kind == "finish":
                assert flying.pop(event.fragment) == event.start_step
                assert step == event.start_step + schedule.delay_steps
                continue
            assert event.fragment not in flying
            assert step % schedule.slot_steps == 0
            assert step - last[event.fragment] <= h
            last[event.fragment] = flying[event.fragment] = step
        assert dict(state.in_flight) == flying
    assert all(end - step <= h for step in last.values())
    assert all(last.values())  # Each was sent, the first time within H (from 0).


@settings(max_examples=100, deadline=None, derandomize=True)
@given(adaptive_schedules(), st.integers(0, 2**30), st.integers(1, 60))
def test_a_state_from_json_has_the_same_future(schedule, seed, stop):
    """So have two regions that were told the same reduced values."""
    rates = Rates(seed, schedule.num_fragments)
    end = stop + 3 * schedule.sync_interval
    whole = list(walk(schedule, schedule.init(), end, rates.measure, rates.drift))
    before = walk(schedule, schedule.init(), stop, rates.measure, rates.drift)
    state = [schedule.init(), *(state for _, state, _ in before)][-1]
    restored = ScheduleState.from_json(json.loads(json.dumps(state.to_json())))
    assert restored == state
    rest = list(walk(schedule, restored, end, rates.measure, rates.drift))
    assert rest == [x for x in whole if x[0] > state.step]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_a_staggered_fragment_starts_every_h_steps(k, slot, data):
    schedule = staggered(k * slot, k, data.draw(st.integers(0, k * slot)))
    found = starts(schedule, 5 * k * slot)
    for p in range(k):
        steps = [step for step, fragment in found if fragment == p]
        first = p * slot or k * slot
        assert steps == list(range(first, 5 * k * slot + 1, k * slot))


def test_a_fragment_on_its_way_is_remembered():
    schedule = adaptive(12, 2, 5, 4)
    *_, (_, state, _) = walk(schedule, schedule.init(), 9, lambda p, _: (6.0, 2))
    assert state == ScheduleState(
        step=9,
        in_flight=((1, 6), (0, 9)),
        last_start=(9, 6),
        interval=(6, 6),
        norm=(6.0, 0.0),
        size=(2, 0),
        observed_interval=(3, 0),
    )


# --- What a network allows, and errors ----------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((100, 4, 0.1, 0.5, 0.4), 8),  # The paper's: 0.4 * 100 * 0.1 / 0.5.
        ((100, 4, 0.1, 0.51, 0.4), 7),  # Rounded down.
        ((100, 4, 0.1, 100.0, 1.0), 4),  # Never below K.
        ((100, 4, 1.0, 0.001, 1.0), 100),  # Never more than one a step.
    ],
)
def test_syncs_that_fit(arguments, expected):
    assert syncs_that_fit(*arguments) == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: staggered(100, 3),
            "sync_interval=100 is not a multiple of num_fragments=3; use 99 or 102",
        ),
        (
            lambda: staggered(2, 4),
            "sync_interval=2 is not a multiple of num_fragments=4; use 4",
        ),
        (lambda: staggered(0), "sync_interval=0 must be at least 1"),
        (lambda: staggered(4, 0), "num_fragments=0 must be at least 1"),
        (lambda: staggered(4, 2, -1), "delay_steps=-1 must be at least 0"),
        (
            lambda: staggered(4, 2, 5),
            "delay_steps=5 is longer than sync_interval=4 allows; .* use at most 4",
        ),
        (
            lambda: adaptive(10, 2, 10, 3),
            "delay_steps=10 is longer than sync_interval=10 allows; .* use at most 9",
        ),
        (lambda: adaptive(0, 1, 0, 1), "sync_interval=0 must be at least 1"),
        (lambda: adaptive(10, 0, 0, 0), "num_fragments=0 must be at least 1"),
        (
            lambda: adaptive(10, 4, 0, 3),
            "syncs_per_interval=3 must be at least num_fragments=4 and at most "
            "sync_interval=10",
        ),
        (lambda: adaptive(10, 4, 0, 11), "syncs_per_interval=11 must be at least"),
        (
            lambda: adaptive(10, 2, 0, 2, "loudest"),
            r"score='loudest' is unknown; use one of \('pseudo_gradient', ",
        ),
        (lambda: adaptive(10, 2, 0, 2, None), "score=None is unknown; use one of"),  # type: ignore
        (
            lambda: Schedule(2, 10, 0, 5, "loudest"),
            r"score='loudest' is unknown; use one of \('pseudo_gradient', ",
        ),
        (
            lambda: Schedule(3, 10, 0, 5, "aged"),
            "slot_steps=5 gives 2 starts in sync_interval=10, too few for "
            "num_fragments=3; lower slot_steps or raise sync_interval",
        ),
        (lambda: Schedule(3, 10, 0, 0), "slot_steps=0 must be at least 1"),
        (
            lambda: starts(adaptive(12, 2, 0, 4, "drift"), 9),
            "score='drift' needs `drift` to measure it",
        ),
        (
            lambda: syncs_that_fit(100, 4, 0.0, 1.0, 1.0),
            "step_time=0.0 and sync_time=1.0 must be positive seconds",
        ),
        (
            lambda: syncs_that_fit(100, 4, 1.0, -1.0, 1.0),
            "step_time=1.0 and sync_time=-1.0 must be positive seconds",
        ),
        (
            lambda: syncs_that_fit(100, 4, 1.0, 1.0, 0.0),
            r"network_share=0.0 must be in \(0, 1\]",
        ),
        (
            lambda: syncs_that_fit(100, 4, 1.0, 1.0, math.nan),
            r"network_share=nan must be in \(0, 1\]",
        ),
    ],
)
def test_errors_name_the_argument_and_the_repair(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- One round late -------------------------------------------------------------


def test_one_round_late_begins_with_messages_of_zero():
    """One on its way for every fragment, as if sent a round before its first slot."""
    assert one_round_late(4).init().in_flight == ((0, 0),)
    assert table(one_round_late(4), 12) == {4: "-0 +0", 8: "-0 +0", 12: "-0 +0"}
    assert one_round_late(6, 3).init().in_flight == ((1, -4), (2, -2), (0, 0))
    assert table(one_round_late(6, 3), 8) == {
        2: "-1 +1",
        4: "-2 +2",
        6: "-0 +0",
        8: "-1 +1",
    }


def test_one_round_late_a_message_is_applied_a_round_after_it_left():
    schedule = one_round_late(6, 3)
    for step, _, events in walk(schedule, schedule.init(), 30):
        assert [(e.kind, step - e.start_step) for e in events] == [
            ("finish", 6),
            ("start", 0),
        ]


@pytest.mark.parametrize("cut", [4, 5, 9])
def test_one_round_late_goes_through_json(cut):
    schedule = one_round_late(4, 2)
    whole = list(walk(schedule, schedule.init(), 16))
    states = [schedule.init(), *(s for step, s, _ in whole if step <= cut)]
    again = ScheduleState.from_json(json.loads(json.dumps(states[-1].to_json())))
    assert list(walk(schedule, again, 16)) == [w for w in whole if w[0] > cut]


@pytest.mark.parametrize("delay_steps", [0, 3, 5])
def test_what_is_sent_first_is_one_whole_round_late(delay_steps):
    with pytest.raises(
        ValueError, match="delay_steps=.* (must be sync_interval=4|is l)"
    ):
        staggered(4, 1, delay_steps, sends_first=True)


def test_events_name_who_takes_part():
    schedule = dataclasses.replace(staggered(4, 2, 1), taking_part=(0, 2))
    events = [e for _, _, now in walk(schedule, schedule.init(), 8) for e in now]
    assert [e.regions for e in events if e.kind == "start"] == [(0, 2)] * 4
    assert schedule.for_regions(Regions.alike(3)) is schedule
    with pytest.raises(
        ValueError, match=r"taking_part=\(0, 2\) names a region that is"
    ):
        schedule.for_regions(Regions.alike(2))
