"""The lab as a library: plans, shaped packets, environments, counts and permissions."""

import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocodc_jax import netlab
from cocodc_jax.netlab import plan, region
from cocodc_jax.netlab.shaper import Conditions, Shaper
from cocodc_jax.network.links import Link, LinkChange, Topology, uniform

ROOT = pathlib.Path(__file__).parents[2]
PACKET = bytes(1250)  # 10,000 bits: 1 ms at 10 Mbit/s


def conditions(num=2, *, mbit=10.0, delay_s=0.1, region_mbit=math.inf, **fields):
    def full(value):
        return [[value] * num for _ in range(num)]

    cap = [region_mbit * 1e6] * num
    base = Conditions(
        start_s=0.0,
        rate_bps=full(mbit * 1e6),
        delay_s=full(delay_s),
        jitter_s=full(fields.pop("jitter_s", 0.0)),
        loss=full(fields.pop("loss", 0.0)),
        uplink_bps=cap,
        downlink_bps=cap,
    )

    return dataclasses.replace(base, **fields)


def arrivals(shaper):
    """(time, target, packet) until nothing is queued; time goes from event to event."""
    out = []
    while (now := shaper.next_s) < math.inf:
        out += [(now, *arrival) for arrival in shaper.arrivals(now)]
    return out


def times(shaper):
    return [time for time, *_ in arrivals(shaper)]


def test_an_idle_link_takes_one_transmission_and_the_delay():
    # All three meters at 10 Mbit/s: the bits flow through, 1 ms and not 3.
    shaper = Shaper([conditions(region_mbit=10)], buffer_s=1, seed=0)
    shaper.send(5.0, 0, 1, PACKET)
    assert shaper.arrivals(5.1009) == []
    assert times(shaper) == pytest.approx([5.101])


def test_packets_wait_for_those_before_them():
    shaper = Shaper([conditions()], buffer_s=1, seed=0)
    for _ in range(3):
        shaper.send(0.0, 0, 1, PACKET)
    shaper.send(0.0, 1, 0, PACKET)  # The other direction is another link.
    assert times(shaper) == pytest.approx([0.101, 0.101, 0.102, 0.103])


def test_a_region_shares_its_uplink_between_pairs():
    shaper = Shaper([conditions(3, mbit=100, region_mbit=10)], buffer_s=1, seed=0)
    for target in (1, 2, 1, 2):
        shaper.send(0.0, 0, target, PACKET)
    arrived = arrivals(shaper)
    assert [time for time, *_ in arrived] == pytest.approx([0.101, 0.102, 0.103, 0.104])
    assert [target for _, target, _ in arrived] == [1, 2, 1, 2]


def test_a_region_shares_its_downlink_in_order_of_arrival():
    delays = [[0, 0.1, 0.2], [0.1, 0, 0.1], [0.2, 0.1, 0]]
    links = conditions(3, mbit=1000, downlink_bps=[10e6] * 3)
    links = dataclasses.replace(links, delay_s=delays)
    shaper = Shaper([links], buffer_s=1, seed=0)
    shaper.send(0.0, 2, 0, PACKET)  # is sent first and arrives last

    for now in (0.0, 0.0, 0.1):
        shaper.send(now, 1, 0, PACKET)
    # 0.01 ms on the pairs' links; 1 ms only for a packet that finds another one.
    expected = [0.10001, 0.10101, 0.20001, 0.20101]
    assert times(shaper) == pytest.approx(expected)


def test_a_full_queue_drops_its_tail():
    shaper = Shaper([conditions()], buffer_s=0.0105, seed=0)
    for i in range(100):
        shaper.send(0.0, 0, 1, bytes([i]) + PACKET[1:])

    kept = [packet[0] for *_, packet in arrivals(shaper)]
    # The one that waits 10 ms is the last to be taken: the eleventh.
    assert kept == list(range(11))

    assert shaper.traffic.overflow_packets == [[0, 89], [0, 0]]
    assert shaper.traffic.delivered_bytes == [[0, 11 * 1250], [0, 0]]
    assert shaper.traffic.sent_bytes == [[0, 100 * 1250], [0, 0]]


def test_a_full_downlink_drops_too():
    links = conditions(3, mbit=1e6, downlink_bps=[10e6] * 3)
    shaper = Shaper([links], buffer_s=0.0055, seed=0)
    for _ in range(10):
        shaper.send(0.0, 1, 0, PACKET)
        shaper.send(0.0, 2, 0, PACKET)
    assert len(arrivals(shaper)) == 7
    assert sum(map(sum, shaper.traffic.overflow_packets)) == 13


def test_loss_is_a_share_and_the_seed_decides_it():
    def lost(seed):
        shaper = Shaper([conditions(loss=0.2)], buffer_s=math.inf, seed=seed)
        for i in range(5000):
            shaper.send(0.0, 0, 1, i.to_bytes(2, "big"))
        kept = {packet for *_, packet in arrivals(shaper)}
        assert len(kept) == 5000 - shaper.traffic.lost_packets[0][1]
        return 5000 - len(kept), kept

    number, kept = lost(0)
    assert abs(number - 1000) < 5 * math.sqrt(5000 * 0.2 * 0.8)  # five sigmas
    assert kept == lost(0)[1]
    assert kept != lost(1)[1]


@given(jitter_s=st.floats(0, 0.2), seed=st.integers(0, 99))
def test_jitter_keeps_bounds_and_order(jitter_s, seed):
    links = conditions(mbit=1e9, jitter_s=jitter_s)
    shaper = Shaper([links], buffer_s=1, seed=seed)
    sent_s = [i * 0.01 for i in range(50)]
    for i, time in enumerate(sent_s):
        shaper.send(time, 0, 1, bytes([i]))

    arrived = arrivals(shaper)
    assert [packet[0] for *_, packet in arrived] == list(range(50))
    # A packet may wait for an earlier one, which was sent before it.
    for (time, *_), sent in zip(arrived, sent_s, strict=True):
        lowest = sent + max(0.0, 0.1 - jitter_s)
        assert lowest - 1e-9 <= time <= sent + 0.1 + jitter_s + 1e-6


def test_jitter_varies():
    links = conditions(mbit=1e9, jitter_s=0.02)
    shaper = Shaper([links], buffer_s=1, seed=0)
    for i in range(200):
        shaper.send(float(i), 0, 1, b"x")
    delays = [time - i for i, time in enumerate(times(shaper))]
    assert min(delays) < 0.083
    assert max(delays) > 0.117


def test_links_change_with_time():
    later = conditions(start_s=1.0, rate_bps=[[1, 0.0], [1e6, 1]])
    back = conditions(start_s=2.0, delay_s=0.3)
    shaper = Shaper([conditions(), later, back], buffer_s=1, seed=0)

    for now in (0.999, 1.0, 1.999):
        shaper.send(now, 0, 1, PACKET)
    shaper.send(1.999, 1, 0, PACKET)
    shaper.send(2.0, 0, 1, PACKET)
    # The first was in flight when the outage began; 1 to 0 has a tenth of the rate.
    assert times(shaper) == pytest.approx([1.1, 2.109, 2.301])
    assert shaper.traffic.outage_packets == [[0, 2], [0, 0]]


def test_changes_count_from_changes_from_s():
    """By hand: an outage begins a second after `changes_from_s`, and not before."""
    outage = conditions(start_s=1.0, rate_bps=[[1, 0.0], [1e6, 1]])
    shaper = Shaper([conditions(), outage], buffer_s=1, seed=0)

    shaper.changes_from_s = math.inf
    shaper.send(4.0, 0, 1, PACKET)
    shaper.changes_from_s = 5.0
    for now in (5.999, 6.0):
        shaper.send(now, 0, 1, PACKET)

    assert len(times(shaper)) == 2
    assert shaper.traffic.outage_packets == [[0, 1], [0, 0]]


LINKS = Topology(
    ("a", "b", "c"),
    (
        (Link(1, 0), Link(0.1, 0.05, 0.01, 0.001), Link(0.2, 0.1)),
        (Link(0.3, 0.06), Link(1, 0), Link(0.4, 0.02)),
        (Link(0.5, 0.11), Link(0.6, 0.03), Link(1, 0)),
    ),
)


def test_conditions_are_the_topology_in_bits_and_seconds():
    (conditions,) = plan.conditions_over_time(LINKS, 2e8)
    assert conditions.start_s == 0
    assert conditions.rate_bps[0][1] == pytest.approx(1e8)
    assert conditions.rate_bps[2][0] == pytest.approx(5e8)

    # The latency, not the delay to plan with, which holds the jitter.
    assert (conditions.delay_s[0][1], conditions.delay_s[2][0]) == (0.05, 0.11)
    assert (conditions.jitter_s[0][1], conditions.loss[0][1]) == (0.01, 0.001)

    assert conditions.uplink_bps == conditions.downlink_bps == (2e8,) * 3
    assert plan.usual_mtu_bytes(conditions) == 1500


def test_changes_hold_while_they_last_and_multiply():
    changes = (
        LinkChange(1, 2, 0.5, 0.02, source=0, target=1),
        LinkChange(2, 2, 0.1),
        LinkChange(5, 1, 0.0, target=2),
        LinkChange(7, 1, 0.25, source=1),
    )

    topology = dataclasses.replace(uniform(3, Link(1, 0.05)), changes=changes)
    conditions = plan.conditions_over_time(topology, 1e9)
    assert [c.start_s for c in conditions] == [0, 1, 2, 3, 4, 5, 6, 7, 8]

    by_time = {c.start_s: c for c in conditions}

    def at(time, i, j):
        return by_time[time].rate_bps[i][j] / 1e9

    assert [at(t, 0, 1) for t in range(5)] == pytest.approx([1, 0.5, 0.05, 0.1, 1])
    assert [at(t, 1, 0) for t in range(5)] == pytest.approx([1, 1, 0.1, 0.1, 1])
    delays = [by_time[t].delay_s[0][1] for t in range(4)]
    assert delays == pytest.approx([0.05, 0.07, 0.07, 0.05])
    assert (at(5, 0, 2), at(5, 1, 2), at(5, 0, 1)) == (0, 0, 1)

    # A change of all that a region sends is one of its uplink.
    assert by_time[1].uplink_bps == (1e9,) * 3
    assert by_time[2].uplink_bps == by_time[2].downlink_bps == (1e8,) * 3
    assert by_time[7].uplink_bps == (1e9, 2.5e8, 1e9)
    assert by_time[7].downlink_bps == (1e9,) * 3
    assert min(by_time[5].downlink_bps) > 0


@pytest.mark.parametrize(
    ("mbit", "mtu"), [(1, 1500), (20, 2500), (100, 12500), (1000, 65000)]
)
def test_packets_take_a_millisecond(mbit, mtu):
    assert plan.usual_mtu_bytes(conditions(mbit=mbit)) == mtu


def test_packets_take_a_millisecond_of_a_narrow_uplink():
    assert plan.usual_mtu_bytes(conditions(mbit=1000, region_mbit=100)) == 12500


def test_windows_hold_two_round_trips():
    # 100 Mbit/s for 0.32 s, four times; at least for 0.2 s; and there is an end.
    links = conditions(mbit=100, delay_s=0.08)
    assert plan.usual_window_bytes(links) == pytest.approx(16e6)
    near = conditions(mbit=100, delay_s=0.001)
    assert plan.usual_window_bytes(near) == pytest.approx(10e6)
    assert plan.usual_window_bytes(conditions(mbit=1e6)) == 2**28
    assert plan.usual_window_bytes(conditions(1)) == 0


def test_hosts_give_the_own_name_the_regions_address():
    text = "127.0.0.1 localhost box # a box\n::1 localhost\n\n10.0.0.5 box\n"
    assert region.hosts(text, "box", 1, 2).splitlines() == [
        "127.0.0.1 localhost",
        "::1 localhost",
        "10.77.0.2 box",
        "10.77.0.1 region0",
        "10.77.0.2 region1",
    ]


def test_the_environment_names_the_process_and_has_no_proxy(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "localhost")
    monkeypatch.setenv("KEPT", "yes")
    environment = region.environment(2, 4)

    assert not [name for name in environment if name.lower().endswith("_proxy")]
    assert environment["KEPT"] == "yes"

    mine = {k: v for k, v in environment.items() if k.startswith("COCODC_")}
    assert mine == {
        "COCODC_PROCESS_ID": "2",
        "COCODC_NUM_PROCESSES": "4",
        "COCODC_COORDINATOR_ADDRESS": "10.77.0.1:29400",
        "COCODC_LOCAL_ADDRESS": "10.77.0.3",
    }


def test_missing_permissions_are_named():
    program = """
import os
from cocodc_jax.netlab import region
if os.getuid() == 0:
    os.setuid(65534)
print("; ".join(region.missing()))
"""
    words = [sys.executable, "-c", program]
    env = {"PATH": "/nowhere"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)

    assert "CAP_NET_ADMIN and CAP_SYS_ADMIN (run as root" in done.stdout, done.stderr
    assert "the program `ip` (package iproute2)" in done.stdout


def test_a_missing_device_is_named(monkeypatch):
    monkeypatch.setattr(region, "_TUN_PATH", "/dev/net/no_tun")
    assert "/dev/net/no_tun (No such file or directory" in region.missing()[-1]


def test_sizes_come_from_the_links_as_they_usually_are(tmp_path):
    usual = netlab.make_plan(
        uniform(2, Link(0.1, 0.05)), ["echo", "r{region}"], tmp_path
    )
    assert usual.regions == ("region0", "region1")
    assert (usual.mtu_bytes, usual.buffer_s) == (12_500, math.inf)
    assert usual.region_command(1) == ["echo", "r1"]

    outage = LinkChange(start_s=1.0, duration_s=2.0, bandwidth_factor=0.0)
    later = netlab.make_plan(
        uniform(2, Link(0.1, 0.05), changes=(outage,)), ["echo"], tmp_path
    )
    assert (later.mtu_bytes, len(later.conditions)) == (12_500, 3)
    assert later.window_bytes == usual.window_bytes


def test_the_counts_of_the_relay_are_summed_up_in_one_line(tmp_path):
    made = netlab.make_plan(uniform(2, Link(0.1, 0.05)), ["true"], tmp_path)
    assert made.summary() == "wan: nothing was counted"

    traffic = {
        "wall_s": 2.0,
        "relay_cpu_s": 0.5,
        "mean_late_s": 0.0012,
        "max_late_s": 0.01,
        "sent_bytes": [[0, 2_000_000], [500_000, 0]],
        "delivered_bytes": [[0, 1_000_000], [500_000, 0]],
    }

    made.traffic_path.write_text(json.dumps(traffic))
    assert made.summary() == (
        "wan: 2.0 s, 2.500 MB sent, 1.500 MB delivered, relay busy 25% of a core, "
        "packets late by 1.2 ms, at most 10.0"
    )


def test_processes_of_the_lab_load_neither_jax_nor_numpy():
    """Each region has one, which has to start at once."""
    program = """
import sys
import cocodc_jax.netlab.region, cocodc_jax.netlab.relay
assert not {"jax", "numpy"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
