"""Faults of the network: the lab's links, and verdicts on the records."""

import json
import signal
import subprocess
import sys
import threading
import time

import pytest

from cocodc_jax import netlab
from cocodc_jax.netlab.plan import make_plan
from cocodc_jax.network.links import Link, uniform
from experiments.faults import scenarios


def usual_links(tmp_path, num=4):
    topology = uniform(num, Link(bandwidth_gbps=0.1, latency_s=0.02))
    return make_plan(topology, ["true"], tmp_path).conditions[0]


@pytest.mark.parametrize(
    ("scenario", "out"),
    # Of a cut: three regions to the last one, and it to them.
    [("link", 0), ("loss", 0), ("cut", 6), ("partition", 8)],
)
def test_a_scenario_disturbs_only_its_own_links(tmp_path, scenario, out):
    before = usual_links(tmp_path)
    first, bad, after = scenarios.disturbed(scenario, before, 30.0, 60.0)
    assert (first, after.rate_bps, after.loss) == (before, before.rate_bps, before.loss)
    assert (bad.start_s, after.start_s) == (30, 90)
    pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
    assert sum(bad.rate_bps[i][j] == 0 for i, j in pairs) == out
    others = [x for x in pairs if x != (1, 2)]

    if not out:
        assert all(bad.rate_bps[i][j] == before.rate_bps[i][j] for i, j in others)
        assert all(bad.loss[i][j] == before.loss[i][j] for i, j in others)
        assert (bad.rate_bps[1][2], bad.loss[1][2]) != (before.rate_bps[1][2], 0)


def write(tmp_path, region, *findings):
    folder = tmp_path / f"region_{region}"
    folder.mkdir(exist_ok=True)
    text = "".join(
        json.dumps({"fault": "begins", "kind": kind, "where": where, "time": time})
        + "\n"
        for kind, where, time in findings
    )
    (folder / "faults.jsonl").write_text(text)


@pytest.fixture
def cut_off(tmp_path):
    """A folder of four regions, of which the others named the last as cut off."""
    for region in range(3):
        write(tmp_path, region, ("gone", [3], 110.0 + region))
    write(tmp_path, 3, ("gone", [0], 111.0))
    return tmp_path


def judged(folder, at_s=100.0):
    return {"exit_code": 0} | scenarios.judge("cut", folder, 4, at_s, 4.0)


def test_named_faults_are_compared_with_the_injected_one(cut_off):
    result = judged(cut_off)

    assert result["seconds_to_name"] == {0: 10.0, 1: 11.0, 2: 12.0}
    assert result["syncs_to_name"] == {0: 2.5, 1: 2.8, 2: 3.0}
    assert scenarios.is_good(result)


def test_a_fault_that_is_named_late_is_not_good(cut_off):
    assert not scenarios.is_good(judged(cut_off, at_s=85.0))


def test_a_fault_named_before_the_injected_one_is_not_good(cut_off):
    write(cut_off, 2, ("link", [0, 1], 50.0), ("gone", [3], 112.0))
    result = judged(cut_off)

    assert result["named_before"] == [[2, "link", (0, 1)]]
    assert not scenarios.is_good(result)


def test_regions_that_did_not_see_the_fault_are_listed(cut_off):
    (cut_off / "region_1" / "faults.jsonl").unlink()
    assert judged(cut_off)["unseen_by"] == [1]


def test_faults_named_by_an_earlier_run_in_the_folder_are_ignored(tmp_path):
    for region in range(3):
        write(tmp_path, region, ("silent", [0], 7.0), ("gone", [3], 110.0))
    judged = ("cut", tmp_path, 4, 100.0, 4.0)
    assert scenarios.judge(*judged, launched=50.0)["named_before"] == []
    assert len(scenarios.judge(*judged, launched=5.0)["named_before"]) == 3


def test_syncs_until_a_straggler_is_named_are_counted_from_records(tmp_path):
    for region in range(2):
        write(tmp_path, region, ("slow", [1], 130.0))
        text = "".join(json.dumps({"time": 90 + 8 * i}) + "\n" for i in range(9))
        (tmp_path / f"region_{region}" / "syncs.jsonl").write_text(text)

    judgement = scenarios.judge("straggler", tmp_path, 2, 100.0, 0.8)
    assert judgement["syncs_to_name"] == {0: 4, 1: 4}
    assert judgement["seconds_to_name"] == {0: 30.0, 1: 30.0}

    before = usual_links(tmp_path)
    assert scenarios.disturbed("straggler", before, 30.0, 60.0) == (before,)


def test_signals_go_to_a_regions_process(tmp_path):
    arguments = ["--workdir=here", "--region_id=1"]
    command = [sys.executable, "-c", "import time; time.sleep(60)", *arguments]
    process = subprocess.Popen(command)
    scenarios._send_all({*arguments, "--region_id=2"}, signal.SIGKILL)
    assert process.poll() is None

    end = time.monotonic() + 20  # Until it runs another program than this one.
    while process.poll() is None and time.monotonic() < end:
        scenarios._send_all(set(arguments), signal.SIGKILL)
        time.sleep(0.05)

    assert process.wait(1) == -signal.SIGKILL


def test_a_fault_counts_from_the_first_merge_that_all_regions_have(tmp_path):
    begun = scenarios._Begun(tmp_path, 2)
    old = {"fragment": 0, "start_step": 2, "time": begun.launched - 1}
    for region, start_step in ((0, 4), (1, 6)):
        folder = tmp_path / f"region_{region}"
        folder.mkdir()
        new = {"fragment": 0, "start_step": start_step, "time": time.time()}
        (folder / "syncs.jsonl").write_text(f"{json.dumps(old)}\n{json.dumps(new)}\n")

    waiting = threading.Thread(target=begun.wait)
    waiting.start()
    time.sleep(0.3)
    assert not begun.path.exists()  # Only an earlier run had one.

    with (tmp_path / "region_1" / "syncs.jsonl").open("a") as file:
        file.write(json.dumps({**old, "start_step": 4, "time": time.time()}) + "\n")
    waiting.join(30)
    assert begun.path.exists()
    assert abs(begun.time - time.time()) < 30

    never = scenarios._Begun(tmp_path, 2)
    assert not begun.path.exists()

    never.ended.set()
    never.wait()
    assert never.time == float("inf")


@pytest.mark.slow
@pytest.mark.skipif(bool(netlab.missing()), reason="no network lab here")
@pytest.mark.parametrize("scenario", ["link", "cut"])
def test_a_real_fault_is_named(tmp_path, scenario):
    command = [
        sys.executable,
        "-m",
        "experiments.chaos",
        f"--scenario={scenario}",
        "--regions=3",
        "--at_s=15",
        "--fault_s=25",
        f"--workdir={tmp_path}",
        "--",
        "--preset=smoke",
        "--steps=220",
        "--step_seconds=0.4",
        "--eval_batches=6",
        "--eval_every=0",
        "--dead_after_s=5",
    ]

    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
