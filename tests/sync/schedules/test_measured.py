"""Measured delays and slots: numbers by hand, and properties for every network."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.schedules import FINISH, Applied, Measured
from cocodc_jax.sync.schedules.measured import adaptive, staggered
from tests.sync.schedules import walks


def seen_at(times):
    """Turn `times`, step -> (T_c, T_s) of each region, into observations."""
    return lambda step, event: (1, {"norm": 1.0, "times": times(step)})


def delays(schedule, end, times):
    delay_steps = []
    for step, _, events in walks.walk(schedule, schedule.init(), end, seen_at(times)):
        delay_steps += [step - e.start_step for e in events if e.kind == FINISH]
    return delay_steps


def test_the_delay_is_the_steps_of_a_sync():
    schedule = staggered(40, 4, "auto")
    # One slot until times are known; then ceil(0.9 / 0.2) = 5.
    assert delays(schedule, 60, lambda _: [(0.2, 0.9)] * 2) == [10, 5, 5, 5, 5]


def test_the_slowest_region_sets_the_step_and_the_last_to_send_the_sync():
    times = [(0.1, 3.0), (0.5, 1.2)]  # ceil(1.2 / 0.5), not 3 / 0.1.
    assert delays(staggered(40, 4, "auto"), 60, lambda _: times)[-1] == 3


def test_the_longest_of_the_last_syncs_counts_for_the_delay():
    sync_s = {20: 1.0, 30: 2.0}

    def times(step):
        return [(0.25, sync_s.get(step // 10 * 10, 1.0))]

    delay_steps = delays(staggered(40, 4, "auto"), 160, times)
    # Window of five: 2 s at one of them, then forgotten.
    expected = [10, 4, 4, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4]
    assert delay_steps == expected[: len(delay_steps)]


@pytest.mark.parametrize("seen", [{"times": [(0.2, 0.9), (0.2, 0.0)]}, {}])
def test_unmeasured_times_change_no_schedule(seen):
    schedule = staggered(40, 4, "auto")
    assert schedule.learn(schedule.init(), Applied(0, 1, seen)) == schedule.init()


def test_the_network_share_sets_the_number_of_slots():
    schedule = adaptive(40, 4, 2, "auto", network_share=0.5)
    starts = walks.starts(schedule, 80, see=seen_at(lambda _: [(0.1, 0.25)]))
    # H / K = 10 at first; then N = floor(0.5 * 40 * 0.1 / 0.25) = 8, h = 5. The slot
    # after step 10 was set at step 10.
    assert [step for step, _ in starts] == [10, *range(20, 85, 5)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_fragment_is_on_time_whatever_the_network_does(data):
    num = data.draw(st.integers(1, 6), label="K")
    interval = data.draw(st.integers(num, 40), label="H")
    share = data.draw(st.sampled_from([0.2, 0.5, 1.0]), label="gamma")
    bound = data.draw(st.integers(1, interval), label="bound")
    is_fixed = data.draw(st.booleans(), label="fixed delay")
    schedule = adaptive(
        interval,
        num,
        bound if is_fixed else "auto",
        "auto",
        max_delay_steps=None if is_fixed else bound,
        network_share=share,
    )
    syncs = data.draw(st.lists(st.floats(0.01, 60), min_size=1, max_size=8))

    def times(step):
        return [(1.0, syncs[step * 7919 % len(syncs)])]

    walks.assert_on_time(schedule, schedule.init(), 4 * interval, see=seen_at(times))


@pytest.mark.parametrize("seed", range(10))
def test_deadlines_that_fall_in_one_slot_are_kept_in_their_order(seed):
    """Growing slots bring them together; their order is not that of fragments."""
    rng = random.Random(seed)
    schedule = adaptive(50, 7, 1, "auto", network_share=0.4)

    def see(step, event):
        sync_s = 2 ** rng.uniform(-4, 4)
        return 100, {"norm": rng.random(), "times": [(1.0, sync_s)]}

    walks.assert_on_time(schedule, schedule.init(), 1500, see=see)


def test_delays_are_whole_and_at_least_one_step():
    delay_steps = delays(staggered(8, 2, "auto"), 100, lambda _: [(5.0, 0.001)])
    assert set(delay_steps[1:]) == {1}
    assert all(isinstance(d, int) for d in delay_steps)


def test_fixed_numbers_make_a_schedule_without_measuring():
    assert not isinstance(staggered(40, 4, 5), Measured)
    assert not isinstance(adaptive(40, 4, 5, 8), Measured)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: staggered(40, 4, "soon"), "delay_steps='soon' must be a whole number"),
        (lambda: staggered(40, 4, 5, max_delay_steps=9),
         "max_delay_steps=9 has no meaning"),
        (lambda: staggered(40, 4, "auto", max_delay_steps=41),
         "max_delay_steps=41 must be at least 1"),
        (lambda: staggered(40, 4, "auto", max_delay_steps=0),
         "max_delay_steps=0 must be at least 1"),
        (lambda: staggered(40, 4, "auto", max_delay_steps=5.5),
         "max_delay_steps=5.5 must be a whole number"),
        (lambda: adaptive(40, 4, 5, "many"), "syncs_per_interval='many' must be"),
        (lambda: adaptive(40, 4, 5, 8, network_share=0.5), "network_share=0.5 has no"),
        (lambda: adaptive(40, 4, 41, "auto"),
         "delay_steps=41 is longer than sync_interval=40 allows; .* at most 40"),
        (lambda: staggered(40, 4, "auto").bind(Regions.alike(2), looks_midway=True),
         "delay_steps='auto' is not possible where a merge compares the two halves"),
        (lambda: adaptive(40, 4, 5, "auto", network_share=1.5),
         r"network_share=1.5 must be in \(0, 1\]"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
