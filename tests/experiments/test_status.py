"""`experiments.status`: one screen of made-up folders and of a served process."""

import contextlib
import json
import os
import re
import socket

import pytest

from cocodc_jax.report.records import MetricsWriter
from cocodc_jax.run.live_metrics import LiveMetrics, serving
from cocodc_jax.run.resume import only_writer, owner_of, starting
from cocodc_jax.train.hooks import Clock
from experiments import status
from tests.waiting import at_once

NOW = 2_000_000_000.0


def train(step, **more):
    return {
        "kind": "train",
        "step": step,
        "tokens": 8 * step,
        "loss": 2.5,
        "loss_regions": [2.0, 3.0],
        "bytes_sent_per_region": 1000 * step,
    } | more


def sync(step):
    return {
        "kind": "sync",
        "step": step,
        "fragment": 0,
        "start_step": step - 2,
        "apply_step": step,
        "bytes": 100,
        "pseudo_gradient_norm": 1.0,
        "correction_ratio": None,
    }


EVAL = {
    "kind": "eval",
    "step": 20,
    "tokens": 160,
    "bytes_sent_per_region": 20_000,
    "eval_loss": 1.25,
    "eval_perplexity": 3.5,
    "eval_loss_outer": 1.25,
    "region_drift": 0.0,
}


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setattr(status.time, "time", lambda: NOW)


def make_run(folder, records=(), steps=20, regions=2, saved=None):
    """Write the files of a run that `status` reads, all of them a minute old."""
    with MetricsWriter(folder, mirrors=()) as writer:
        for record in records:
            writer.write(record)
            if record["kind"] == "train":
                writer.write_timing(record["step"], record["step"] / 2, 400.0, 0.25)

    config = {
        "preset": "smoke",
        "method": {"method": "diloco"},
        "run": {"steps": steps, "regions": regions},
    }
    (folder / "config.json").write_text(json.dumps(config))

    if saved:
        (folder / "checkpoints" / str(saved)).mkdir(parents=True)
        (folder / "checkpoints" / "5.orbax-checkpoint-tmp").mkdir()

    for path in folder.rglob("*"):
        os.utime(path, (NOW - 60, NOW - 60))
    return folder


def shown(capsys, *words, code=0, says=()):
    """Return the columns of each row by their names, and the lines below."""
    assert status.main(["status", *map(str, words)]) == code
    out, err = capsys.readouterr()
    assert all(word in line for word, line in zip(says, err.splitlines(), strict=True))

    _, *lines = out.splitlines()

    table, below = (
        [x for x in lines if x.startswith("fault: ") == b] for b in (False, True)
    )

    names, *rows = [re.split(r"\s{2,}", line) for line in table]
    return [dict(zip(names, row, strict=True)) for row in rows], below


def test_a_finished_run_is_shown_with_its_figures(tmp_path, capsys):
    records = [train(10), sync(12), train(20), sync(20), EVAL]
    run = make_run(tmp_path / "run", records, saved=20)
    (run / "summary.json").write_text(json.dumps({"steps": 20}))

    rows, below = shown(capsys, run)

    assert rows == [
        {
            "run": "run",
            "method": "diloco",
            "state": "finished",
            "step": "20 of 20",
            "loss": "2.500",
            "eval": "1.2500",
            "tokens/s": "400",
            "stall": "0.5 s",
            "sent": "20.0 kB",
            "syncs": "2",
            "checkpoint": "20, 1 min 00 s ago",
            "updated": "1 min 00 s ago",
        }
    ]
    assert not below


def test_a_killed_run_is_shown_as_stopped_and_a_live_one_as_running(tmp_path, capsys):
    run = make_run(tmp_path / "run", [train(5), train(10)], steps=30)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tr')  # As a kill cuts it.
    ((row,), _) = shown(capsys, run)
    assert (row["state"], row["step"]) == ("stopped", "10 of 30")
    assert "left" not in row

    with only_writer(run):
        ((row,), _) = shown(capsys, run)
        assert owner_of(run).startswith(f"process {os.getpid()} on ")

    assert (row["state"], row["left"]) == ("running", "10 s")  # 20 of half a second.
    with only_writer(run):  # Looking has not kept the lock.
        pass


def test_elastic_regions_have_a_row_each(tmp_path, capsys):
    for region in (0, 1, 10):
        run = make_run(tmp_path / f"region_{region}", [train(10)], regions=3)
        merges = [
            {"fragment": 0, "apply_step": step, "regions": regions}
            for step, regions in ((4, [0, 1, 10]), (6, None), (8, [0, 1]))
        ]
        text = "".join(json.dumps(line) + "\n" for line in merges)
        (run / "syncs.jsonl").write_text(text)

    faults = [
        ("begins", "slow", [1]),
        ("left", "left", [0]),  # And came back.
        ("begins", "gone", [10]),
        ("ends", "slow", [1]),
    ]
    with (tmp_path / "region_0" / "faults.jsonl").open("w") as file:
        for what, kind, where in faults:
            line = {"fault": what, "kind": kind, "where": where, "start_step": 8}
            file.write(json.dumps(line) + "\n")

    rows, below = shown(capsys, tmp_path)
    assert [row["run"] for row in rows] == ["region_0", "region_1", "region_10"]
    assert [row["missed"] for row in rows] == ["0", "0", "1"]
    assert [row["faults"] for row in rows] == ["1", "0", "0"]
    members = [row["members"] for row in rows]
    assert members == ["2 of 3", "2 of 3", "2 of 3, without it"]
    assert below == ["fault: region_0: gone 10, since step 8"]


def test_a_region_that_restarts_is_shown_as_restarting(tmp_path, capsys):
    """Its own records are of its former life; the others know the members."""
    runs = []
    for region, regions in ((0, [0]), (1, [0, 1])):
        run = make_run(tmp_path / f"region_{region}", [train(5), train(10)], regions=2)
        line = {"fragment": 0, "apply_step": 4, "regions": regions, "epoch": 3 - region}
        (run / "syncs.jsonl").write_text(json.dumps(line) + "\n")
        runs.append(run)

    with only_writer(runs[0]), only_writer(runs[1]), starting(runs[1]) as trains:
        rows, _ = shown(capsys, tmp_path)
        trains()
        later, _ = shown(capsys, tmp_path)

    assert [row["state"] for row in rows] == ["running", "restarting"]
    assert [row["left"] for row in rows] == ["5 s", "-"]
    assert [row["tokens/s"] for row in rows] == ["400", "-"]
    assert [row["members"] for row in rows] == ["1 of 2", "1 of 2, without it"]
    assert [row["state"] for row in later] == ["running", "running"]


def test_processes_of_a_run_and_a_narrow_terminal(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path / "run", [train(10)])
    make_run(run / "process_1", [train(10, loss=3.5)])
    rows, _ = shown(capsys, run)
    assert [(row["run"], row["loss"]) for row in rows] == [
        ("run", "2.500"),
        ("process_1", "3.500"),
    ]

    monkeypatch.setenv("COLUMNS", "80")
    assert status.main(["status", str(run)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["run", "run", "process_1"]
    assert ["loss", "2.500", "3.500"] in [line.split() for line in lines]
    assert max(map(len, lines)) < 80


def test_a_folder_of_runs_that_have_not_begun(tmp_path, capsys):
    for name in ("runs/b", "runs/a", "c"):
        make_run(tmp_path / name)
    rows, _ = shown(capsys, tmp_path)
    assert [row["run"] for row in rows] == ["c", "runs/a", "runs/b"]
    assert {(row["state"], row["step"]) for row in rows} == {("not begun", "0 of 20")}


def test_a_run_is_shown_by_the_address_of_its_metrics(capsys):
    live = LiveMetrics(100, lambda step: 8 * step, 3, now=lambda: NOW - 5)
    live.begin(0, (0, NOW - 100), saved_step=None)
    live.turn(Clock(10, 2.5, 6.0, 16.0, 1.0, 2, 4096))
    live.count("cocodc_syncs_total", "applied")
    live.fault("link", "0-2", True)

    with serving(0, live, {"region": "0", "process": "0"}) as (_, port):
        ((row,), below) = shown(capsys, f"localhost:{port}")
    expected = {
        "run": f"localhost:{port}",
        "state": "running",
        "step": "10 of 100",
        "loss": "2.500",
        "tokens/s": "16",
        "stall": "1.0 s",
        "sent": "4.10 kB",
        "syncs": "1",
        "missed": "0",
        "members": "3",
        "faults": "1",
        "updated": "5 s ago",
    }

    assert {name: row[name] for name in expected} == expected
    assert below == [f"fault: localhost:{port}: link 0-2"]


@pytest.mark.parametrize("content", ["{}", ""])
def test_a_run_that_cannot_be_read_hides_no_other(content, tmp_path, capsys):
    make_run(tmp_path / "good")
    path = make_run(tmp_path / "bad") / "config.json"
    path.write_text(content)

    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        rows, _ = shown(capsys, address, tmp_path, code=1, says=(address, str(path)))

    assert [(row["run"], row["state"]) for row in rows] == [
        (address, "no answer"),
        ("bad", "damaged"),
        ("good", "not begun"),
    ]


@pytest.mark.parametrize(
    "name",
    ["config.json", "metrics.jsonl", "timing.jsonl", "syncs.jsonl", "faults.jsonl"],
)
def test_a_pipe_in_a_folder_does_not_block(name, tmp_path, capsys):
    for region in (0, 1):
        run = make_run(tmp_path / f"region_{region}", [train(10)])
        (run / "syncs.jsonl").write_text('{"apply_step": 8, "regions": [0, 1]}\n')
    path = tmp_path / "region_0" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)

    with at_once(20):
        rows, _ = shown(
            capsys, tmp_path, code=1, says=(f"error: {path} is not a regular file",)
        )
    assert [row["state"] for row in rows] == ["damaged", "stopped"]
    assert rows[1]["members"] == "2 of 2"


def test_a_pipe_in_the_place_of_a_lock_is_no_lock(tmp_path, capsys):
    run = make_run(tmp_path / "run", [train(10)])
    os.mkfifo(run / ".lock")
    with at_once(20):
        ((row,), _) = shown(capsys, run)
    assert row["state"] == "stopped"


def test_a_folder_without_a_run_is_refused(tmp_path, refused):
    error = refused(status, tmp_path)
    assert error == f"'{tmp_path}' holds no run; name the folder of one"
    assert "name the folder of a run" in refused(status)
