"""`experiments.timeline`: what it writes and prints, and what it refuses."""

import json

import pytest

from experiments import timeline


def sync(fragment, start, apply, start_s, arrival_s, merge_s, stall_s):
    return {
        "fragment": fragment, "start_step": start, "apply_step": apply,
        "start_s": start_s, "arrival_s": arrival_s, "merge_s": merge_s,
        "stall_s": stall_s, "num_bytes": 100,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """Two processes: a second a step, the second one half a second behind."""
    for name, late in (("", 0.0), ("process_1", 0.5)):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        marks = [[step, 10.0 + step + late] for step in (0, 2, 4, 6)]
        marks[-1][1] += 1.0  # Waited a second before step 6 was done.
        found = {
            "marks": marks,
            "syncs": [
                sync(0, 0, 2, 10.0 + late, 11.0, 12.0 + late, 0.0),
                sync(1, 2, 4, 12.0 + late, 15.0, 15.0 + late, 1.0),
                sync(0, 4, None, 14.0 + late, None, None, None),
            ],
        }
        (folder / "timeline.json").write_text(json.dumps(found))
    config = {"method": {"method": "diloco", "sync_interval": 1}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_program_writes_a_trace_and_a_plot(run, capsys):
    assert timeline.main(["timeline", f"--workdir={run}"]) == 0
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert {"stall", "fragment 1"} <= {event["name"] for event in events}
    assert (run / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "utilization" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workdir=/no/such"], "holds no run"),
        ([], "workdir=None is no folder"),
        (["--workdir={run}", "--since_step=5"], "fewer than two marks after step 5"),
        (["--workdir={empty}", "--since_step=0"], "holds no timeline.json"),
    ],
)
def test_what_is_refused(run, tmp_path, capsys, arguments, message):
    empty = tmp_path / "empty"
    empty.mkdir()
    words = [word.format(run=run, empty=empty) for word in arguments]
    assert timeline.main(["timeline", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --workdir=")
    assert message in error
