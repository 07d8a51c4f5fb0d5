"""`experiments.compare_networks`: its commands, figures from files, and results."""

import dataclasses
import functools
import json
import math
import sys
import unittest.mock

import pytest
from absl.flags import FlagValues

import cocodc_jax as cc
from cocodc_jax import methods
from cocodc_jax.netlab import region
from cocodc_jax.network.collectives import collective_cost
from cocodc_jax.network.timeline import SyncRecord, Timeline
from cocodc_jax.run import timeline
from experiments import compare_networks
from experiments.networks import lab_run, report
from experiments.networks.lab_run import LabRunError, Measured, Pace, Stretch

LACKS = region.missing()
needs_lab = pytest.mark.skipif(bool(LACKS), reason=f"no lab: {'; '.join(LACKS)}")


def test_a_bandwidth_names_a_network_of_equal_links():
    network = lab_run.network("100", 4)
    assert network.flags == ("--regions=4", "--bandwidth_mbit=100", "--latency_ms=50")

    link = network.topology.links[0][1]
    # Packets of a millisecond, 12,500 bytes, of which 52 are headers.
    assert (link.bandwidth_gbps, link.latency_s) == (0.1 * (1 - 52 / 12_500), 0.05)


def test_named_networks_have_their_links():
    unequal = lab_run.network("unequal", 4)
    near = unequal.topology.links[0][1]
    far = unequal.topology.links[3][0]
    assert (near.latency_s, far.latency_s) == (0.02, 0.08)
    assert near.bandwidth_gbps == pytest.approx(4 * far.bandwidth_gbps)

    wide = lab_run.network("wide", 3)
    assert wide.flags == ("--regions=3", "--bandwidth_mbit=10000", "--latency_ms=50")


def test_a_file_is_a_network(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("{regions: [a, b], default: {bandwidth_gbps: 1, latency_ms: 3}}")

    mine = lab_run.network(str(path), 2)

    assert (mine.name, mine.flags) == ("mine", (f"--links={path}",))


@pytest.mark.parametrize(
    ("text", "regions", "message"),
    [
        ("0", 4, "'0' is not a network .*bandwidth"),
        ("/no/such", 4, "'/no/such' is not a network .*No such file"),
        ("unequal", 3, "'unequal' has 4 regions, but the run has regions=3"),
    ],
)
def test_invalid_networks_are_refused(text, regions, message):
    with pytest.raises(ValueError, match=message):
        lab_run.network(text, regions)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("diloco", {"sync_interval": 40}, (80, 240)),
        ("cocodc", {"sync_interval": 40, "delay_steps": 5}, (85, 245)),
        ("data_parallel", {}, (10, 30)),
        ("apart", {}, (50, 150)),
    ],
)
def test_measured_steps_are_full_intervals_after_compilation(name, arguments, expected):
    stretch = lab_run.stretch(cc.methods.get(name, **arguments), 10, 4)
    assert (stretch.first_step, stretch.last_step) == expected


def sync(fragment, start, merge, start_s, arrival_s, stall_s):
    return SyncRecord(
        (fragment,),
        start,
        merge,
        start_s,
        arrival_s,
        arrival_s,
        (stall_s + 0.5, stall_s - 0.5),
        (64.0,) * 2,
    )


# Two regions; 1 s a step, and 3 s and 1 s of waiting after steps 4 and 8.
TIMELINE = Timeline(
    regions=("a", "b"),
    syncs=(
        sync(0, 2, 4, 2.0, 7.0, 3.0),
        sync(1, 6, 8, 9.0, 12.0, 1.0),
        sync(0, 10, 10, 14.0, 20.0, 6.0),
    ),
    num_steps=10,
    step_time_s=(1.0, 1.0),
    marks=((0, (0.0, 0.0)), (4, (7.0, 7.5)), (8, (12.0, 12.0)), (10, (14.0, 14.5))),
    stall_s=(4.0, 4.0),
    bytes_sent=(192.0, 192.0),
)


def test_pace_by_hand():
    assert lab_run.pace(TIMELINE) == Pace(step_s=1.45, stall_s=40.0, sync_s=4.0)
    # From step 4 on: 7 s for 6 steps; one sync. The last one starts at the end.
    late = lab_run.pace(TIMELINE, 4)
    assert late.step_s == pytest.approx(7 / 6)
    assert late.stall_s == pytest.approx(100 / 6)
    assert late.sync_s == 3.0
    quiet = dataclasses.replace(TIMELINE, syncs=())
    assert lab_run.pace(quiet) == Pace(1.45, stall_s=None, sync_s=None)


def made_up(folder, marks, syncs, sent, steps):
    """The files of a run of two processes."""
    for name in ("run", "run/process_1", "net"):
        (folder / name).mkdir(parents=True)

    timeline = {"marks": marks, "syncs": syncs}
    for name in ("run", "run/process_1"):
        (folder / name / "timeline.json").write_text(json.dumps(timeline))

    summary = {"bytes_sent_per_region": sent, "steps": steps}
    (folder / "run" / "summary.json").write_text(json.dumps(summary))
    traffic = {"sent_bytes": [[0, 70], [90, 0]]}
    (folder / "net" / "traffic.json").write_text(json.dumps(traffic))


def test_measurements_are_read_from_the_files_of_a_run(tmp_path, recorded_sync):
    syncs = [
        recorded_sync(1, 2, 4, 1.0, 3.0, 3.0, 0.5) | {"num_bytes": 48},
        recorded_sync(0, 4, 6, 3.0, 4.0, 4.0, 0.5) | {"num_bytes": 64},
    ]
    made_up(tmp_path, [[2, 1.0], [4, 3.0], [6, 6.0]], syncs, 112, 6)
    measured = lab_run.read(tmp_path, Stretch(4, 6))
    assert measured == Measured(
        Pace(1.5, stall_s=25.0, sync_s=1.0),
        region_step_s=(1.5, 1.5),
        fragment_bytes=(64.0, 48.0),
        sent_bytes=112,
        relayed_bytes=90,
    )
    value = json.loads(json.dumps(dataclasses.asdict(measured)))
    assert Measured.from_json(value) == measured

    with pytest.raises(LabRunError, match="fewer than two marks after step 5"):
        lab_run.read(tmp_path, Stretch(5, 6))


def test_a_method_that_sends_at_every_step_has_one_message(tmp_path):
    made_up(tmp_path, [[2, 1.0], [4, 3.0]], [], 400, 4)
    measured = lab_run.read(tmp_path, Stretch(2, 4))
    assert measured.fragment_bytes == (100.0,)
    assert measured.pace == Pace(1.0, stall_s=None, sync_s=None)


RATE = 12.5e6 * (1 - 52 / 12_500)  # bytes a second of 100 Mbit/s, less headers
ALONE = Measured(
    Pace(0.25, stall_s=None, sync_s=None),
    region_step_s=(0.25,) * 2,
    fragment_bytes=(),
    sent_bytes=0,
    relayed_bytes=500_000,
)
FOUR = lab_run.network("100", 4)


def of_four(method, stretch, fragment_bytes, collective="direct"):
    """Return the prediction for four regions of 0.25 s a step, and the bytes sent."""
    run = dataclasses.replace(ALONE, fragment_bytes=fragment_bytes)
    return lab_run.predict(FOUR, method, stretch, run, (0.25,) * 4, collective)


def exchange_s(num_bytes, collective="direct"):
    return collective_cost(FOUR.topology.at(), collective, num_bytes).seconds


def test_simulated_blocking_sync_by_hand():
    """The exchange takes its own time ten times in 100 steps."""
    method = methods.get("diloco", sync_interval=10)
    stretch = Stretch(10, 50)
    pace, sent = of_four(method, stretch, (10e6,))
    sync_s = exchange_s(10e6)
    assert 2 * (0.1 + 7.5e6 / RATE) < sync_s < 2 * (0.1 + 15e6 / RATE)
    assert pace.sync_s == pytest.approx(sync_s)
    assert pace.stall_s == pytest.approx(10 * sync_s)
    assert pace.step_s == pytest.approx(0.25 + sync_s / 10)
    assert sent == 5 * 1.5 * 10e6

    ring, _ = of_four(method, stretch, (10e6,), "ring")
    assert ring.sync_s == pytest.approx(exchange_s(10e6, "gloo"))


def test_simulated_delay_hides_a_sync_that_is_shorter():
    method = methods.get(
        "streaming_diloco", sync_interval=40, num_fragments=4, delay_steps=5
    )
    pace, _ = of_four(method, Stretch(45, 205), (1e6,) * 4)
    assert pace.step_s == pytest.approx(0.25)
    assert pace.stall_s == 0
    assert pace.sync_s == pytest.approx(exchange_s(1e6))


def test_host_bandwidth_explains_steps_that_took_longer_than_expected():
    run = Measured(
        Pace(0.3, stall_s=None, sync_s=None),
        region_step_s=(0.3,) * 2,
        fragment_bytes=(1e6,),
        sent_bytes=0,
        relayed_bytes=0,
    )
    expected = Pace(0.25, stall_s=0.1, sync_s=0.2)
    assert lab_run.host_bytes_per_s(run, expected) == pytest.approx(20e6)
    slower = Pace(0.31, stall_s=0.1, sync_s=0.2)
    assert lab_run.host_bytes_per_s(run, slower) == math.inf

    method = methods.get("diloco", sync_interval=10)
    predict = functools.partial(
        lab_run.predict,
        network=lab_run.network("100", 2),
        method=method,
        stretch=Stretch(10, 50),
        run=run,
        step_s=(0.25,) * 2,
        all_reduce="direct",
    )

    without, _ = predict()
    pace, _ = predict(host_bytes_per_s=20e6)
    assert pace.sync_s == pytest.approx(without.sync_s + 0.05)
    assert pace.step_s == pytest.approx(without.step_s + 0.05 / 10)


def test_the_simulator_has_the_slots_that_a_method_has():
    network = lab_run.network("1000", 2)
    run = Measured(
        ALONE.pace,
        region_step_s=(),
        fragment_bytes=(1e5,) * 4,
        sent_bytes=0,
        relayed_bytes=0,
    )
    stretch = Stretch(40, 80)

    method = methods.get("cocodc", sync_interval=40)
    with_slots, sent = lab_run.predict(
        network, method, stretch, run, (0.25,) * 2, "direct"
    )
    assert sent == 16 * 1e5  # 2 K an interval, of which the last has just left.
    assert with_slots.step_s == pytest.approx(0.25)

    measured = methods.get(
        "cocodc", sync_interval=40, delay_steps="auto", syncs_per_interval="auto"
    )
    pace, _ = lab_run.predict(network, measured, stretch, run, (0.25,) * 2, "direct")
    assert pace.sync_s == pytest.approx(with_slots.sync_s)


def test_compressed_messages_are_gathered():
    method = methods.get("diloco", sync_interval=10, compress="int8")
    pace, _ = of_four(method, Stretch(10, 50), (1e6,))
    assert pace.sync_s == pytest.approx(exchange_s(1e6, "direct_gather"))


def rows():
    run = Measured(
        Pace(0.5, stall_s=10.0, sync_s=1.5),
        region_step_s=(0.5,) * 2,
        fragment_bytes=(64.0,),
        sent_bytes=1000,
        relayed_bytes=2_000_000,
    )
    every = Measured(
        Pace(2.5, stall_s=None, sync_s=None),
        region_step_s=(2.5,) * 2,
        fragment_bytes=(64.0,),
        sent_bytes=1000,
        relayed_bytes=2_000_000,
    )
    return [
        report.row(
            "100", "diloco", run, Pace(0.4, stall_s=5.0, sync_s=1.2), 1.2e6, ALONE
        ),
        report.row(
            "100",
            "data_parallel",
            every,
            Pace(2.0, stall_s=70.0, sync_s=1.0),
            1e6,
            ALONE,
        ),
        report.failure("20", "diloco", LabRunError("exit code 1: no room")),
    ]


def test_rows_compare_measured_and_simulated():
    first, every, failed = rows()
    assert (first["measured"]["slowdown"], first["simulated"]["slowdown"]) == (2, 1.6)
    ratios = first["simulated_over_measured"]
    assert ratios == {"step_s": 0.8, "stall_s": 0.5, "sync_s": pytest.approx(0.8)}
    assert every["simulated_over_measured"]["sync_s"] is None

    # Steps of 2.5 s instead of 0.25.
    assert every["measured"]["stall_s"] == pytest.approx(225)
    assert every["simulated_over_measured"]["stall_s"] == pytest.approx(70 / 225)

    assert "error" in failed
    assert json.loads(json.dumps(rows())) == rows()


def test_markdown_and_terminal_tables_have_the_same_rows():
    text = report.markdown(rows(), ALONE, "python -m this")
    assert text.startswith("Without a network: 0.250 s per step, and 500 kB relayed")

    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {len(report.HEADS) + 1}
    assert "| 100 | diloco | 0.500 | 2.00 | 1.60 | 0.80 | 10.00 | 5.00 | 0.50 |" in text
    assert "| 1.00 kB | 1.50 MB | 0.80 |" in text

    assert "Failed: 20, diloco: exit code 1: no room" in text
    assert text.endswith("    python -m this\n")
    assert report.table(rows()).row_count == 3


def test_bars_are_as_high_as_the_slowdowns_and_failures_have_none():
    (axes,) = report.slowdowns(rows()).axes
    tops = [bar.get_y() + bar.get_height() for bar in axes.patches if bar.get_width()]
    assert [top for top in tops if top] == pytest.approx([2.0, 1.6, 10.0, 8.0])
    assert [text.get_text() for text in axes.get_xticklabels()] == ["100 Mbit/s"]


# JAX, where another test has begun to use it in this process.
@pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called")
def test_a_result_is_read_again_and_a_failure_shows_its_last_line(tmp_path):
    folder = tmp_path / "case"
    stretch = Stretch(2, 4)
    (tmp_path / "made_up.py").write_text(f"""
import json, pathlib, sys
sys.path.insert(0, {str(tmp_path)!r})
folder = pathlib.Path({str(folder)!r})
for name in ("run", "net"):
    (folder / name).mkdir()
marks = [[2, 1.0], [4, 3.0]]
(folder / "run/timeline.json").write_text(json.dumps(dict(marks=marks, syncs=[])))
(folder / "run/summary.json").write_text('{{"bytes_sent_per_region": 8, "steps": 4}}')
(folder / "net/traffic.json").write_text('{{"sent_bytes": [[0]]}}')
""")
    good = [sys.executable, "-S", str(tmp_path / "made_up.py")]
    bad = [sys.executable, "-S", "-c", "raise OSError('no room')"]

    with pytest.raises(LabRunError, match="exit code 1: OSError: no room"):
        lab_run.measured(bad, folder, stretch, 60)

    measured = lab_run.measured(good, folder, stretch, 60)
    assert measured.pace.step_s == 1.0

    (tmp_path / "made_up.py").unlink()  # From here on only its result exists.
    assert lab_run.measured(good, folder, stretch, 60) == measured

    with pytest.raises(ValueError, match="result of another command"):
        lab_run.measured(bad, folder, stretch, 60)
    with pytest.raises(ValueError, match="over links that their file has no more"):
        lab_run.measured(good, folder, stretch, 60, links="{regions: [a, b]}")

    slow = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    with pytest.raises(LabRunError, match="not done after 0.2 s"):
        lab_run.measured(slow, tmp_path / "slow", stretch, 0.2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "workdir=None is missing"),
        ("--workdir={} --methods=snoo", "methods=snoo cannot be run by several"),
        ("--workdir={} --methods=multi_ring", "its rings use the inner mesh"),
        ("--workdir={} --networks=20,20", "networks=20,20 must be names"),
        ("--workdir={} --intervals=0", "--intervals=0 must be at least 1"),
        # Flags of training.
        ("--workdir={} -- --workdir=x", "workdir=x is set for each run"),
        ("--workdir={} -- --region_id=1", "region_id=1 is set for each run"),
        ("--workdir={} -- --regions=1", "--regions=1 has no network; use 2 or more"),
        ("--workdir={} -- --steps=9", "Unknown command line flag 'steps'"),
        ("--workdir={} -- --rank=9", "rank=9 has no meaning for"),
        ("--workdir={} -- --slow_beta=0.5", "slow_beta=0.5 has no "),
    ],
)
def test_bad_flags_are_refused_before_anything_runs(tmp_path, refused, words, message):
    words = words.format(tmp_path / "new").split()
    assert message in refused(compare_networks, *words)
    assert not (tmp_path / "new").exists()


def test_the_run_without_a_network_is_not_compressed(monkeypatch, tmp_path):
    """Without a network nothing is sent; hosts are timed by uncompressed messages."""
    monkeypatch.setattr(compare_networks.flags, "FLAGS", FlagValues())
    asked = []

    def measured(command, *_):
        asked.append([word for word in command if "compress" in word])
        raise compare_networks.LabRunError("not here")

    monkeypatch.setattr(compare_networks.lab_run, "measured", measured)
    values = compare_networks.define_flags()
    words = f"x --workdir={tmp_path} --networks=20 --methods=streaming_diloco --"
    train = values([*words.split(), "--preset=smoke", "--compress=ef+int4"])[1:]
    apart, _, job = compare_networks.read_jobs(values, train)

    with pytest.raises(compare_networks.LabRunError):
        apart.measured()
    job.row(alone=None, host_bytes_per_s=1e9)
    assert asked == [[], ["--compress=ef+int4"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--networks=20,30 --", r"30/diloco holds the result of another command"),
        ("--networks={}/wide.yaml --", "networks=wide is the network that others"),
        (
            "--networks=wide -- --compress=int8",
            "networks=wide is the network that others",
        ),
        ("--networks=20 --limit_s=inf --", "limit_s=inf must be at most"),
    ],
)
def test_folders_of_other_runs_are_refused_before_anything_runs(
    refused, tmp_path, words, message
):
    (tmp_path / "wide.yaml").write_text(
        "{regions: [a, b], default: {bandwidth_gbps: 1, latency_ms: 10}}"
    )
    done = tmp_path / "30" / "diloco" / lab_run.RESULT
    done.parent.mkdir(parents=True)
    done.write_text(json.dumps({"command": ["other"], "measured": {}}))

    words = [
        f"--workdir={tmp_path}",
        "--methods=data_parallel,diloco",
        *words.format(tmp_path).split(),
        "--preset=smoke",
        "--regions=2",
    ]
    assert message in refused(compare_networks, *words)


def test_a_stopped_command_ends_with_the_code_of_a_stop(call, monkeypatch, tmp_path):
    stopped = unittest.mock.Mock(side_effect=lab_run.StoppedError)
    monkeypatch.setattr(compare_networks, "run", stopped)
    monkeypatch.setattr(region, "missing", list)
    words = f"--workdir={tmp_path} --networks=20 -- --preset=smoke"
    assert "the same command" in call(compare_networks, *words.split(), code=75)[1]


@needs_lab
@pytest.mark.slow
def test_two_methods_are_measured_over_one_network(command, corpus, tmp_path):
    flags = (
        f"--workdir={tmp_path}",
        "--networks=100",
        "--methods=diloco,streaming_diloco",
        "--intervals=1",
        "--",
        "--preset=smoke",
        "--regions=2",
        "--log_every=4",
        "--sync_interval=8",
        "--num_fragments=2",
        "--step_seconds=0.2",
        *corpus,
    )

    def finish():
        process = command("experiments.compare_networks", *flags)
        out, error = process.communicate(timeout=900)
        assert process.returncode == 0, error
        return out, json.loads((tmp_path / "networks.json").read_text())

    out, table = finish()
    assert "streaming_diloco" in out
    # No step is faster than its pace; how much slower depends on the machine.
    assert table["apart"]["pace"]["step_s"] > 0.199

    blocking, streaming = table["rows"]
    assert len(blocking["fragment_bytes"]) == 1
    assert sum(streaming["fragment_bytes"]) == blocking["fragment_bytes"][0]
    assert blocking["measured"]["stall_s"] > 0

    # A round trip of 0.1 s: no sync is shorter, measured or simulated.
    for row in table["rows"]:
        assert row["measured"]["sync_s"] > 0.1
        assert row["simulated"]["sync_s"] > 0.1
        assert row["sent_bytes"] < row["relayed_bytes"]

    # On a machine with time to spare; tests/experiments/test_gpu.py is stricter.
    measured = timeline.read(tmp_path / "100" / "streaming_diloco" / "run", 21)
    beside, alone = timeline.step_s_in_flight(measured)
    assert 0.199 < beside < 1.1 * alone
    assert (tmp_path / "networks.png").read_bytes().startswith(b"\x89PNG")
    assert finish()[1] == table  # Every result exists.
