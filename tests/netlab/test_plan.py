"""The lab as a library: what is planned, run and counted, and what is not loaded."""

import json
import math
import subprocess
import sys

import pytest

from cocodc_jax import netlab
from cocodc_jax.network.links import Link, LinkChange, uniform

LACKS = netlab.missing()


def test_sizes_come_from_the_links_as_they_usually_are(tmp_path):
    topology = uniform(2, Link(0.1, 0.05))
    plan = netlab.make_plan(topology, ["echo", "r{region}"], tmp_path)
    assert plan.regions == ("region0", "region1")
    assert (plan.mtu_bytes, plan.buffer_s) == (12_500, math.inf)
    assert plan.region_command(1) == ["echo", "r1"]
    outage = LinkChange(start_s=1.0, duration_s=2.0, bandwidth_factor=0.0)
    later = netlab.make_plan(
        uniform(2, Link(0.1, 0.05), changes=(outage,)), ["echo"], tmp_path
    )
    assert (later.mtu_bytes, len(later.conditions)) == (12_500, 3)
    assert later.window_bytes == plan.window_bytes


def test_what_the_relay_counted_is_one_line(tmp_path):
    plan = netlab.make_plan(uniform(2, Link(0.1, 0.05)), ["true"], tmp_path)
    assert plan.summary() == "wan: nothing was counted"
    traffic = {
        "wall_s": 2.0, "relay_cpu_s": 0.5, "mean_late_s": 0.0012, "max_late_s": 0.01,
        "sent_bytes": [[0, 2_000_000], [500_000, 0]],
        "delivered_bytes": [[0, 1_000_000], [500_000, 0]],
    }  # fmt: skip
    plan.traffic_path.write_text(json.dumps(traffic))
    assert plan.summary() == (
        "wan: 2.0 s, 2.500 MB sent, 1.500 MB delivered, relay busy 25% of a core, "
        "packets late by 1.2 ms, at most 10.0"
    )


@pytest.mark.skipif(bool(LACKS), reason=f"no lab: {'; '.join(LACKS)}")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_command_runs_in_every_region(tmp_path):
    plan = netlab.make_plan(uniform(2, Link(0.1, 0.0)), ["echo", "r{region}"], tmp_path)
    assert netlab.run(plan) == 0
    assert [plan.log_path(i).read_text() for i in range(2)] == ["r0\n", "r1\n"]


def test_its_processes_load_neither_jax_nor_numpy():
    """There is one for each region, and they have to start in no time."""
    program = """
import sys
import cocodc_jax.netlab.region, cocodc_jax.netlab.relay
assert not {"jax", "numpy"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
