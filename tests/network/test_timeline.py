"""Seconds of a timeline, within what was simulated and beyond."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocodc_jax.network.links import Link, LinkChange, uniform
from cocodc_jax.network.simulator import simulate
from cocodc_jax.network.timeline import SyncRecord, Timeline
from cocodc_jax.network.workload import Workload
from cocodc_jax.sync.schedules import staggered


def timeline(num_steps, changes=()):
    # DiLoCo, H = 4, 1 s a step, 3 s a sync: 7 s for four steps.
    work = Workload((2e9,), (1.0, 1.0))
    topology = uniform(2, Link(8.0, 0.5), changes)
    return simulate(topology, work, staggered(4), num_steps)


def test_seconds_within_the_simulated_steps():
    assert timeline(8).seconds_until(5.0) == 8.0  # four steps, sync, one step
    assert timeline(8).seconds_until(3.5) == pytest.approx(3.5 + 3 * 0.5)


def test_seconds_beyond_them_go_on_at_the_last_pace():
    assert timeline(8).seconds_until(25.0) == pytest.approx(25 / 4 * 7)


def test_an_early_outage_is_not_taken_for_the_pace():
    slow_start = timeline(8, (LinkChange(4.5, 10.0, bandwidth_factor=0.0),))
    assert slow_start.sim_s == 24.0
    assert slow_start.seconds_until(25.0) == pytest.approx(24 + 17 / 4 * 7)


SECONDS = st.integers(0, 12)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), max_size=8))
def test_what_is_exposed_is_counted_second_by_second(given_syncs):
    """A second counts where a message is on its way and a region waits for one."""
    syncs, flying, waiting = [], set(), set()
    for begin, flight, late, stall in given_syncs:
        arrival = begin + flight
        merge = arrival + late
        times = (float(begin), float(arrival), float(merge), float(stall))
        syncs.append(SyncRecord((0,), 0, 1, *times, float(stall), 0.0))
        flying |= set(range(begin, arrival))
        waiting |= set(range(merge - stall, merge))
    end = 20
    marks = ((0, (0.0,)), (1, (float(end),)))
    timeline = Timeline(("a",), tuple(syncs), 1, (1.0,), marks, (0.0,), (0.0,))
    assert timeline.exposed_s == len(flying & waiting & set(range(end)))
