import itertools
import json

import pytest
from matplotlib import image

from cocodc_jax.network import trace
from cocodc_jax.network.links import Link, uniform
from cocodc_jax.network.simulator import simulate
from cocodc_jax.network.trace import plot_timeline, region_spans, write_trace
from cocodc_jax.network.workload import Workload
from cocodc_jax.sync.schedules import staggered


@pytest.fixture
def timeline():
    # Syncs of 3 s, tau of 3 steps of 1 s, slots of 2: two syncs at once, and stalls.
    topology = uniform(2, Link(8.0, 0.5))
    work = Workload((2e9, 2e9), (1.0, 0.5))
    return simulate(topology, work, staggered(4, 2, 3), 16)


def test_spans_cover_a_region_without_gaps(timeline):
    for region in (0, 1):
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


def test_plot_is_drawn(timeline, tmp_path, monkeypatch):
    plot_timeline(timeline, tmp_path / "all.png", "all")
    monkeypatch.setattr(trace, "MAX_SYNCS", 2)
    plot_timeline(timeline, tmp_path / "some.png", "all")
    pixels = image.imread(tmp_path / "all.png")
    assert pixels.shape[1] == 1200
    assert (pixels != image.imread(tmp_path / "some.png")).any()
