"""Properties of every schedule, whatever it learns of updates and the network."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.schedules import (
    FINISH,
    MIDWAY,
    START,
    Asynchronous,
    adaptive,
    asynchronous,
    measured,
    one_step_stale,
    periodic,
    ranked_rounds,
    staggered,
)
from cocodc_jax.sync.schedules.base import nothing
from tests.sync.schedules import walks

EVEN = Regions.alike(3)
SCHEDULES = {
    "whole": staggered(7),
    "staggered": staggered(np.int64(12), np.int32(3), np.int64(5)),
    "longest delay": staggered(12, 3, 12),
    "phase": staggered(12, 3, 5, 2),
    "midway": staggered(12, 3, 5).bind(EVEN, looks_midway=True),
    "quorum": dataclasses.replace(staggered(12, 3, 5), participating=(0, 2)),
    "one step stale": one_step_stale(7),
    "one step stale, fragments": one_step_stale(12, 3),
    "one step stale, midway": one_step_stale(12, 3).bind(EVEN, looks_midway=True),
    "pseudo_gradient": adaptive(20, 3, 4, 5),
    "aged": adaptive(20, 3, 0, 5, "aged"),
    "drift": adaptive(20, 3, 4, 5, "drift"),
    "adaptive, midway": adaptive(20, 3, 4, 5).bind(EVEN, looks_midway=True),
    "measured delay": measured.staggered(12, 3, "auto").bind(EVEN),
    "measured delay of what changes": measured.adaptive(20, 3, "auto", 5, "aged"),
    "measured slots": measured.adaptive(20, 3, np.int8(4), "auto", network_share=0.9),
    "measured": measured.adaptive(20, 3, "auto", "auto", "drift"),
    "periods": periodic(np.int64(7), 3),
    "ranked": ranked_rounds(np.int64(9), np.int64(8), 1),
    "by region": asynchronous(np.int64(5)).bind(Regions((1.0, 2.5, 1.3), (1, 1, 1))),
    "by region, equal steps": asynchronous(5, is_dynamic=False).bind(
        Regions((1.0, 2.5, 1.3), (1, 1, 1))
    ),
}
every_schedule = pytest.mark.parametrize("name", SCHEDULES)
some = settings(max_examples=25, deadline=None, derandomize=True)


class World(walks.World):
    def walk(self, schedule, state, end, **options):
        return walks.walk(schedule, state, end, self.see, self.drift, **options)


def through_json(schedule, state):
    return schedule.restore(json.loads(json.dumps(state.to_json())))


@every_schedule
@some
@given(st.integers(0, 2**30), st.integers(1, 60))
def test_a_state_from_json_has_the_same_future(name, seed, stop):
    """So have two regions that learn the same reduced values."""
    schedule = SCHEDULES[name]
    world = World(seed)
    whole = list(world.walk(schedule, schedule.init(), stop + 60, learns=True))
    states = [schedule.init(), *(state for step, state, _ in whole if step <= stop)]
    restored = through_json(schedule, states[-1])
    assert restored == states[-1]

    rest = list(world.walk(schedule, restored, stop + 60, learns=True))
    assert rest == [x for x in whole if x[0] > restored.step]


@every_schedule
@some
@given(st.integers(0, 2**30))
def test_learning_early_or_late_gives_the_same_events(name, seed):
    schedule = SCHEDULES[name]
    world = World(seed)
    later, at_once = (
        [(step, events) for step, _, events in world.walk(schedule, start, 90, **how)]
        for start, how in ((schedule.init(), {}), (schedule.init(), {"learns": True}))
    )
    assert later == at_once


@every_schedule
@some
@given(st.integers(0, 2**30))
def test_asking_between_events_changes_no_event(name, seed):
    """As evaluation and checkpoints do, which may come at any step."""
    schedule = SCHEDULES[name]
    world = World(seed)
    state = schedule.init()

    for step, after, _ in world.walk(schedule, schedule.init(), 60, learns=True):
        asked = state
        for between in range(state.step, step):
            asked, event = schedule.next_event(asked, between)
            assert event is None
            assert schedule.next_step(asked) == step

        assert dataclasses.replace(state, **_stepped(asked)) == asked
        state = after


@every_schedule
@some
@given(st.integers(0, 2**30), st.integers(0, 70))
@example(0, 0)
def test_a_schedule_may_begin_at_any_step(name, seed, first):
    """From there every fragment starts in time, and only started syncs finish."""
    schedule = SCHEDULES[name]
    world = World(seed)
    state = schedule.begin_at(first)
    assert through_json(schedule, state) == state
    assert state.step == first
    assert (state == schedule.init()) or first > 0
    assert all(pending.start_step <= 0 for pending in state.in_flight)

    # A schedule that is late is so from its first message on; others wait for none.
    assert len(state.in_flight) == len(schedule.init().in_flight)

    walks.assert_on_time(
        schedule,
        state,
        6 * schedule.sync_interval,
        flies_once=not schedule.init().in_flight,
        see=world.see,
        drift=world.drift,
    )


def _stepped(state):
    """The fields that asking may move on."""
    names = {field.name for field in dataclasses.fields(state)}
    return {name: getattr(state, name) for name in ("step", "base") if name in names}


@every_schedule
@some
@given(st.integers(0, 2**30))
def test_a_sync_starts_then_has_its_halfway_event_then_finishes(name, seed):
    schedule = SCHEDULES[name]
    world = World(seed)
    state = schedule.init()
    flying = {pending.sync_id: pending for pending in state.in_flight}
    looked_at = set()

    for step, after, events in world.walk(schedule, state, 90):
        for event in events:
            sync = event.sync_id
            if event.kind == START:
                assert 0 <= event.since_step < step
                flying[sync] = event
                continue

            started = flying[sync]
            assert event.participating == started.participating
            assert event.rank == started.rank

            delay = step - event.start_step
            if event.kind == MIDWAY:
                assert delay == schedule.delay_steps // 2
                looked_at.add(sync)
            else:
                assert event.kind == FINISH
                assert 0 <= delay <= schedule.delay_steps
                if event.start_step > 0:
                    assert (sync in looked_at) == ("midway" in name)
                del flying[sync]
        assert after.step == step


@every_schedule
@some
@given(st.integers(0, 2**30), st.integers(1, 40))
def test_a_landed_schedule_goes_on_with_nothing_in_flight(name, seed, stop):
    schedule = SCHEDULES[name]
    world = World(seed)
    states = [s for _, s, _ in world.walk(schedule, schedule.init(), stop)]
    state = [schedule.init(), *states][-1]
    landed = schedule.landed(state)
    assert landed.in_flight == ()
    assert landed.step == state.step

    rest = world.walk(schedule, landed, stop + 30)
    first = next(event for _, _, events in rest for event in events)
    assert first.kind == START


@every_schedule
def test_warm_up_has_run_every_program(name):
    """Each fragment has started and finished, in the way in which it always does."""
    schedule = SCHEDULES[name]
    world = World(0)
    ran = set()
    for _, _, events in world.walk(schedule, schedule.init(), schedule.warm_up_steps):
        ran |= {(e.kind, e.fragment_id) for e in events}

    fragments = range(schedule.num_fragments)
    assert ran >= {(START, k) for k in fragments}
    assert ran >= {(FINISH, k) for k in fragments}


@every_schedule
def test_properties_of_a_schedule_follow_its_kind(name):
    schedule = SCHEDULES[name]
    assert schedule.is_measured == ("measured" in name)
    assert schedule.is_by_region == isinstance(schedule, Asynchronous)
    assert (schedule.init().rank > 0) == (name == "ranked")


@pytest.mark.parametrize("name", ["ranked", "periods", "by region"])
def test_a_delay_without_two_halves_is_refused(name):
    with pytest.raises(ValueError, match="delay_steps=.* has no two halves to compare"):
        SCHEDULES[name].bind(EVEN, looks_midway=True)


def test_a_measurement_that_is_not_given_is_named():
    assert nothing("applied") == []
    with pytest.raises(ValueError, match="the schedule needs 'drift', which is not"):
        nothing("drift")
