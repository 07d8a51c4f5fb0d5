"""`experiments.timeline`: what it writes and prints, and what it refuses."""

import json

import pytest

from experiments import timeline


def test_the_program_writes_a_trace_and_a_plot(recorded_run, capsys):
    assert timeline.main(["timeline", f"--workdir={recorded_run}"]) == 0
    events = json.loads((recorded_run / "trace.json").read_text())["traceEvents"]
    assert {"stall", "fragment 1"} <= {event["name"] for event in events}
    assert (recorded_run / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "utilization" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workdir=/no/such"], "holds no run"),
        ([], "workdir=None is missing"),
        (
            ["--workdir={recorded_run}", "--since_step=5"],
            "fewer than two marks after step 5",
        ),
        (["--workdir={empty}", "--since_step=0"], "holds no timeline.json"),
    ],
)
def test_what_is_refused(recorded_run, tmp_path, capsys, arguments, message):
    empty = tmp_path / "empty"
    empty.mkdir()
    words = [word.format(recorded_run=recorded_run, empty=empty) for word in arguments]
    assert timeline.main(["timeline", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --workdir=")
    assert message in error


def test_a_word_that_is_no_flag_is_refused(recorded_run, capsys):
    assert timeline.main(["timeline", f"--workdir={recorded_run}", "5"]) == 2
    error = capsys.readouterr().err
    assert error == "error: unexpected argument '5'; flags begin with --\n"


def test_slow_steps_are_told_by_the_run_s_own_steps(recorded_run, capsys, monkeypatch):
    """Steps are counted from the first mark, which may come after --since_step."""
    marks = [[step, 10.0 + step] for step in range(4, 50, 2)]
    slow = [[step, 10.0 + step + 20 * max(step - 30, 0)] for step in range(4, 50, 2)]
    for folder, each in ((recorded_run, marks), (recorded_run / "process_1", slow)):
        found = {"marks": each, "syncs": []}
        (folder / "timeline.json").write_text(json.dumps(found))
    titles, told = [], []
    monkeypatch.setattr(
        timeline.timeline, "write", lambda folder, found, title: titles.append(title)
    )
    for since in (3, 4):
        words = ["timeline", f"--workdir={recorded_run}", f"--since_step={since}"]
        assert timeline.main(words) == 0
        told.append(capsys.readouterr().out)
    assert "after step 36: slow process 1" in told[1]
    assert told[0] == told[1]
    assert all(title.endswith("measured from step 4") for title in titles)
