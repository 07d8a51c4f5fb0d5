"""Keys of a sweep's runs: what a new field, another default, another value do to them.

A row is written with its whole configuration; a later version must find it again, and
only where it says the very same.
"""

import dataclasses

import pytest

import cocodc_jax as cc
from cocodc_jax.run.config import SECTIONS
from cocodc_jax.run.presets import PRESETS
from cocodc_jax.run.run_config import RunConfig
from experiments.sweeps import rows

CONFIG = PRESETS["smoke"].replace(method="streaming_diloco").resolve()


@dataclasses.dataclass(frozen=True)
class Grown(RunConfig):
    """What a later version may have."""

    new_axis: int = 1


def grow(monkeypatch, config, **new):
    """Return a configuration of a version with one field more."""
    monkeypatch.setitem(SECTIONS, "run", Grown)
    run = Grown(**dataclasses.asdict(config.run), **new)
    return dataclasses.replace(config, run=run)


def test_a_new_field_at_its_default_changes_no_key(monkeypatch, tmp_path):
    config = CONFIG.replace(seed=3)
    run, setting = rows.run_key(config.to_json()), rows.setting_key(CONFIG.to_json())
    rows.append(tmp_path, {"row": "of another version", "config": config.to_json()})
    now = grow(monkeypatch, config)
    assert rows.run_key(now.to_json()) == run
    assert rows.setting_key(now.to_json()) == setting
    (found,) = rows.read(tmp_path)
    assert (found["row"], found["setting"]) == (run, setting)
    assert found["config"]["run"]["new_axis"] == 1
    # And one that is not at its default does.
    other = grow(monkeypatch, config, new_axis=2)
    assert rows.run_key(other.to_json()) != run


def test_runs_that_differ_in_anything_have_keys_of_their_own():
    others = [
        CONFIG, CONFIG.replace(seed=1), CONFIG.replace(steps=33),
        CONFIG.replace(outer_lr=0.7), CONFIG.replace(compress="ef+int4"),
        CONFIG.replace(inner_lr=1e-3), dataclasses.replace(CONFIG, preset="tiny"),
    ]  # fmt: skip
    found = [rows.run_key(other.to_json()) for other in others]
    assert len(set(found)) == len(others)
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
    # Both have the key that the run has today, of what was not at its default.
    today = {"row": rows.run_key(written), "config": {**written, **was}}
    rows.append(tmp_path, today)
    (found,) = rows.read(tmp_path)
    assert found["row"] != today["row"]
    rows.append(tmp_path, {**today, "config": written})
    assert [row["row"] for row in rows.read(tmp_path)] == [found["row"], today["row"]]


def test_an_argument_that_was_not_given_may_have_a_default_one_day(monkeypatch):
    written = rows.completed(CONFIG.to_json())
    defaults = dict(cc.methods.defaults("streaming_diloco"))
    assert defaults["max_delay_steps"] is written["method"]["max_delay_steps"] is None
    defaults["max_delay_steps"] = 9
    monkeypatch.setattr(cc.methods, "defaults", lambda method: defaults)
    now = CONFIG.to_json()
    now["method"]["max_delay_steps"] = 9
    assert rows.run_key(rows.completed(written)) != rows.run_key(now)
