"""Adaptive transmission: choices by hand, and properties for every network."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax.sync.schedules import START, Pending, adaptive, syncs_that_fit
from cocodc_jax.sync.schedules.adaptive import SCORES, AdaptiveState
from tests.sync.schedules.walks import World, assert_on_time, starts, table, walk


def norms(measure):
    """Turn `(fragment, start step) -> (norm, parameters)` into observations."""

    def see(step, event):
        norm, size = measure(event.fragment_id, event.start_step)
        return size, {"norm": norm}

    return see


# Fragment 0's mean pseudo-gradient has norm 8 over 1 parameter, fragment 1's norm 12
# over 4. K = 2, H = 12, N = 4: a slot every 3 steps. The first two slots serve
# fragments that were never sent.
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
        # Rates that no size decides: 0 has 8/1/interval of 3, 6, 3, ..., 1 has 12/2/6.
        ("rms", [(3, 0), (6, 1), (9, 0), (12, 0), (15, 0), (18, 1)]),
        # Squares 3 and 4: always 1, until the deadline of 0, at 15.
        ("gain", [(3, 0), (6, 1), (9, 1), (12, 1), (15, 0), (18, 1)]),
        # Less the squares of what moved. At 9: 3 - (8*6/3)^2 against 4 - (6*3/6)^2, at
        # 12: 3 - (8*9/3)^2 against 4 - (6*3/3)^2, at 18: 3 - (8*3/12)^2 against
        # 4 - (6*6/3)^2.
        ("disagreement", [(3, 0), (6, 1), (9, 1), (12, 1), (15, 0), (18, 0)]),
        ("round_robin", [(3, 0), (6, 1), (9, 0), (12, 1), (15, 0), (18, 1)]),
    ],
)
def test_adaptive_serves_the_fastest_until_a_deadline(score, expected):
    schedule = adaptive(12, 2, 0, 4, score)
    started = starts(
        schedule, 18, see=norms(lambda p, _: NORMS[p]), drift=lambda _: (3.0, 4.0)
    )
    assert started == expected


def test_the_rate_is_per_step_of_the_interval_it_was_gathered_over():
    """Norms 4 and 6 over intervals: 4/3 > 6/6, 4/6 < 6/6, 4/6 < 6/6, 4/6 < 6/3."""
    started = starts(
        adaptive(12, 2, 0, 4), 18, see=norms(lambda p, _: (4.0 + 2 * p, 1))
    )
    assert started == [(3, 0), (6, 1), (9, 0), (12, 1), (15, 1), (18, 1)]


def test_a_fragment_in_flight_is_passed_over():
    """Fragment 0 is by far the fastest, but needs 5 steps, two slots, to come back."""
    schedule = adaptive(12, 2, 5, 4)
    started = starts(schedule, 18, see=norms(lambda p, _: (1.0 + 99 * (p == 0), 1)))
    assert started == [(3, 0), (6, 1), (9, 0), (12, 1), (15, 0), (18, 1)]


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
    started = starts(schedule, 36, see=norms(lambda p, _: (10.0**p, 1)))
    assert started == [(3 * (i + 1), i % 3) for i in range(12)]


@pytest.mark.parametrize("score", SCORES)
def test_among_equal_scores_the_fragment_that_waited_longest_is_sent(score):
    """Without movement every score is 0. H = 12, N = 6: deadlines are far off."""
    started = starts(
        adaptive(12, 3, 0, 6, score),
        16,
        see=norms(lambda p, _: (0.0, 1)),
        drift=lambda _: (0.0, 0.0, 0.0),
    )
    assert started == [
        (2, 0),
        (4, 1),
        (6, 2),
        (8, 0),
        (10, 1),
        (12, 2),
        (14, 0),
        (16, 1),
    ]


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


@settings(max_examples=150, deadline=None, derandomize=True)
@given(adaptive_schedules(), st.integers(0, 2**30))
def test_no_fragment_waits_more_than_h_steps_or_is_in_flight_twice(schedule, seed):
    world = World(seed, schedule.num_fragments, 1 + seed % 50)
    end = 6 * schedule.sync_interval
    measured = {"see": world.see, "drift": world.drift}

    assert_on_time(schedule, schedule.init(), end, **measured)
    for step, _, events in walk(schedule, schedule.init(), end, **measured):
        for event in events:
            if event.kind == START:
                assert step % schedule.slot_steps == 0
            else:
                assert step == event.start_step + schedule.delay_steps


def test_a_fragment_in_flight_is_part_of_the_state():
    schedule = adaptive(12, 2, 5, 4)
    *_, (_, state, _) = walk(schedule, schedule.init(), 9, norms(lambda p, _: (6.0, 2)))
    assert state == AdaptiveState(
        step=9,
        in_flight=(Pending(1, 6, 11), Pending(0, 9, 14)),
        last_start=(9, 6),
        interval=(6, 6),
        norm=(6.0, 0.0),
        size=(2, 0),
        observed_interval=(3, 0),
    )


# --- Syncs that a network allows, and errors ----------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((100, 4, 0.1, 0.5, 0.4), 8),  # The paper's: 0.4 * 100 * 0.1 / 0.5.
        ((100, 4, 0.1, 0.51, 0.4), 7),  # Rounded down.
        ((100, 4, 0.1, 100.0, 1.0), 4),  # Never below K.
        ((100, 4, 1.0, 0.001, 1.0), 100),  # Never more than one a step.
    ],
)
def test_syncs_that_fit_by_hand(arguments, expected):
    assert syncs_that_fit(*arguments) == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: adaptive(10, 2, 10, 3),
         "delay_steps=10 is longer than sync_interval=10 allows; .* use at most 9"),
        (lambda: adaptive(0, 1, 0, 1), "sync_interval=0 must be at least 1"),
        (lambda: adaptive(10, 0, 0, 0), "num_fragments=0 must be at least 1"),
        (lambda: adaptive(10, 4, 0, 3),
         "syncs_per_interval=3 must be at least num_fragments=4 and at most "
         "sync_interval=10"),
        (lambda: adaptive(10, 4, 0, 11), "syncs_per_interval=11 must be at least"),
        (lambda: adaptive(10, 4, 0, 4.5), "syncs_per_interval=4.5 must be a whole num"),
        (lambda: syncs_that_fit(100, 4, 0.0, 1.0, 1.0),
         "step_time=0.0 and sync_time=1.0 must be positive seconds"),
        (lambda: syncs_that_fit(100, 4, 1.0, -1.0, 1.0),
         "step_time=1.0 and sync_time=-1.0 must be positive seconds"),
        (lambda: syncs_that_fit(100, 4, 1.0, 1.0, 0.0),
         r"network_share=0.0 must be in \(0, 1\]"),
        (lambda: syncs_that_fit(100, 4, 1.0, 1.0, math.nan),
         r"network_share=nan must be in \(0, 1\]"),
    ],
)  # fmt: skip
def test_errors_name_the_argument_and_the_repair(call, message):
    with pytest.raises(ValueError, match=message):
        call()
