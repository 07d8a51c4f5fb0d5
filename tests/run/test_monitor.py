"""Metrics and events of a run: fed by hand, scraped on loopback, and of a real run."""

import contextlib
import json
import pathlib
import re
import socket
import socketserver
import sys
import threading
import time
import urllib.request
from unittest import mock

import jax
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import cocodc_jax
from cocodc_jax.network.faults import Finding
from cocodc_jax.run import live_metrics, monitor
from cocodc_jax.run.config.presets import PRESETS
from cocodc_jax.run.live_metrics import COUNTER, METRICS, LiveMetrics, serving
from cocodc_jax.run.monitor import EVENTS, Event, Monitor, Monitoring, running
from cocodc_jax.run.preparing import prepare
from cocodc_jax.train.finite import NonFiniteLossError
from cocodc_jax.train.hooks import NO_HOOKS, Clock
from experiments import train

LABELS = {"region": "1", "process": "0"}
SYNC = {"kind": "sync", "step": 9, "start_step": 4, "apply_step": 9}


def scrape(live):
    """Return the samples by name and further labels, as a scrape gives them."""
    with serving(0, live, LABELS) as (_, port):
        return fetch(port)


def fetch(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as got:
        families = text_string_to_metric_families(got.read().decode())
    samples = {}
    for sample in (sample for family in families for sample in family.samples):
        further = {k: v for k, v in sample.labels.items() if k not in LABELS}
        assert sample.labels == LABELS | further
        samples[sample.name, *further.values()] = sample.value
    return samples


def live_at(times, **more):
    clock = iter(times)
    return LiveMetrics(100, lambda step: 8 * step, 3, now=lambda: next(clock), **more)


def test_turns_are_scraped():
    live = live_at([0.0, 7.0, 7.5, 10.0], peak_tokens_per_second=64.0)
    live.members = lambda: 2
    live.begin(step=20, began=(10, -190.0), saved_step=20)
    # 10 steps, 80 tokens, 5 s of which one was a stall: 0.4 s a step undisturbed.
    live.turn(Clock(30, 2.5, 6.0, 16.0, 1.0, 2, 4096))
    live.saving()

    metrics = scrape(live)
    assert metrics["cocodc_goodput_ratio",] == pytest.approx(20 * 0.4 / 200)
    expected = {
        "step": 30,
        "planned_steps": 100,
        "loss": 2.5,
        "tokens_per_second": 16,
        "mfu_ratio": 0.25,
        "fragments_in_flight": 2,
        "members": 2,
        "checkpoint_step": 30,
        "checkpoint_timestamp_seconds": 7.5,
        "progress_timestamp_seconds": 7,
        "stall_seconds_total": 1,
        "sent_bytes_total": 4096,
        "loss_spikes_total": 0,
    }
    assert {name: metrics[f"cocodc_{name}",] for name in expected} == expected


def test_before_the_first_turn_only_the_configuration_is_exposed():
    metrics = scrape(live_at([0.0, 1.0]))
    assert metrics["cocodc_planned_steps",] == 100
    assert ("cocodc_loss",) not in metrics
    assert ("cocodc_mfu_ratio",) not in metrics


@pytest.fixture
def watched():
    events = []
    live = LiveMetrics(100, lambda step: 8 * step, 3)
    run_monitor = Monitor(live, events.append, own_region=1, delay_steps=5)
    hooks = run_monitor.extend(NO_HOOKS, 0, began=(0, 0.0), saved_step=None)
    return run_monitor, hooks, events


def test_records_are_counted_and_are_events(watched):
    run_monitor, hooks, events = watched
    records = (
        SYNC,
        SYNC | {"apply_step": 10},  # Later than its slot.
        {"kind": "eval", "step": 9, "eval_loss": 1.5},
        {"kind": "spike", "step": 9, "region": 0, "loss": None, "usual": 2.0},
        SYNC | {"left_out": [0, 1, 2]},  # 2 is an outlier.
        SYNC | {"left_out": [0, 1, 0]},
        SYNC | {"left_out": [0, 0, 0]},
        SYNC | {"left_out": [0, 1, 0]},
    )
    for record in records:
        hooks.record(record)
    run_monitor.merged(True)
    run_monitor.merged(False)

    metrics = scrape(run_monitor.live)
    outcomes = [metrics["cocodc_syncs_total", x] for x in ("applied", "late", "missed")]
    assert outcomes == [6, 1, 1]
    assert metrics["cocodc_eval_loss",] == 1.5
    assert metrics["cocodc_loss_spikes_total",] == 1

    assert [(x.name, x.step, x.region) for x in events] == [
        ("loss_spike", 9, 1),
        ("non_finite", 9, 1),
        ("non_finite", 9, 1),
    ]


def test_faults_are_gauges_while_they_are_named(watched):
    run_monitor, _, events = watched
    link = Finding("link", (0, 2), 3.0, 0.5, 9.0)
    gone = Finding("gone", (2,), np.inf, 0.0, np.inf)
    run_monitor.fault(True, link, "link from region 0 to region 2")
    run_monitor.fault(True, gone, gone.explain())

    metrics = scrape(run_monitor.live)
    assert metrics["cocodc_fault", "link", "0-2"] == 1
    assert metrics["cocodc_faults_total", "gone"] == 1
    assert metrics["cocodc_faults_total", "slow"] == 0

    run_monitor.fault(False, gone, gone.explain())
    assert ("cocodc_fault", "gone", "2") not in scrape(run_monitor.live)
    assert [(x.name, x.region) for x in events] == [
        ("fault", None),
        ("region_lost", 2),
        ("region_returned", 2),
    ]


@pytest.fixture
def taken_port():
    with socket.socket() as listening:
        listening.bind(("", 0))
        listening.listen()
        yield listening.getsockname()[1]


@pytest.mark.parametrize("port", ["taken", 70_000])
def test_a_port_that_cannot_be_opened_is_named_in_one_line(port, taken_port):
    port = taken_port if port == "taken" else port

    with (
        pytest.raises(OSError, match=f"port {port}: .*; name a free one"),
        serving(port, live_at([0.0]), LABELS),
    ):
        pass


def test_connections_that_are_held_open_take_no_descriptors(monkeypatch):
    monkeypatch.setattr(live_metrics, "_TIMEOUT_S", 0.3)
    descriptors = pathlib.Path("/proc/self/fd")
    with serving(0, live_at([0.0]), LABELS) as (_, port), contextlib.ExitStack() as all:
        before = len(list(descriptors.iterdir()))
        address = ("127.0.0.1", port)

        held = [all.enter_context(socket.create_connection(address)) for _ in range(5)]
        assert len(list(descriptors.iterdir())) <= before + len(held) + 1

        for connection in held:  # The server gives them up one after another.
            connection.settimeout(60)
            assert connection.recv(1) == b""


class TestCommands:
    def run(self, command, events, tmp_path, **settings):
        with running(command, str(tmp_path), **settings) as notify:
            for event in events:
                notify(event)

    def test_the_event_is_on_standard_input_and_in_the_environment(self, tmp_path):
        command = f"cat >> {tmp_path}/in; env > {tmp_path}/env; echo >> {tmp_path}/in"
        events = [Event("fault", "a 'line'", 3, 1), Event("finished", "done", 4)]
        self.run(command, events, tmp_path)
        lines = [json.loads(x) for x in (tmp_path / "in").read_text().splitlines()]
        assert [x["event"] for x in lines] == ["fault", "finished"]
        assert lines[0]["message"] == "a 'line'"
        assert [(x["step"], x["region"]) for x in lines] == [(3, 1), (4, None)]

        env = (tmp_path / "env").read_text()
        last = dict(x.split("=", 1) for x in env.splitlines() if "COCODC" in x)
        last.pop("COCODC_WORKDIR")
        assert sorted(last.items()) == [
            ("COCODC_EVENT", "finished"),
            ("COCODC_MESSAGE", "done"),
            ("COCODC_REGION", ""),
            ("COCODC_STEP", "4"),
        ]

    @pytest.mark.parametrize(
        ("command", "line"),
        [
            ("echo no route >&2; exit 3", "finished: exit code 3 (no route)"),
            ("sleep 1000 & wait", "finished: killed after 0.2 s"),
            ("no-such-command", "finished: exit code 127"),
        ],
    )
    def test_failures_of_a_command_are_one_line(self, command, line, tmp_path, capfd):
        self.run(command, [Event("finished", "done")], tmp_path, timeout_s=0.2)
        warning = capfd.readouterr().err
        assert warning.startswith(f"warning: --on_event: {line}")
        assert warning.count("\n") == 1

    def test_a_flood_of_events_is_dropped_without_waiting(self, tmp_path, capfd):
        """The commands wait for a file that the test writes."""
        gate = tmp_path / "gate"
        command = f"while [ ! -e {gate} ]; do sleep 0.01; done"

        with running(command, str(tmp_path)) as notify:
            for i in range(40):
                notify(Event("fault", f"number {i}"))
            gate.touch()

        warnings = capfd.readouterr().err.splitlines()
        assert 7 <= len(warnings) <= 8
        assert all("32 events wait; fault is dropped (number" in x for x in warnings)

    def test_without_a_command_events_are_ignored(self):
        live = live_at([0.0])
        with Monitoring().watching(live, "run", [0], None, None) as monitor:
            monitor.notify("fault", "x")


@pytest.mark.parametrize(
    ("error", "name"),
    [(NonFiniteLossError("nan"), "non_finite"), (OSError("disk"), "failed")],
)
def test_an_error_that_ends_a_run_is_an_event(error, name, tmp_path):
    monitoring = Monitoring(on_event=f"echo $COCODC_EVENT > {tmp_path}/event")
    with (
        pytest.raises(type(error)),
        monitoring.watching(live_at([0.0]), "run", [0], None, None),
    ):
        raise error
    assert (tmp_path / "event").read_text().strip() == name
    assert name in EVENTS


@pytest.mark.parametrize(("own_region", "port"), [(None, 9101), (2, 9105)])
def test_every_process_has_its_own_port(own_region, port, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    served = []

    @contextlib.contextmanager
    def serving(*arguments):
        served.append(arguments)
        yield "host", arguments[0]

    monkeypatch.setattr(monitor, "serving", serving)
    live = live_at([0.0])
    with Monitoring(9100).watching(live, "run", [4, 5], own_region, None):
        assert served == [(port, live, {"region": "4,5", "process": "1"})]


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--metrics_port=-1", "--metrics_port=-1 must be a port, at most 65535"),
        ("--metrics_port=9100", "--metrics_port=9100 needs a package that is not"),
    ],
)
def test_wrong_flags_are_refused_in_a_line(flag, line, refused, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    workdir = tmp_path / "run"
    error = refused(train, "--preset=smoke", f"--workdir={workdir}", flag)
    assert error.startswith(line)
    assert not workdir.exists()


def test_names_follow_the_conventions_of_prometheus():
    for metric in METRICS:
        assert re.fullmatch(r"cocodc_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == COUNTER)


SCRAPES = """
import urllib.request
text = urllib.request.urlopen("http://127.0.0.1:{port}/metrics", timeout=60).read()
open({path!r}, "wb").write(text)
"""


def test_a_run_is_scraped_by_its_own_command(tmp_path):
    """The last event's command finds the metrics of the last step still served."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    script = tmp_path / "scrape.py"
    page = tmp_path / "page"
    script.write_text(SCRAPES.format(port=port, path=str(page)))

    text = pathlib.Path(cocodc_jax.__file__).parent / "run"
    config = PRESETS["smoke"].replace(
        data_dir=str(tmp_path),
        dataset=f"text:{text}",
        steps=8,
        regions=2,
        num_layers=1,
        method="diloco",
        sync_interval=2,
    )
    monitoring = Monitoring(port, f"{sys.executable} {script}")
    summary = prepare(config, tmp_path / "run", monitoring=monitoring).train()

    labels = 'process="0",region="0,1"'
    lines = dict(x.rsplit(" ", 1) for x in page.read_text().splitlines() if x[0] != "#")

    assert float(lines[f"cocodc_step{{{labels}}}"]) == 8
    assert float(lines[f"cocodc_checkpoint_step{{{labels}}}"]) == 8
    assert float(lines[f"cocodc_eval_loss{{{labels}}}"]) == summary["eval_loss"]
    sent = float(lines[f"cocodc_sent_bytes_total{{{labels}}}"])
    assert sent == summary["bytes_sent_per_region"]
    for metric in METRICS:
        assert f"# HELP {metric.name}" in page.read_text()


@pytest.mark.parametrize(
    ("took_s", "rest_s"), [(0.0, 0.01), (0.001, 0.019), (0.02, 0.38), (5.0, 2.0)]
)
def test_after_a_request_the_server_rests(monkeypatch, took_s, rest_s):
    """Nineteen times as long as it took, so a hundred are answered in a second."""
    rests = []
    clock = mock.Mock(thread_time=mock.Mock(side_effect=[3.0, 3.0 + took_s]))
    clock.sleep = rests.append
    monkeypatch.setattr(live_metrics, "time", clock)
    monkeypatch.setattr(socketserver.TCPServer, "process_request", lambda *_: None)
    server = object.__new__(live_metrics._Server)
    server.process_request(None, None)
    assert rests == [pytest.approx(rest_s)]


def test_a_flood_of_requests_takes_a_twentieth_of_the_time():
    """Each of them keeps a processor busy for 20 ms."""

    class Busy:
        def values(self):
            end = time.thread_time() + 0.02
            while time.thread_time() < end:
                pass
            return {}

    ends = time.monotonic() + 2
    answered = []

    def ask():
        while time.monotonic() < ends:
            with contextlib.suppress(OSError):
                answered.append(fetch(port))

    with serving(0, Busy(), LABELS) as (_, port):
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # One in 0.4 s, and those that wait at the end.
    assert 1 <= len(answered) <= 12


def test_a_run_that_was_asked_to_stop_waits_for_its_command_a_moment(
    monkeypatch, tmp_path, capfd
):
    monkeypatch.setattr(monitor, "_STOPPED_S", 0.3)
    begin_s = time.monotonic()
    with running("sleep 30", str(tmp_path), timeout_s=20) as notify:
        notify(Event("stopped", "asked to stop"))
    assert time.monotonic() - begin_s < 10
    assert "the program ends without them" in capfd.readouterr().err
