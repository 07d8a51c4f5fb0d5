"""`experiments.timeline`: its files, output and refused flags."""

import json
import re

import pytest

from experiments import timeline


def test_the_program_writes_a_trace_and_a_plot(recorded_run, call):
    out, _ = call(timeline, f"--workdir={recorded_run}")
    events = json.loads((recorded_run / "trace.json").read_text())["traceEvents"]
    assert {"stall", "fragment 1"} <= {event["name"] for event in events}
    assert (recorded_run / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "utilization" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--workdir=/no/such", "--workdir=.* holds no run"),
        ("", "--workdir=None is missing"),
        (
            "--workdir={run} --since_step=5",
            "--workdir=.* fewer than two marks after step",
        ),
        ("--workdir={empty} --since_step=0", "--workdir=.* holds no timeline.json"),
        ("--workdir={run} 5", "unexpected argument '5'; flags begin with --$"),
    ],
)
def test_wrong_flags_are_refused_in_a_line(
    recorded_run, tmp_path, refused, words, message
):
    empty = tmp_path / "empty"
    empty.mkdir()
    error = refused(timeline, *words.format(run=recorded_run, empty=empty).split())
    assert re.match(message, error), error


def test_slow_steps_have_the_step_numbers_of_the_run(recorded_run, call, monkeypatch):
    """Steps are counted from the first mark, which may come after --since_step."""
    marks = [[step, 10.0 + step] for step in range(4, 50, 2)]
    slow = [[step, 10.0 + step + 20 * max(step - 30, 0)] for step in range(4, 50, 2)]
    for folder, seconds in ((recorded_run, marks), (recorded_run / "process_1", slow)):
        text = json.dumps({"marks": seconds, "syncs": []})
        (folder / "timeline.json").write_text(text)

    titles = []
    monkeypatch.setattr(
        timeline.trace,
        "plot_timeline",
        lambda run, path, title, clock: titles.append(title),
    )

    printed = []
    for since in (3, 4):
        out, _ = call(timeline, f"--workdir={recorded_run}", f"--since_step={since}")
        printed.append(out)

    assert "after step 36: slow process 1" in printed[1]
    assert printed[0] == printed[1]
    assert all(title.endswith("measured from step 4") for title in titles)
