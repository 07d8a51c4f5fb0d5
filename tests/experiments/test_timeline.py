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
        ([], "workdir=None is no folder"),
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
