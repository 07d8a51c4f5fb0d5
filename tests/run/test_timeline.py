"""The timeline of a run, from its files: by hand, and damaged ones."""

import json
import math

import numpy as np
import pytest

from cocodc_jax.network.timeline import SyncRecord, Timeline
from cocodc_jax.run import timeline


def test_a_timeline_has_the_marks_and_syncs_of_every_process(recorded_run):
    measured = timeline.read(recorded_run)
    assert measured.regions == ("process 0", "process 1")
    assert measured.step_time_s == (1.0, 1.0)
    assert measured.marks[-1] == (6, (7.0, 7.5))

    assert measured.sim_s == 7.5
    assert measured.stall_s == (1.0, 1.0)
    assert measured.bytes_sent == (200.0, 200.0)

    first, second = measured.syncs
    assert (first.fragments, first.start_step, first.merge_step) == ((0,), 0, 2)

    # A sync starts and is merged with the later process.
    assert (second.start_s, second.arrival_s, second.merge_s) == (2.5, 5.0, 5.5)


def test_a_process_of_an_earlier_start_is_left_out(recorded_run):
    expected = timeline.read(recorded_run)
    stale = json.loads((recorded_run / "process_1" / "timeline.json").read_text())
    stale["marks"] = stale["marks"][:-1]
    (recorded_run / "process_2").mkdir()
    (recorded_run / "process_2" / "timeline.json").write_text(json.dumps(stale))
    assert timeline.read(recorded_run) == expected


def test_steps_during_a_sync_are_timed_apart_from_steps_without_one():
    """2 s a step with a sync in flight, 1 s without; waiting counts as neither.

    One step beside a sync and one alone; two alone; two beside; a second of waiting and
    two alone.
    """
    times = {0: 0.0, 2: 3.0, 4: 5.0, 6: 9.0, 8: 12.0}
    syncs = (
        SyncRecord((0,), 0, 2, 0.0, 2.0, 3.0, (0.0,), (1.0,)),
        SyncRecord((1,), 4, 6, 5.0, 10.0, 10.0, (1.0,), (1.0,)),
    )
    marks = tuple((step, (second,)) for step, second in times.items())
    measured = Timeline(("process 0",), syncs, 8, (1.0,), marks, (1.0,), (2.0,))
    assert timeline.step_s_in_flight(measured) == (2.0, 1.0)


def test_a_slow_process_is_seen_though_the_others_wait_for_it():
    syncs = tuple(
        SyncRecord((0,), n - 1, n, 0.0, 0.0, 0.0, (2.0, 0.0), (1.0, 1.0))
        for n in range(4)
    )
    marks = tuple((n, (2.5 * n, 2.5 * n)) for n in range(5))
    measured = Timeline(("0", "1"), syncs, 4, (0.5, 2.5), marks, (8.0, 0.0), (4.0, 4.0))

    assert [stretch.tolist() for _, stretch in measured.stretches()] == [[0.5, 2.5]] * 4
    assert timeline.step_s_in_flight(measured)[1] == 2.5
    assert measured.utilization() == 0.6


def test_without_a_sync_steps_in_flight_have_no_time():
    marks = ((0, (0.0,)), (2, (2.0,)), (4, (4.0,)))
    measured = Timeline(("process 0",), (), 4, (1.0,), marks, (0.0,), (0.0,))
    busy, quiet = timeline.step_s_in_flight(measured)
    assert math.isnan(busy)
    assert quiet == 1.0


def test_the_exposed_share_of_a_run_is_read_from_its_files(recorded_run):
    """Sync 1 is in flight until 5, and waited for from 4.5 to 5.5, of 7.5 seconds."""
    share = timeline.exposed_share(recorded_run, 2)
    assert share == timeline.read(recorded_run, 2).exposed_share == 0.5 / 5.5
    assert timeline.exposed_share(recorded_run / "process_1", 2) == 0.5 / 5
    # Too short after that step: all of it.
    whole = timeline.read(recorded_run).exposed_share
    assert timeline.exposed_share(recorded_run, 6) == whole == 0.5 / 7.5
    (recorded_run / "timeline.json").write_text('{"marks": [], "syncs": []}')
    assert timeline.exposed_share(recorded_run, 0) is None


def test_goodput_is_of_undisturbed_steps(recorded_run):
    """Six steps of a second in the slower process, in 8 s by the wall."""
    measured = timeline.read(recorded_run)
    step_s = max(np.median([s for _, s in measured.stretches()], axis=0))
    assert timeline.goodput(recorded_run, 6, 8.0) == 6 * step_s / 8
    assert timeline.goodput(recorded_run, 6, 1.0) == 1
    (recorded_run / "timeline.json").write_text('{"marks": [], "syncs": []}')
    assert timeline.goodput(recorded_run, 6, 8.0) is None


def test_clocks_that_began_at_different_moments_are_aligned(recorded_run):
    expected = timeline.read(recorded_run)
    path = recorded_run / "process_1" / "timeline.json"
    table = json.loads(path.read_text())
    table["marks"] = [[step, second - 100] for step, second in table["marks"]]

    for sync in table["syncs"]:
        for name in ("start_s", "arrival_s", "merge_s"):
            sync[name] = sync[name] and sync[name] - 100

    path.write_text(json.dumps(table))
    assert timeline.read(recorded_run) == expected


def test_the_first_steps_can_be_left_out(recorded_run):
    measured = timeline.read(recorded_run, since_step=2)
    assert measured.num_steps == 4
    assert measured.marks[0] == (0, (0.0, 0.5))
    assert [sync.fragments for sync in measured.syncs] == [(1,)]
    assert measured.syncs[0].start_step == 0


@pytest.mark.parametrize("content", ["", '{"marks": [[0, 1.0]', "[]", '{"marks": 1}'])
def test_a_damaged_file_is_named_and_written_again(recorded_run, content, capsys):
    path = recorded_run / "timeline.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        timeline.read(recorded_run)

    again = {"marks": [[6, 30.0]], "syncs": []}
    timeline.save(recorded_run, again, first_step=4)
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: {path} is damaged")
    assert warning.endswith("; it is written anew, from step 4 on\n")
    assert json.loads(path.read_text()) == again


@pytest.mark.parametrize("content", ["", "[]", '{"method": 3}', "{}"])
def test_a_damaged_configuration_is_named(recorded_run, content):
    path = recorded_run / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        timeline.first_warm_step(recorded_run)


def test_a_resumed_run_keeps_the_timeline_before_its_checkpoint(
    recorded_run, recorded_sync
):
    """Cut at step 4: later steps are done again."""
    again = {
        "marks": [[6, 30.0]],
        "syncs": [recorded_sync(0, 4, 6, 28.0, 29.0, 30.0, 0.5)],
    }
    timeline.save(recorded_run, again, first_step=4)

    table = json.loads((recorded_run / "timeline.json").read_text())
    assert [mark[0] for mark in table["marks"]] == [0, 2, 4, 6]
    assert table["marks"][-1] == [6, 30.0]
    assert [(s["start_step"], s["apply_step"]) for s in table["syncs"]] == [
        (0, 2),
        (2, 4),
        (4, 6),
    ]

    # A run from step 0 keeps nothing.
    timeline.save(recorded_run, again, first_step=0)
    assert json.loads((recorded_run / "timeline.json").read_text()) == again
