"""Places of elastic regions, refused flags, and where a region begins."""

import json
import re
import sys
import time
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from absl.flags import FlagValues

from cocodc_jax.elastic.link import LeftBehindError
from cocodc_jax.elastic.messages import Epoch, Seat, Snapshot, View
from cocodc_jax.elastic.place import Place, Timing
from cocodc_jax.run import taking_part
from cocodc_jax.run.config import flags
from cocodc_jax.run.config.elastic_flags import ElasticFlags
from cocodc_jax.run.config.presets import PRESETS
from cocodc_jax.run.processes import Processes
from cocodc_jax.run.resume import ResumeError
from cocodc_jax.run.taking_part import SYNCS_FILE, Start, last_merge, run_digest
from cocodc_jax.train import reporting
from cocodc_jax.train.joining import Carried
from experiments import train

PLACE = Place(1, ("a:1", "b:1", "c:1"), b"k" * 32, Timing(start_s=7))


def view(*regions):
    seats = {region: Seat(1, 0, (region, 1)) for region in regions}
    return View(Epoch(1, 1, 1), seats)


def test_a_region_that_took_part_in_a_run_does_not_restart_it_alone(tmp_path):
    assert last_merge(tmp_path) == 0
    lines = [json.dumps({"apply_step": step}) for step in (40, 44)]
    (tmp_path / SYNCS_FILE).write_text("\n".join(lines) + '\n{"apply_st')  # A kill.
    assert last_merge(tmp_path) == 44

    message = (
        r"up to step 44 and has no checkpoint of it, and regions \[0, 2\] did not "
        "answer within start_s=7"
    )
    with pytest.raises(ResumeError, match=message):
        taking_part._say_how_it_begins(PLACE, view(1), 0, 44)


@pytest.mark.parametrize(
    ("regions", "own_step", "reached", "message"),
    [
        ((0, 1, 2), 0, 44, ""),  # All of them start at step 0.
        ((1,), 40, 44, "region 1 leads the run from its own step 40; regions [0, 2]"),
        ((0, 1), 0, 0, "regions [2] did not answer within start_s=7: region 1 goes on"),
    ],
)
def test_a_region_prints_where_it_begins(regions, own_step, reached, message, capsys):
    taking_part._say_how_it_begins(PLACE, view(*regions), own_step, reached)
    error = capsys.readouterr().err
    assert message in error
    assert bool(error) == bool(message)


@pytest.mark.parametrize(
    ("leaves", "is_same"),
    [
        ({"data_dir": "/elsewhere", "devices": 1, "eval_every": 8}, True),
        ({"outer_lr": 0.3}, False),
        ({"steps": 96}, False),
    ],
)
def test_regions_may_differ_in_where_and_how_they_run(leaves, is_same):
    config = PRESETS["smoke"].replace(exchange="elastic")
    digests = {run_digest(c, "text") for c in (config, config.replace(**leaves))}
    assert (len(digests) == 1) == is_same


def test_a_checkpoint_ahead_of_the_others_is_refused():
    message = "the run is at step 4, and this region's own checkpoint at step 8: of an"
    with pytest.raises(LeftBehindError, match=message):
        taking_part._go_on(None, Snapshot(4, header={}, arrays=()), 8, None, leader=0)


def test_the_last_common_model_is_that_of_the_missing_regions():
    def state(value):
        outer = mock.Mock(params=(np.full(2, value),))
        return mock.Mock(sync=mock.Mock(outer=outer))

    link = mock.Mock(view=view(0, 1, 2, 3))
    reporter = reporting.Reporter(mock.Mock(), link)
    turns = (
        (1, (1, 2, 3), {0}, 1),
        (2, (1, 2, 3), {0}, 1),
        (3, (2, 3), {1}, 3),  # Not 0: the others have a later model in common.
        (4, (0, 2, 3), {1}, 3),
        (5, (1, 2, 3), {0}, 5),
        (6, (0, 1, 2, 3), set(), None),
    )
    for value, regions, missed, common in turns:
        link.view = view(*regions)
        reporter.note_shared(state(value))
        shared = reporter.shared and int(reporter.shared[0][0])
        assert (reporter.missed, shared) == (missed, common)


@pytest.mark.parametrize(
    ("missed", "has_shared"),
    [({1}, True), ({0}, False)],
    ids=["the leader was lost", "another region was"],
)
def test_a_model_in_common_with_the_leader_is_carried(missed, has_shared):
    shared = ({"w": np.zeros(2)},)
    carried = Carried(mock.Mock(), shared, frozenset(missed), boot=5)
    assert carried.to_join(leader=1) == carried._replace(
        shared=shared if has_shared else None
    )


@pytest.mark.parametrize("is_carried", [False, True])
@pytest.mark.parametrize(("at", "then"), [(48, 3), (44, -1), (None, "back")])
def test_data_are_skipped_before_it_asks_to_join(
    monkeypatch, tmp_path, at, then, is_carried
):
    """The others are at step 43, and at 45 once data are skipped; then a copy arrives,
    or they have ended meanwhile."""
    done = []
    state = mock.Mock(step=8)
    copy = at and Snapshot(at, header={}, arrays=())

    link = mock.MagicMock(view=view(0, 1, 2), boot=5)
    link.__enter__.return_value = link
    link.__exit__.return_value = None
    link.wait_for_step.side_effect = [43, 45, 45]
    link.join.side_effect = lambda timeout_s: done.append("join") or copy

    monkeypatch.setattr(taking_part.inside, "of_process", lambda *_: link)
    monkeypatch.setattr(
        taking_part, "joining", mock.Mock(**{"adopt.return_value": state})
    )
    monkeypatch.setattr(taking_part, "_rehearse", lambda *_: done.append("rehearse"))
    monkeypatch.setattr(taking_part, "_skip", lambda stream, num: done.append(num))

    stream = mock.Mock(set_state=lambda state: done.append("back"))
    session = mock.MagicMock(
        own_dir=tmp_path,
        place=PLACE,
        config=PRESETS["smoke"],
        elastic=ElasticFlags(),
        text=mock.Mock(fingerprint="text"),
        first_params=lambda: (None, None),
    )

    carried = mock.Mock() if is_carried else None
    stop = mock.Mock()
    with taking_part.taking_part(
        session,
        Start(state, None, {}),
        stream,
        carried=carried,
        monitor=mock.Mock(),
        fault_watch=mock.Mock(),
        listen=lambda: stop,
    ):
        alone = [] if carried else ["rehearse", "back"]
        assert done == [*alone, 35, 2, "join", then]
        assert link.should_stop is stop.is_asked

    if carried and copy:
        carried.to_join.assert_called_once_with(1)  # Region 1 leads.


ADDRESSES = "a:1,b:2"


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(b"k" * 32)
    path.chmod(0o600)
    return str(path)


def test_a_place_is_read_from_flags_with_addresses(key_file):
    place = ElasticFlags(ADDRESSES, "", 1, key_file, min_regions=2).place("elastic", 2)
    assert (place.region, place.num_regions, place.min_regions) == (1, 2, 2)
    assert ElasticFlags().place("outer", 2) is None


def test_a_place_is_read_from_flags_with_a_folder(key_file, tmp_path):
    place = ElasticFlags(via=f"{tmp_path}/new", region_id=2, key_file=key_file).place(
        "elastic", 3
    )
    assert (place.region, place.num_regions, place.addresses) == (2, 3, ())
    assert (tmp_path / "new").is_dir()


BOTH = {"region_addresses": ADDRESSES, "key_file": "KEY"}


@pytest.mark.parametrize(
    ("fields", "exchange", "message"),
    [
        ({"region_id": 0}, "outer", "region_id=0 has no meaning for exchange='outer'"),
        ({"via": "x"}, "outer", "via='x' has no meaning for exchange='outer'"),
        ({}, "elastic", "exchange='elastic' needs region_addresses or via"),
        ({"via": "x"}, "elastic", "exchange='elastic' needs key_file"),
        (BOTH, "elastic", "region_id=-1 must be 0 to 1"),
    ],
)
def test_missing_flags_are_named(key_file, fields, exchange, message):
    if "key_file" in fields:
        fields = {**fields, "key_file": key_file}
    with pytest.raises(ValueError, match=re.escape(message)):
        ElasticFlags(**fields).place(exchange, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beat_s": 0.0}, "beat_s=0.0 must be above 0"),
        ({"max_behind_syncs": 0}, "max_behind_syncs=0 must be at least 1"),
        ({"grace_s": float("inf")}, "grace_s=inf must be above 0"),
        ({"dead_after_s": 1.0}, "dead_after_s=1.0 must be at least three times beat_s"),
    ],
)
def test_invalid_times_are_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ElasticFlags(**fields)


def test_a_job_is_none_of_its_launchers_processes(monkeypatch):
    for name, value in [("NUM_PROCESSES", "4"), ("PROCESS_ID", "2")]:
        monkeypatch.setenv(f"COCODC_{name}", value)
    monkeypatch.setenv("COCODC_COORDINATOR_ADDRESS", "region0:29400")
    counts = {}

    for words in [(), ("--exchange=elastic", "--region_id=2")]:
        monkeypatch.setattr(flags, "FLAGS", FlagValues())
        monkeypatch.setattr(sys, "argv", ["train", *words])
        train.define()
        flags.parse(sys.argv)
        counts[words] = flags.processes().num_processes
    assert list(counts.values()) == [4, Processes().num_processes]


def test_a_region_of_several_processes_sees_no_lateness_by_its_own_clock():
    ElasticFlags(late_mean="wait").check_several(4)
    with pytest.raises(ValueError, match=r"late_mean='merge' .*num_processes=4"):
        ElasticFlags(late_mean="merge").check_several(4)


def test_marks_of_applied_syncs_are_reported_a_turn_later():
    """If a fragment has two syncs in a turn, its value is that of the last."""
    link = mock.Mock(view=view(0, 1), place=PLACE)
    link.at.return_value = {}
    reporter = reporting.Reporter(mock.Mock(), link)
    outer = mock.Mock(params=({"w": jnp.zeros(3)}, {"w": jnp.ones(3)}))
    state = mock.Mock(sync=mock.Mock(outer=outer, in_flight={}), step=9)
    applied = [(1, 4), (0, 6), (1, 8)]
    syncs = [mock.Mock(fragment_id=k, start_step=step) for k, step in applied]

    marks = []
    end_s = time.monotonic() + 20
    while len(marks) < 2 and time.monotonic() < end_s:  # No step waits for a digest.
        reporter.report(state, syncs)
        syncs = []
        marks += link.at.call_args.args[1]
    assert [mark.sync for mark in marks] == [(1, 8), (0, 6)]
    assert [mark.scale for mark in marks] == [1, 0]


@pytest.mark.parametrize(
    ("carried", "last_boot"), [(None, None), (mock.Mock(boot=77), 77)]
)
def test_a_life_that_returns_takes_the_next_number(
    carried, last_boot, monkeypatch, tmp_path
):
    """Its number is lower than that of any later start."""
    made = {}

    def of_process(place, process, num, make_link, *_):
        make_link()
        raise LeftBehindError("far enough")

    monkeypatch.setattr(taking_part.inside, "of_process", of_process)
    monkeypatch.setattr(
        taking_part, "Link", lambda *_, **settings: made.update(settings)
    )
    monkeypatch.setattr(taking_part, "joining", mock.Mock())
    session = mock.MagicMock(
        own_dir=tmp_path,
        place=PLACE,
        config=PRESETS["smoke"],
        elastic=ElasticFlags(),
        text=mock.Mock(fingerprint="text"),
    )

    part = taking_part.taking_part(
        session,
        Start(mock.Mock(step=8), None, {}),
        stream=mock.Mock(),
        carried=carried,
        monitor=mock.Mock(),
        fault_watch=mock.Mock(),
        listen=mock.Mock(),
    )
    with pytest.raises(LeftBehindError, match="far enough"):
        part.__enter__()

    assert made["last_boot"] == last_boot
