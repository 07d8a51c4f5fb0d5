"""Where a region that is a job begins if the others do not answer."""

import json

import pytest

from cocodc_jax.elastic.messages import Seat, Snapshot, View
from cocodc_jax.elastic.place import Place, Timing
from cocodc_jax.run.presets import PRESETS
from cocodc_jax.run.resume import ResumeError
from cocodc_jax.run.taking_part import (
    SYNCS_FILE,
    _begins,
    _go_on,
    last_merge,
    run_digest,
)

PLACE = Place(1, ("a:1", "b:1", "c:1"), b"k" * 32, Timing(start_s=7))


def view(*regions):
    return View(1, {region: Seat(1, 0) for region in regions})


def test_a_run_that_it_was_in_is_not_begun_anew_alone(tmp_path):
    assert last_merge(tmp_path) == 0
    lines = [json.dumps({"apply_step": step}) for step in (40, 44)]
    (tmp_path / SYNCS_FILE).write_text("\n".join(lines) + '\n{"apply_st')  # A kill.
    assert last_merge(tmp_path) == 44
    told = r"up to step 44 and has no checkpoint of it, and regions \[0, 2\] did not "
    with pytest.raises(ResumeError, match=told + "answer within start_s=7"):
        _begins(PLACE, view(1), 0, 44)


@pytest.mark.parametrize(
    ("regions", "own_step", "reached", "told"),
    [
        ((0, 1, 2), 0, 44, ""),  # All of them begin anew.
        ((1,), 40, 44, "region 1 goes on without them, from its own step 40"),
        ((0, 1), 0, 0, "regions [2] did not answer within start_s=7: region 1 goes on"),
    ],
)
def test_where_it_begins_is_said(regions, own_step, reached, told, capsys):
    _begins(PLACE, view(*regions), own_step, reached)
    error = capsys.readouterr().err
    assert told in error
    assert bool(error) == bool(told)


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


def test_a_checkpoint_ahead_of_what_the_others_begin_with_is_refused():
    told = "the run is at step 4, and this region's own checkpoint at step 8: of an"
    with pytest.raises(ResumeError, match=told):
        _go_on(None, Snapshot(4, {}, ()), 8, None, None)
