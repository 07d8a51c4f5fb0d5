"""The probe as a user runs it, in two processes, and refused flags."""

import functools
import json

import numpy as np
import pytest

from cocodc_jax.netlab import children
from cocodc_jax.network.gloo import payload_share
from experiments import probe_network, wan

PROBE = "experiments.probe_network"


def values_of(*arguments):
    values = probe_network.define_flags()
    values(["probe", *arguments])
    return values


def test_two_processes_measure_what_the_simulator_predicts(command, tmp_path):
    environment = {
        "COCODC_NUM_PROCESSES": "2",
        "COCODC_COORDINATOR_ADDRESS": children.free_addresses(1)[0],
    }
    flags = (
        "--sizes_mb=0.4,0.02",
        "--repeats=3",
        "--pause_s=0",
        f"--workdir={tmp_path}",
        "--bandwidth_mbit=1000",
        "--latency_ms=10",
    )
    first, second = [
        command(PROBE, *flags, env=environment | {"COCODC_PROCESS_ID": str(k)})
        for k in range(2)
    ]

    out, err = first.communicate(timeout=120)
    silent, second_err = second.communicate(timeout=120)
    assert (first.returncode, second.returncode) == (0, 0), err + second_err
    assert "direct" not in silent

    rows = json.loads((tmp_path / probe_network.FILE).read_text())["rows"]
    assert [(row["collective"], row["num_bytes"]) for row in rows] == [
        (name, num_bytes)
        for name in ("direct", "ring", "direct_gather", "ring_gather")
        for num_bytes in (400_000, 20_000)
    ]

    # Delays of 10 ms, and how often a message's own time: as predicted, and at once.
    times = {
        "direct": (0.04, 2, 1),
        "direct_gather": (0.02, 2, 1),
        "ring": (0.04, 1, None),
        "ring_gather": (0.02, 1.5, 1),
    }

    for row in rows:
        assert np.shape(row["seconds"]) == (2, 3)
        medians = np.median(row["seconds"], axis=1)
        assert row["measured_s"] == max(medians) > 0
        # In packets of 65000 bytes.
        bytes_s = row["num_bytes"] / 125e6 / payload_share(65000)
        delays_s, predicted, at_once = times[row["collective"]]
        # The time of words is not known to a tenth of a percent.
        exact = not row["collective"].startswith("direct")
        near = functools.partial(pytest.approx, abs=2e-8 if exact else 0.002)
        assert row["predicted_s"] == near(delays_s + predicted * bytes_s)

        if at_once:
            assert row["at_once_s"] == near(delays_s + at_once * bytes_s)

        ratio = row["measured_s"] / row["predicted_s"]
        assert f"{row['measured_s']:.3f}" in out
        assert f"{row['predicted_s']:.3f}" in out
        assert f"{ratio:.2f}" in out


def test_without_flags_there_are_no_links():
    assert probe_network.read_links(values_of(), 2) is None


def test_links_are_read_from_flags():
    state = probe_network.read_links(values_of("--bandwidth_mbit=8", "--mtu=520"), 2)
    assert state is not None
    assert state.bytes_per_s[0, 1] == 900_000  # Headers are 52 of 520 bytes.
    assert state.delay_s[0, 1] == 0.05


@pytest.fixture
def links_file(tmp_path):
    """A file of two regions."""
    path = tmp_path / "links.yaml"
    path.write_text("""
regions: [here, there]
default: {bandwidth_gbps: 0.016, latency_ms: 10}
links: [{from: here, to: there, bandwidth_gbps: 0.004}]
""")
    return path


def test_links_are_read_from_a_file_and_limited_by_flags(links_file):
    values = values_of(f"--links={links_file}", "--bandwidth_mbit=8", "--mtu=520")
    state = probe_network.read_links(values, 2)

    assert state is not None
    assert state.bytes_per_s[0, 1] == 450_000
    assert state.bytes_per_s[1, 0] == 900_000  # By the flag.
    assert state.delay_s[1, 0] == 0.01


def test_a_file_of_another_number_of_regions_is_refused(links_file):
    with pytest.raises(ValueError, match="has 2 regions, but there are 3 processes"):
        probe_network.read_links(values_of(f"--links={links_file}"), 3)


def test_packets_are_as_long_as_the_lab_makes_them(tmp_path, monkeypatch):
    """Where regions' caps are slower than their links, and links change at once."""
    monkeypatch.setattr(wan.region, "congestion_controls", lambda: ["reno"])
    path = tmp_path / "links.yaml"
    path.write_text("""
regions: [here, there]
default: {bandwidth_gbps: 1, latency_ms: 10}
changes: [{from: here, start_s: 0, duration_s: 9, bandwidth_factor: 0.5}]
""")
    both = f"--links={path}", "--bandwidth_mbit=20"
    lab = wan.define_flags()
    lab(["wan", *both])
    mtu = wan.build_plan(lab, ["true"]).mtu_bytes

    assert mtu == 2500  # what 20 Mbit/s pass in a millisecond

    state = probe_network.read_links(values_of(*both), 2)
    assert state is not None
    assert state.bytes_per_s[1, 0] == 20e6 / 8 * payload_share(mtu)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--sizes_mb=inf", "sizes_mb='inf' must be positive numbers"),
        ("--mtu=40", "--mtu=40 must be "),
        ("--mtu=1500", "--mtu=1500 needs --bandwidth_mbit or --links"),
        ("--latency_ms=50", "--latency_ms=50 needs --bandwidth_mbit"),
        ("--links=x --latency_ms=5", "--latency_ms=5 does not go with --links=x"),
        ("--pause_s=nan", "--pause_s=nan must be finite"),
        ("--bandwidth_mbit=inf", "--bandwidth_mbit=inf must be finite"),
        ("--sizes_mb=1,x", "sizes_mb='1,x' must be positive numbers"),
        ("--sizes_mb=0", "sizes_mb='0' must be positive numbers"),
        ("--collectives=tree", "collectives='tree' is unknown; use direct"),
        ("--bandwidth_mbit=0", "bandwidth_mbit=0 must be positive"),
        ("--links=nowhere.yaml", "links=nowhere.yaml: No such file"),
        ("--repeats=0", "--repeats=0 must be at least 1"),
        ("often", "unexpected argument 'often'"),
    ],
)
def test_wrong_flags_are_refused_in_a_line(flag, message, monkeypatch, refused):
    monkeypatch.setenv("COCODC_NUM_PROCESSES", "2")
    monkeypatch.setenv("COCODC_PROCESS_ID", "0")
    monkeypatch.setenv("COCODC_COORDINATOR_ADDRESS", "127.0.0.1:1")
    assert message in refused(probe_network, *flag.split())


def test_one_process_is_refused(monkeypatch, refused):
    monkeypatch.delenv("COCODC_NUM_PROCESSES", raising=False)
    error = refused(probe_network)
    assert "COCODC_NUM_PROCESSES in the environment must be" in error
