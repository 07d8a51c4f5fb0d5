"""Faults put into made-up times are named, and noise is not."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax.netlab.shaper import Conditions, Shaper
from cocodc_jax.network import faults
from cocodc_jax.network.faults import Finding, Messages, Regions, explain
from cocodc_jax.network.links import Link, LinkChange, uniform
from cocodc_jax.network.simulator import simulate
from cocodc_jax.network.timeline import Timeline
from cocodc_jax.network.workload import Workload
from cocodc_jax.sync.schedules import staggered


def cells_of(kind, where, num):
    """The cells that a fault makes slow."""
    bad = np.full((num, num), kind == "network")
    if kind in ("sender", "region"):
        bad[where[0]] = True
    if kind in ("receiver", "region"):
        bad[:, where[0]] = True
    if kind == "link":
        bad[where] = True
    return bad


@st.composite
def injected(draw):
    num = draw(st.integers(3, 7))
    kind = draw(st.sampled_from(["link", "sender", "receiver", "region", "network"]))
    first = draw(st.integers(0, num - 1))
    second = (first + draw(st.integers(1, num - 1))) % num
    where = {"link": (first, second), "network": ()}.get(kind, (first,))
    return num, kind, where


@settings(deadline=None, max_examples=60)
@given(injected(), st.integers(0, 2**31), st.floats(3.0, 50.0))
def test_the_injected_fault_is_named_within_five_syncs(fault, seed, factor):
    """Links of unlike speeds, a fifth of noise either way."""
    num, kind, where = fault
    rng = np.random.default_rng(seed)
    usual = rng.uniform(0.05, 2.0, (num, num))
    bad = cells_of(kind, where, num)
    watch = Messages()

    for sync in range(25):
        seconds = usual * rng.uniform(0.8, 1.2, (num, num))
        if sync >= 20:
            seconds = np.where(bad, factor * seconds, seconds)
        findings = watch.observe(seconds)
        if sync < 20:
            assert findings == []

    assert [(x.kind, x.where) for x in findings] == [(kind, where)]
    assert findings[0].score > 6
    assert findings[0].seconds > 1.5 * findings[0].usual


def test_an_hour_of_the_labs_noise_is_not_named():
    """4 regions, 50 ms and 40 ms of jitter, a sync of 4 packets every 10 s."""
    num = 4
    size = 1500
    rate, delay, jitter, loss = ([[x] * num] * num for x in (8e6, 0.05, 0.04, 0.0))
    conditions = Conditions(0.0, rate, delay, jitter, loss, rate[0], rate[0])
    shaper = Shaper([conditions], 10.0, seed=0)
    watch = Messages()

    for sync in range(360):
        start = 10.0 * sync
        arrived = np.zeros((num, num))
        for i, j in np.argwhere(~np.eye(num, dtype=bool)):
            for _ in range(4):
                shaper.send(start, i, j, bytes([i]) + bytes(size - 1))

        while (now := shaper.next_s) < start + 10.0:
            for target, packet in shaper.arrivals(now):
                arrived[packet[0], target] = now - start

        assert (arrived[~np.eye(num, dtype=bool)] > 0.01).all()
        assert watch.observe(arrived) == []


def test_rare_spikes_are_not_named():
    """An hour, a sync every 3 s; one time in two hundred takes ten times as long."""
    rng = np.random.default_rng(0)
    watch = Messages()
    for _ in range(1200):
        seconds = rng.uniform(0.8, 1.2, (3, 3))
        seconds[rng.random((3, 3)) < 0.005] *= 10
        assert watch.observe(seconds) == []


# Seconds of the messages over a link that loses a third of its packets, as they came
# in the network lab: 50 kB in packets of 12.5 kB, round trips of 40 ms.
LOSSY = [
    (0.705, 0.424, 0.415, 0.097, 0.171),
    (0.066, np.inf, np.inf, np.inf, np.inf),
    (0.185, 0.378, 0.384, 1.093, 0.293),
    (0.109, 0.113, 0.838, 0.129, 0.106),
]


@pytest.mark.parametrize("came", LOSSY)
def test_a_link_that_loses_packets_is_named_within_five_syncs(came):
    """Less than half of the messages are later than noise."""
    rng = np.random.default_rng(0)
    watch = Messages(least=0.05)

    for _ in range(20):
        assert watch.observe(rng.uniform(0.003, 0.015, (4, 4))) == []

    for late in came:
        seconds = rng.uniform(0.003, 0.015, (4, 4))
        seconds[1, 2] = late
        findings = watch.observe(seconds)

    assert [(x.kind, x.where) for x in findings] == [("link", (1, 2))]


def test_bursts_of_busy_regions_are_not_named():
    """An hour, a sync every 3 s; a region is busy for half a minute now and then.

    What it sends and receives then takes up to a quarter of a second longer.
    """
    rng = np.random.default_rng(0)
    watch = Messages(least=0.05)
    usual = rng.uniform(0.005, 0.5, (4, 4))
    busy_until = np.zeros(4)

    for sync in range(1200):
        starts = rng.random(4) < 0.01
        busy_until[starts] = sync + rng.integers(2, 20, 4)[starts]
        scale = 0.01 + 0.06 * (busy_until > sync)
        late = rng.exponential(scale, (4, 4)) + rng.exponential(scale, (4, 4)).T
        assert watch.observe(usual + np.minimum(late, 0.25)) == []


@given(st.integers(0, 2**31), st.integers(1, 9))
def test_the_median_leaves_out_unknown_values(seed, num):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(num, 2, 3))
    values[rng.random(values.shape) < 0.5] = np.nan
    values[:, 0, 0] = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of slices that are all NaN.
        wanted = np.nanmedian(values, 0)
    np.testing.assert_array_equal(faults._median(values), wanted)


def test_two_regions_never_report_a_late_message():
    watch = Messages(least=0.05)
    alone = np.full((3, 3), np.nan)
    alone[0, 1] = alone[1, 0] = 0.01
    for _ in range(20):
        assert watch.observe(alone) == []

    alone[0, 1] = 0.2
    for _ in range(5):
        assert watch.observe(alone) == []


def test_a_robust_score_by_hand():
    """Times 1, 2, 3, 4, 9: median 3, MAD 1; 9 is 6 / 1.4826 away."""
    past = np.array([1.0, 2.0, 3.0, 4.0, 9.0])
    median = np.median(past)
    mad = np.median(np.abs(past - 3))
    assert (median, mad) == (3, 1)

    # A tenth of 3 is the least scale.
    scale = faults._scale(median, mad, 0.1)
    least = faults._scale(3.0, 0.0, 0.1)
    assert faults.robust_z(9 - median, scale) == pytest.approx(6 / 1.4826)
    assert faults.robust_z(3.0, least) == pytest.approx(10)


def test_a_lost_message_is_a_fault_and_an_unmeasured_one_is_not():
    watch = Messages()
    seconds = np.ones((3, 3))
    for _ in range(10):
        assert watch.observe(seconds) == []

    lost = seconds.copy()
    lost[2, :] = np.inf
    lost[0, 1] = np.nan

    for _ in range(3):
        findings = watch.observe(lost)
    assert [(x.kind, x.where) for x in findings] == [("sender", (2,))]
    assert watch.observe(seconds) == []  # The region is back.


def test_two_faults_at_once_are_named_and_a_fault_of_two_regions_is_a_link():
    receiver = ("receiver", (3,))
    link = ("link", (0, 1))
    bad = cells_of(*receiver, 5) | cells_of(*link, 5)
    assert [cause[:2] for cause in explain(bad)] == [receiver, link]
    assert [cause[:2] for cause in explain(cells_of(*link, 2))] == [link]


@pytest.mark.parametrize(
    ("source", "target", "kind", "where"),
    [
        (0, 2, "link", (0, 2)),
        (1, None, "sender", (1,)),
        (None, 3, "receiver", (3,)),
        (None, None, "network", ()),
    ],
)
def test_a_slow_link_of_a_simulated_run_is_named(source, target, kind, where):
    """A tenth of the bandwidth from second 60 on; a sync every 5 s."""
    change = LinkChange(60.0, 1000.0, 0.1, source=source, target=target)
    topology = uniform(4, Link(0.1, 0.05), (change,))
    work = Workload((5e6,), (0.5,) * 4)
    schedule = staggered(10, num_fragments=1, delay_steps=9)
    timeline = simulate(topology, work, schedule, 400, "direct")

    ((time_s, finding),) = faults.watch_links(topology, timeline)
    assert (finding.kind, finding.where) == (kind, where)

    starts = [sync.start_s for sync in timeline.syncs if sync.start_s >= 60]
    assert starts.index(time_s) < 5

    quiet = uniform(4, Link(0.1, 0.05))
    undisturbed = simulate(quiet, work, schedule, 400, "direct")
    assert faults.watch_links(quiet, undisturbed) == []


def test_a_slow_region_is_found_by_its_past_and_by_the_others():
    slow = Regions()
    unusual = Regions(against_others=True)
    for sync in range(20):
        values = np.array([1.0, 1.1, 4.0])  # One of them always takes longer.
        if sync >= 10:
            values = values * 3  # All change.
        if sync >= 15:
            values[1] *= 10

        late = slow.observe(values)
        odd = unusual.observe(values)
        if sync < 15:
            assert odd == []

    assert [x.where for x in late] == [(0,), (1,), (2,)]
    assert [(x.kind, x.where) for x in odd] == [("slow", (1,))]


def test_the_slower_of_two_is_named():
    """By hand: 4 times its past, the other one's 1 apart from it by 3 / 0.1."""
    watch = Regions(against_others=True)
    for _ in range(5):
        assert watch.observe(np.array([0.5, 1.0])) == []
    for _ in range(3):
        findings = watch.observe(np.array([0.5, 4.0]))
    assert [(x.kind, x.where, x.usual) for x in findings] == [("slow", (1,), 1.0)]
    assert watch.observe(np.array([0.5, np.nan])) == []


def test_slow_steps_of_a_timeline_are_found():
    seconds = np.zeros(3)
    marks = [(0, (0.0, 0.0, 0.0))]
    for i in range(1, 21):
        seconds = seconds + 5 * np.array([1.0, 1.0, 5.0 if i > 10 else 1.0])
        marks.append((5 * i, tuple(seconds)))

    timeline = Timeline(
        ("a", "b", "c"), (), 100, (1.0,) * 3, tuple(marks), (0.0,) * 3, (0.0,) * 3
    )
    ((step, finding),) = faults.watch_steps(timeline)
    assert (step, finding.where) == (65, (2,))
    assert finding.explain(timeline.regions) == "slow c: 5 s, usually 1 s (z = 8)"


def test_findings_are_explained_in_words():
    finding = Finding("network", (), 2.0, 1.0, 9.0)
    assert finding.explain().startswith("the network: 2 s")


def test_seconds_of_a_pair_are_its_transfer_and_delay():
    topology = uniform(2, Link(8e-9 * 100, 0.5))
    seconds = faults.pair_seconds(topology, 50.0, 0.0)
    assert seconds[0, 1] == 1.0
