"""Seconds of a timeline, simulated and beyond, its trace and its picture."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image

from cocodc_jax.network import trace
from cocodc_jax.network.links import Link, LinkChange, uniform
from cocodc_jax.network.simulator import simulate
from cocodc_jax.network.timeline import SyncRecord, Timeline
from cocodc_jax.network.trace import plot_timeline, region_spans, write_trace
from cocodc_jax.network.workload import Workload
from cocodc_jax.sync.schedules import staggered


def diloco(num_steps, changes=()):
    # DiLoCo, H = 4, 1 s a step, 3 s a sync: 7 s for four steps.
    work = Workload((2e9,), (1.0, 1.0))
    topology = uniform(2, Link(8.0, 0.5), changes)
    return simulate(topology, work, staggered(4), num_steps)


def test_seconds_until_a_simulated_step_by_hand():
    assert diloco(8).seconds_until(5.0) == 8.0  # four steps, sync, one step
    assert diloco(8).seconds_until(3.5) == pytest.approx(3.5 + 3 * 0.5)


def test_seconds_beyond_them_go_on_at_the_last_pace():
    assert diloco(8).seconds_until(25.0) == pytest.approx(25 / 4 * 7)


def test_an_early_outage_is_not_taken_for_the_pace():
    slow_start = diloco(8, (LinkChange(4.5, 10.0, bandwidth_factor=0.0),))
    assert slow_start.sim_s == 24.0
    assert slow_start.seconds_until(25.0) == pytest.approx(24 + 17 / 4 * 7)


SECONDS = st.integers(0, 12)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), max_size=8))
def test_exposed_time_counts_seconds_of_flight_and_waiting(given_syncs):
    """A second counts if a message is in flight and a region waits for one."""
    syncs = []
    flying = set()
    waiting = set()

    for begin, flight, late, stall in given_syncs:
        arrival = begin + flight
        merge = arrival + late
        times = (float(begin), float(arrival), float(merge), float(stall))
        syncs.append(SyncRecord((0,), 0, 1, *times[:3], times[3:], ()))
        flying |= set(range(begin, arrival))
        waiting |= set(range(merge - stall, merge))

    end = 20
    marks = ((0, (0.0,)), (1, (float(end),)))
    timeline = Timeline(("a",), tuple(syncs), 1, (1.0,), marks, (0.0,), (0.0,))
    assert timeline.exposed_s == len(flying & waiting & set(range(end)))


@pytest.fixture
def timeline():
    # Syncs of 3 s, tau of 3 steps of 1 s, slots of 2: two syncs at once, and stalls.
    topology = uniform(2, Link(8.0, 0.5))
    work = Workload((2e9, 2e9), (1.0, 0.5))
    return simulate(topology, work, staggered(4, 2, 3), 16)


@pytest.mark.parametrize("region", [0, 1])
def test_spans_cover_a_region_without_gaps(timeline, region):
    spans = list(region_spans(timeline, region))

    for left, right in itertools.pairwise(spans):
        assert left[2] == pytest.approx(right[1])
    stall = sum(end - begin for kind, begin, end, *_ in spans if kind == "stall")
    assert stall == pytest.approx(timeline.stall_s[region])
    assert spans[-1][2] == pytest.approx(timeline.marks[-1][1][region])


def test_trace_holds_every_sync_and_no_overlapping_spans(timeline, tmp_path):
    write_trace(timeline, tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    syncs = [event for event in spans if event["name"].startswith("fragment")]
    assert len(syncs) == len(timeline.syncs)

    first = timeline.syncs[0]
    assert syncs[0]["ts"] == first.start_s * 1e6
    assert syncs[0]["dur"] == pytest.approx((first.arrival_s - first.start_s) * 1e6)
    assert syncs[0]["args"]["stall_s"] == first.stall_s

    tracks = {}
    for event in sorted(spans, key=lambda e: e["ts"]):
        tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    assert len(tracks) == 4  # two regions, two syncs at once

    for track in tracks.values():
        for left, right in itertools.pairwise(track):
            assert left["ts"] + left["dur"] <= right["ts"] + 1e-3


def test_a_plot_leaves_out_syncs_beyond_the_most(timeline, tmp_path, monkeypatch):
    plot_timeline(timeline, tmp_path / "all.png", "all")
    monkeypatch.setattr(trace, "MAX_SYNCS", 2)
    plot_timeline(timeline, tmp_path / "some.png", "all")
    pixels = image.imread(tmp_path / "all.png")
    assert pixels.shape[1] == 1200
    assert (pixels != image.imread(tmp_path / "some.png")).any()
