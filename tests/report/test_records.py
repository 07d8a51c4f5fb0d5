"""Records of a run: deterministic, exact, and safe to cut and continue."""

import json
import os

import numpy as np
import pytest
from tensorboardX.event_file_writer import _EventLoggerThread
from tensorboardX.proto import event_pb2

from cocodc_jax.files import NoRegularFileError, UnwritableError
from cocodc_jax.report.comparison import DamagedRunError, load_run
from cocodc_jax.report.records import (
    MetricsWriter,
    Mirror,
    bytes_until,
    read_records,
    tensorboard,
)
from tests.waiting import at_once

EVAL = {
    "kind": "eval",
    "step": 4,
    "tokens": 64,
    "bytes_sent_per_region": 128,
    "eval_loss": 1.5,
    "eval_perplexity": 4.48,
    "eval_loss_outer": 1.6,
    "region_drift": 0.1,
}


def train(step, loss=2.0):
    return {
        "kind": "train",
        "step": step,
        "tokens": 16 * step,
        "loss": loss,
        "loss_regions": [loss, loss],
        "bytes_sent_per_region": 0,
    }


def write(workdir, records, offset=None):
    with MetricsWriter(workdir, offset) as writer:
        for record in records:
            writer.write(record)
        return writer.offset


def test_floats_come_back_exactly(tmp_path):
    values = [float(np.float32(0.1)), 1 / 3, 1e-38]
    write(tmp_path, [train(i + 1, value) for i, value in enumerate(values)])
    losses = [record["loss"] for record in read_records(tmp_path / "metrics.jsonl")]
    assert losses == values
    assert np.float32(losses[0]) == np.float32(0.1)


def test_records_of_a_resumed_run_equal_those_of_an_unbroken_one(tmp_path):
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    records = [train(1), train(2), EVAL, train(5)]
    write(whole, records)
    offset = write(broken, records[:2])
    write(broken, [train(3, 9.9)], offset)  # Done, then lost with its process.

    with (broken / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "tra')  # A line that a kill cut off.
    write(broken, records[2:], offset)
    one, other = ((d / "metrics.jsonl").read_bytes() for d in (whole, broken))
    assert one == other


def test_a_new_run_drops_older_records(tmp_path):
    write(tmp_path, [train(1), train(2)])
    write(tmp_path, [train(7)])
    assert [r["step"] for r in read_records(tmp_path / "metrics.jsonl")] == [7]


def test_an_unfinished_last_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')

    assert read_records(path) == [{"step": 1}]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ('{"step": 1\n{"step": 2}\n', 1),
        ('{"step": 1}\n{}\n', 2),
        ('{"step": 1}\n[2]\n', 2),
        ('{"step": 1}\n{"step": "2"}\n', 2),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path, text, number):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)

    with pytest.raises(ValueError, match=f"line {number} is no record"):
        read_records(path)


def test_records_are_measured_up_to_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert bytes_until(path, 3) == 0
    offset = write(tmp_path, [train(1), train(3)])
    write(tmp_path, [train(4)], offset)
    assert bytes_until(path, 3) == offset
    assert bytes_until(path, 9) == path.stat().st_size
    assert bytes_until(path, 0) == 0


@pytest.mark.parametrize("offset", [1, 10_000])
def test_an_offset_that_is_no_record_end_is_refused(tmp_path, offset):
    write(tmp_path, [train(1)])
    with pytest.raises(ValueError, match=f"resume_offset={offset} is not the end"):
        MetricsWriter(tmp_path, offset)


@pytest.mark.parametrize("records", [[EVAL, train(6)], [train(6)], []])
def test_a_run_without_its_last_records_is_damaged(tmp_path, records):
    """Full lines were cut, so that the rest can be read."""
    summary = {"method": "diloco", "seed": 0, "steps": 8, "eval_loss": 1.5}
    (tmp_path / "summary.json").write_text(json.dumps(summary))

    def write(records):
        lines = [json.dumps(record) + "\n" for record in records]
        (tmp_path / "metrics.jsonl").write_text("".join(lines))

    whole = [EVAL, train(6), EVAL | {"step": 8}]
    write(whole)
    assert load_run(tmp_path).records == whole

    write(records)
    with pytest.raises(DamagedRunError, match="metrics.jsonl ends with the evaluation"):
        load_run(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_records_that_are_not_finite_are_refused(tmp_path, value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(tmp_path, [EVAL | {"eval_loss": value}])
    assert read_records(tmp_path / "metrics.jsonl") == []


def test_a_missing_quantity_is_none(tmp_path):
    write(tmp_path, [EVAL | {"eval_loss_outer": None}])
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert record["eval_loss_outer"] is None


def test_the_clock_has_a_file_of_its_own_that_only_grows(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(train(1))
        writer.write_timing(1, wall_s=0.5, tokens_per_second=100.0, stall_s=0.0)
        offset = writer.offset
    with MetricsWriter(tmp_path, offset) as writer:
        writer.write_timing(2, wall_s=0.1, tokens_per_second=90.0, stall_s=0.2)
    assert [r["step"] for r in read_records(tmp_path / "timing.jsonl")] == [1, 2]
    assert "wall_s" not in (tmp_path / "metrics.jsonl").read_text()


def test_tensorboard_events_hold_the_numbers(tmp_path):
    write(tmp_path, [train(3, 1.25), EVAL])
    (path,) = (tmp_path / "tb").glob("events.out.tfevents.*")
    numbers = {
        (value.tag, event.step): value.simple_value
        for event in tf_events(path.read_bytes())
        for value in event.summary.value
    }
    assert 1.25 in numbers.values()
    assert 1.5 in numbers.values()
    assert {step for _, step in numbers} == {3, 4}

    again = tensorboard(tmp_path)  # No record was kept: those of the file are hidden.
    again.close()
    files = (tmp_path / "tb").iterdir()
    starts = [
        e for x in files for e in tf_events(x.read_bytes()) if e.session_log.status
    ]
    assert [event.step for event in starts] == [0]


def tf_events(data):
    """A reader of TFRecord framing: length, its checksum, data, its checksum."""
    while data:
        length = int.from_bytes(data[:8], "little")
        yield event_pb2.Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


@pytest.fixture
def full_mirror():
    """A mirror on a full disk."""

    def full(*_):
        raise OSError("full")

    return Mirror(full, full)


def test_a_full_disk_does_not_hide_the_error_that_ended_a_run(tmp_path, full_mirror):
    writer = MetricsWriter(tmp_path, None, [lambda *_: full_mirror])
    with pytest.raises(KeyError), writer:
        raise KeyError


def test_a_full_disk_raises_at_the_end_and_the_file_is_closed(tmp_path, full_mirror):
    with (
        pytest.raises(OSError, match="full"),
        MetricsWriter(tmp_path, None, [lambda *_: full_mirror]) as writer,
    ):
        pass

    assert writer._file.closed


def test_a_mirror_whose_thread_has_ended_is_refused_without_waiting(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(_EventLoggerThread, "run", lambda _: None)
    mirror = tensorboard(tmp_path)

    def write():
        for step in range(100):  # More than its queue takes.
            mirror.write(step, {"loss": 1.0})

    with pytest.raises(UnwritableError, match="tb cannot be written"):
        write()
    mirror.close()


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl"])
@pytest.mark.parametrize("offset", [None, 11])
def test_a_pipe_in_the_place_of_records_is_refused_at_once(tmp_path, name, offset):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step":1}\n')
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with at_once(), pytest.raises(NoRegularFileError, match=f"{name} is not a regular"):
        MetricsWriter(tmp_path, offset, mirrors=())
