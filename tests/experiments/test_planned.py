"""`train --plan=auto` trains the plan's choice."""

import json
import re
import sys
import tomllib

import pytest
from absl.flags import FlagValues

from cocodc_jax.network.links import Link, uniform
from cocodc_jax.run.config import flags
from experiments import planned, recommend, train
from experiments.sweeps import advice, grid

from .test_advice import CURVES, cell
from .test_advice import cells as cells  # a fixture

UNUSUAL = """
[base]
preset = "smoke"
[groups.streaming]
method = "streaming_diloco"
compress = "ef+int4"
sync_interval = 16
delay_steps = 4
merge_feedback = true
fragment_strategy = "balanced"
inner_optimizer = "muon"
inner_lr = 0.012
"""
LINKS = "{regions: [here, there], default: {bandwidth_gbps: 1, latency_ms: 1}}"


@pytest.fixture
def plan(cells):
    return ("--plan=auto", f"--plan_frontier={cells}", "--plan_step_s=1")


@pytest.fixture
def read(monkeypatch):
    def read(*words):
        monkeypatch.setattr(flags, "FLAGS", FlagValues())
        monkeypatch.setattr(sys, "argv", ["train", "--preset=smoke", *words])
        train.define()
        flags.parse(sys.argv)
        return train.read_flags()[0]

    return read


def test_fast_links_and_slow_ones_have_other_plans(read, plan, capsys):
    fast = read(*plan, "--plan_gbps=1000", "--plan_latency_ms=0")
    slow = read(*plan, "--plan_gbps=0.0001", "--seed=3")

    assert fast.method.method == "data_parallel"
    assert slow.method.method == "streaming_diloco"
    wanted = {"sync_interval": 16, "delay_steps": 3, "compress": "ef+int4"}
    assert wanted.items() <= slow.method.values.items()
    assert slow.run.seed == 3

    assert read("--method=diloco").method.method == "diloco"  # No plan, no choice.
    printed = capsys.readouterr().err
    assert "plan: streaming_diloco ef+int4: loss 2.400 (of 2 seeds)" in printed
    assert "--method=streaming_diloco --sync_interval=16" in printed


def test_without_losses_the_plan_is_the_recommended_setting(read, capsys):
    config = read("--plan=auto", "--plan_step_s=1")
    wanted = recommend.recommend(uniform(4, Link(1, 0.05)), 49_952, [1.0]).flags
    assert config.method.method == wanted.pop("method") == "streaming_diloco"
    assert config.optimizer.inner_lr == wanted.pop("inner_lr")
    assert wanted.items() <= config.method.values.items()
    assert "plan: K = 4 fragments, H = 4 steps, tau = 1" in capsys.readouterr().err
    with pytest.raises(ValueError, match="outer_lr=0.5 is what --plan=auto chooses"):
        read("--plan=auto", "--plan_step_s=1", "--outer_lr=0.5")


def test_sizes_that_were_not_measured_are_named(read, plan, capsys):
    read(*plan, "--steps=480")
    assert "extrapolated" not in capsys.readouterr().err
    read(*plan, "--steps=480", "--regions=32", "--eval_batches=32")
    warning = capsys.readouterr().err.splitlines()[-1]
    expected = "plan: extrapolated, not measured: regions 32 (measured: "
    assert warning.startswith(expected)


def test_a_run_longer_than_the_measured_ones_gets_a_warning(read, plan, capsys):
    read(*plan, "--steps=40")
    assert "syncing often" not in capsys.readouterr().err
    read(*plan, "--steps=480")
    warning = capsys.readouterr().err.splitlines()[-1]
    assert warning == (
        "plan: these losses are of runs of 20 steps, and this one has 480: with more, "
        "syncing often gains less"
    )


def test_every_setting_of_a_chosen_cell_is_taken(read, tmp_path):
    """Also settings that are seldom tuned: only the links are not the cell's."""
    table = tomllib.loads(UNUSUAL)
    (setting,) = grid.from_table(table).settings
    path = tmp_path / "cells.json"
    path.write_text(json.dumps({"cells": [cell(setting, [125.0] * 4, CURVES[1])]}))
    plan = ("--plan=auto", f"--plan_frontier={path}", "--plan_step_s=1")
    config = read(*plan)
    assert config.method.resolve() == setting.config.method.resolve()
    assert config.optimizer == setting.config.optimizer

    with pytest.raises(ValueError, match="merge_feedback=False is what --plan=auto"):
        read(*plan, "--merge_feedback=false")


def test_the_plan_is_that_of_the_simulator(read, cells):
    advices = advice.advise(
        advice.read(cells), uniform(4, Link(0.01, 0.2)), 12_345.0, [0.5]
    )
    assert {"method", "inner_lr"} <= advices[0].choice.flags.keys()
    assert advices[0].choice.flags.keys() <= set(planned._CHOSEN)


@pytest.mark.parametrize(("words", "message"), [
    ("--plan=always", "plan='always' is unknown; use 'auto' or 'none'"),
    ("--plan_step_s=1", "plan_step_s=1.0 has no meaning without --plan=auto"),
    ("--plan=auto", "plan=auto needs --plan_step_s: Seconds of an inner step"),
    ("--plan=auto --plan_frontier=x", "plan=auto needs --plan_step_s: Sec"),
    ("--plan=auto --plan_frontier=x --plan_step_s=1 --method=co2",
     "method=co2 is what --plan=auto chooses"),
    ("--plan=auto --plan_frontier=x --plan_step_s=0",
     "plan_step_s=0.0 must be positive"),
    ("--plan=auto --plan_frontier=/no/x --plan_step_s=1",
     "--plan_frontier=/no/x: No such file"),
])  # fmt: skip
def test_unsupported_plans_are_refused_by_name(read, words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(*words.split())


def test_a_cell_with_more_fragments_than_blocks_is_not_chosen(read, cells, tmp_path):
    slow = ("--plan=auto", "--plan_step_s=1", "--plan_gbps=0.0001")
    assert read(*slow, f"--plan_frontier={cells}").method.build().num_fragments == 4
    small = read(*slow, f"--plan_frontier={cells}", "--num_layers=2")
    assert small.method.method == "data_parallel"
    path = tmp_path / "cut.json"
    path.write_text(json.dumps({"cells": json.loads(cells.read_text())["cells"][1:]}))
    with pytest.raises(ValueError, match=r"cut.json has no .* at most num_layers=2"):
        read(*slow, f"--plan_frontier={path}", "--num_layers=2")


def test_links_that_are_not_the_runs_are_refused(read, plan, tmp_path):
    with pytest.raises(ValueError, match="plan_gbps=0.0, .*bandwidth"):
        read(*plan, "--plan_gbps=0")
    path = tmp_path / "links.yaml"
    path.write_text(LINKS)

    with pytest.raises(ValueError, match="has 2 regions, the run has 4"):
        read(*plan, f"--plan_links={path}", "--regions=4")
    with pytest.raises(ValueError, match="plan_gbps=2.0 and --plan_links exclude"):
        read(*plan, f"--plan_links={path}", "--plan_gbps=2")

    two = read(*plan, f"--plan_links={path}", "--regions=2")
    assert json.dumps(two.to_json())
