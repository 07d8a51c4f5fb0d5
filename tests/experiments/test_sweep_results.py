"""cells.json of a sweep, and rows that are compared with another sweep's."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest

import cocodc_jax as cc
from cocodc_jax.run.config.presets import PRESETS
from cocodc_jax.run.config.run_config import RunConfig
from cocodc_jax.run.config.train_config import SECTIONS
from experiments import sweep
from experiments.sweeps import cells, reference, report, rows
from experiments.sweeps.schedule import Plan

from .test_sweep import table, written

GRID = """
seeds = [0, 1, 2]
[base]
preset = "smoke"
steps = 32
sync_interval = 16
delay_steps = 3
[groups.all]
method = ["streaming_diloco", "diloco", "data_parallel"]
"""
STEPS = np.arange(0, 33, 8)
OUTER = 0.125  # By how much the outer parameters' losses are higher.
LOSSES = {
    "streaming_diloco": [2.0, 2.1, 2.4],
    "diloco": [2.25, 2.5, 2.5],
    "data_parallel": [1.0, 1.1, 1.0],
}


def train(folder, text=GRID, add=0.0):
    """Write the rows of a grid as after training, with losses on a line."""
    for stage in Plan(table(text)).stages(dict):
        for row in stage:
            rows.append(folder, _row(row, add))
    return folder


def _row(row, add):
    loss = LOSSES[row.config.method.method][row.seed] + add
    curve = [[int(s), float(4 + (loss - 4) * s / 32), 10.0 * s] for s in STEPS]
    sent = {"bytes": 320, "bytes_per_step": 10, "fragment_bytes": [10]}
    curve_outer = [[step, loss + OUTER] for step, loss, _ in curve]
    return written(row, loss) | sent | {"curve": curve, "curve_outer": curve_outer}


@pytest.fixture
def kept(tmp_path):
    """A results file: the cells of one sweep."""
    (tmp_path / "first").mkdir()
    of_rows = cells.cells(rows.read(train(tmp_path / "first")))
    made = report.Report(of_rows, reference.find(of_rows, "method=diloco"))
    path = tmp_path / "first.json"
    path.write_text(json.dumps(report.to_json(made)))
    return path


def test_cells_come_back_as_references(kept):
    of_rows = cells.cells(rows.read(kept.parent / "first"))
    loaded = report.load(kept)
    assert [cell.label for cell in loaded] == [cell.label for cell in of_rows]
    ours = of_rows[0].columns["published"]

    for held, back in zip(of_rows, loaded, strict=True):
        there = held.columns["published"]
        here = back.columns["published"]
        assert (here.loss, here.extent) == (there.loss, there.extent)
        assert here.bytes_per_step == there.bytes_per_step
        assert cells.difference(ours, here) == cells.difference(ours, there)
        assert cells.steps_to(ours, here) == cells.steps_to(ours, there)


def test_curves_of_every_seed_are_kept(kept):
    column = json.loads(kept.read_text())["cells"][1]["columns"]["published"]
    steps, means, _ = np.transpose(column["curve"])
    np.testing.assert_array_equal(steps, STEPS)
    assert [curve[-1] for curve in column["curves"]] == LOSSES["diloco"]
    np.testing.assert_allclose(means, np.mean(column["curves"], axis=0))


def test_curves_of_the_outer_parameters_are_kept(kept):
    column = json.loads(kept.read_text())["cells"][1]["columns"]["published"]
    expected = np.array(column["curves"]) + OUTER
    np.testing.assert_allclose(column["curves_outer"], expected)


def test_rows_of_earlier_versions_have_no_curves_of_the_outer_parameters(tmp_path):
    of_rows = rows.read(train(tmp_path))
    del of_rows[0]["curve_outer"]
    of_cells = cells.cells(of_rows)
    made = report.Report(of_cells, reference.find(of_cells, "method=diloco"))

    has_curves = [
        "curves_outer" in cell["columns"]["published"]
        for cell in report.to_json(made)["cells"]
    ]
    assert has_curves.count(False) == 1


def test_rows_are_compared_with_another_sweep_seed_by_seed(kept, call, tmp_path):
    """By hand: steps at which lines from 4 at step 0 reach the other's last losses."""
    (tmp_path / "next").mkdir()
    train(tmp_path / "next", GRID.replace("delay_steps = 3", "delay_steps = 4"), -0.25)
    words = [f"--workdir={tmp_path / 'next'}", "--reference=method=diloco"]
    _, err = call(sweep, "--report", *words, f"--reference_from={kept}")
    assert not err

    made = json.loads((tmp_path / "next" / "cells.json").read_text())
    assert made["reference"]["from"] == str(kept)
    column = made["cells"][0]["columns"]["published"]

    ours = np.array(LOSSES["streaming_diloco"]) - 0.25
    theirs = np.array(LOSSES["diloco"])
    assert column["difference"]["mean"] == pytest.approx(np.mean(ours - theirs))
    steps = 32 * (4 - theirs) / (4 - ours)
    assert column["steps_to_reference"]["mean"] == pytest.approx(np.mean(steps))

    text = (tmp_path / "next" / "report.md").read_text()
    assert f"The reference is diloco H 16 float32, published, of {kept}; " in text
    assert "| reference |" not in text  # It has no row.


def test_tuned_settings_alone_are_compared_as_tuned(call, tmp_path):
    train(tmp_path, GRID.replace("[base]", 'tuned = ["outer_lr"]\n[base]'))

    path = tmp_path / rows.FILE
    text = path.read_text().replace('"published": true', '"published": false')
    path.write_text(text)

    call(sweep, "--report", f"--workdir={tmp_path}")
    kept = tmp_path / "cells.json"
    assert json.loads(kept.read_text())["reference"]["column"] == "tuned"
    call(sweep, "--report", f"--workdir={tmp_path}", f"--reference_from={kept}")
    assert json.loads(kept.read_text())["reference"]["column"] == "tuned"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--reference_from=none.json",
            "--reference_from=none.json cannot be read (No such file",
        ),
        (
            "--reference_from={folder}/rows.jsonl",
            "--reference_from={folder}/rows.jsonl cannot be read (",
        ),
        (
            "--reference_from={kept} --reference=method=cocodc",
            "--reference='method=cocodc' is no cell of {kept}; they are streaming",
        ),
        (
            "--reference_from={kept} --reference_column=tuned",
            "--reference_column='tuned' was not run for diloco H 16 float32 of ",
        ),
    ],
)
@pytest.mark.parametrize("before_training", [False, True])
def test_invalid_references_are_refused(words, message, before_training, kept, refused):
    folder = kept.parent / "first"
    (folder / "grid.toml").write_text(GRID)
    words = words.format(folder=folder, kept=kept).split()
    first = f"--grid={folder}/grid.toml" if before_training else "--report"
    error = refused(sweep, first, f"--workdir={folder}", *words)
    assert error.startswith(message.format(folder=folder, kept=kept))


def test_a_reference_of_another_model_is_refused(kept):
    message = f"reference_from={kept} has num_layers=4, where these runs have 3: losses"
    configs = [
        row["config"] | {"model": row["config"]["model"] | {"num_layers": 3}}
        for row in rows.read(kept.parent / "first")
    ]

    with pytest.raises(ValueError, match=re.escape(message)):
        reference.read(str(kept), "method=diloco", "published", configs)
    one_is_the_same = [*configs, rows.read(kept.parent / "first")[0]["config"]]
    held = reference.read(str(kept), "method=diloco", "published", one_is_the_same)
    assert held.label == "diloco H 16 float32"


def test_a_committed_result_can_be_a_reference():
    folder = pathlib.Path(__file__).parents[2] / "experiments" / "results"
    kept_cells = report.load(folder / "one_bit.json")
    held = reference.find(kept_cells, "method=diloco").columns["published"]
    assert [row["seed"] for row in held.rows] == [0, 1, 2, 3, 4]
    assert held.loss.mean == pytest.approx(1.814, abs=5e-4)


CONFIG = PRESETS["smoke"].replace(method="streaming_diloco").resolve()


@dataclasses.dataclass(frozen=True)
class Grown(RunConfig):
    """A field that a later version may add."""

    new_axis: int = 1


def grow(monkeypatch, config, **new):
    """Return a configuration of a version with one field more."""
    monkeypatch.setitem(SECTIONS, "run", Grown)
    run = Grown(**dataclasses.asdict(config.run), **new)
    return dataclasses.replace(config, run=run)


def test_a_new_field_at_its_default_changes_no_key(monkeypatch, tmp_path):
    config = CONFIG.replace(seed=3)
    run = rows.run_key(config.to_json())
    setting = rows.setting_key(CONFIG.to_json())
    rows.append(tmp_path, {"row": "of another version", "config": config.to_json()})

    now = grow(monkeypatch, config)
    assert rows.run_key(now.to_json()) == run
    assert rows.setting_key(now.to_json()) == setting

    (row,) = rows.read(tmp_path)
    assert (row["row"], row["setting"]) == (run, setting)
    assert row["config"]["run"]["new_axis"] == 1

    # And one that is not at its default does.
    other = grow(monkeypatch, config, new_axis=2)
    assert rows.run_key(other.to_json()) != run


def test_runs_that_differ_in_anything_have_keys_of_their_own():
    others = [
        CONFIG,
        CONFIG.replace(seed=1),
        CONFIG.replace(steps=33),
        CONFIG.replace(outer_lr=0.7),
        CONFIG.replace(compress="ef+int4"),
        CONFIG.replace(inner_lr=1e-3),
        dataclasses.replace(CONFIG, preset="tiny"),
    ]
    run_keys = [rows.run_key(other.to_json()) for other in others]

    assert len(set(run_keys)) == len(others)

    same = [rows.setting_key(other.to_json()) for other in others]
    assert same[0] == same[1]
    assert len(set(same)) == len(others) - 1


@pytest.mark.parametrize(
    "changed",
    [
        {"run": {"eval_batches": 31}},  # As if its default had been 31.
        {"method": {"mixing_alpha": 0.4}},
        {"run": {"was_here": 1}},  # Which is known no more.
        {"method": {"max_delay_steps": 7}},
    ],
)
def test_a_row_of_another_default_is_no_row_of_today(changed, tmp_path):
    written = CONFIG.to_json()
    was = {name: {**written[name], **new} for name, new in changed.items()}

    # Both have today's key of the run, which has the fields that are not defaults.
    today = {"row": rows.run_key(written), "config": {**written, **was}}

    rows.append(tmp_path, today)
    (other,) = rows.read(tmp_path)
    assert other["row"] != today["row"]
    rows.append(tmp_path, {**today, "config": written})
    assert [row["row"] for row in rows.read(tmp_path)] == [other["row"], today["row"]]


def test_an_argument_that_was_not_given_may_have_a_default_one_day(monkeypatch):
    written = rows.completed(CONFIG.to_json())
    defaults = dict(cc.methods.defaults("streaming_diloco"))
    assert defaults["max_delay_steps"] is written["method"]["max_delay_steps"] is None
    defaults["max_delay_steps"] = 9
    monkeypatch.setattr(cc.methods, "defaults", lambda method: defaults)
    now = CONFIG.to_json()
    now["method"]["max_delay_steps"] = 9
    assert rows.run_key(rows.completed(written)) != rows.run_key(now)
