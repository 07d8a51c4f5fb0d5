"""Regions that come one by one: when, in which order, and after how many steps."""

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.schedules import FINISH, START, Event, asynchronous
from tests.sync.schedules import walks

TENTHS = st.lists(st.integers(10, 45), min_size=1, max_size=4).map(lambda x: [10, *x])


def make(step_times, sync_interval, is_dynamic=True):
    regions = Regions(tuple(step_times), (1,) * len(step_times))
    return asynchronous(sync_interval, is_dynamic).bind(regions)


def walk(schedule, state, end):
    """`(tick, regions)` as a runtime would get them: each is answered at once."""
    came = []
    for step, after, events in walks.walk(schedule, state, end):
        state = after
        now = [event.participating[0] for event in events[::2]]

        for start, finish in zip(events[::2], events[1::2], strict=True):
            assert (start.kind, finish.kind) == (START, FINISH)
            assert start.participating == finish.participating
            assert (finish.fragment_id, finish.start_step) == (0, step)

        came.append((step, now))
    return state, came


def ticks_of(came, region):
    return [step for step, now in came if region in now]


def test_steps_of_regions_of_unequal_speed_by_hand():
    """Step times 1, 2 and 1.5, H = 4: after 4 steps, 2 steps of 2, 2 steps of 1.5."""
    schedule = make([1.0, 2.0, 1.5], 4)
    assert [schedule.local_steps(m) for m in range(3)] == [4, 2, 2]
    _, came = walk(schedule, schedule.init(), 12)
    assert came == [
        (3, [2]),
        (4, [0, 1]),
        (6, [2]),
        (8, [0, 1]),
        (9, [2]),
        (12, [0, 1, 2]),
    ]


def test_regions_that_are_not_dynamic_take_equally_many_steps():
    schedule = make([1.0, 2.0, 1.5], 4, is_dynamic=False)
    _, came = walk(schedule, schedule.init(), 12)
    assert came == [(4, [0]), (6, [2]), (8, [0, 1]), (12, [0, 2])]


def test_a_step_that_ends_between_two_ticks_counts_at_the_later():
    """2.5 ticks a step, one step between two arrivals: 2.5, 5, 7.5 and 10."""
    schedule = make([1.0, 2.5], 2)
    _, came = walk(schedule, schedule.init(), 10)
    assert ticks_of(came, 1) == [3, 5, 8, 10]


def test_an_event_names_the_region():
    schedule = make([1.0, 1.0], 3)
    (_, state, events), (_, _, later) = walks.walk(schedule, schedule.init(), 6)
    assert events == [
        Event(kind, 0, 3, 0, (region,)) for region in (0, 1) for kind in (START, FINISH)
    ]
    assert state.last_start == (3, 3)
    assert later[0].since_step == 3
    assert schedule.next_event(schedule.init(), 2)[1] is None


@given(TENTHS, st.integers(1, 9), st.booleans())
def test_each_region_keeps_its_own_time(tenths, interval, is_dynamic):
    schedule = make([k / 10 for k in tenths], interval, is_dynamic)
    regions = Regions(schedule.step_times, (1,) * len(tenths))
    start = schedule.init()
    _, came = walk(schedule, start, 60)

    steps = [step for step, _ in came]
    assert steps == sorted(set(steps))
    assert steps == [t for t in range(61) if schedule.next_event(start, t)[1]]
    assert all(now == sorted(set(now)) for _, now in came)

    for m, k in enumerate(tenths):
        count = max(1, math.floor(Fraction(10 * interval, k)))
        count = count if is_dynamic else interval
        period = Fraction(count * k, 10)
        ticks = [math.ceil(i * period) for i in range(1, math.floor(60 / period) + 1)]
        assert ticks_of(came, m) == ticks
        # It has done this number of steps since its last sync.
        done = [regions.steps_done(t)[m] for t in ticks]
        assert done == [count * i for i in range(1, len(ticks) + 1)]
