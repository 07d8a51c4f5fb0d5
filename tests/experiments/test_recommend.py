"""Plans for a dozen networks: each prints one command, which `train` can run."""

import functools
import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from absl.flags import FlagValues

from cocodc_jax.network.links import Link, uniform
from cocodc_jax.run.config import flags
from experiments import recipe, recommend, simulate, train

ROOT = pathlib.Path(__file__).parents[2]

# Parameters, regions, Gbit/s, milliseconds one way, seconds of a step; then tau and the
# compressor that are to be expected.
NETWORKS = [
    ((49_952, 2, 100, 0.01, 0.05), (0, None)),
    ((49_952, 2, 1, 5, 0.05), (1, "ef+sign")),
    ((49_952, 4, 0.1, 30, 0.05), (8, "ef+sign")),
    ((49_952, 4, 0.01, 150, 0.05), (24, "ef+sign")),
    ((49_952, 8, 0.01, 50, 0.25), (1, "ef+sign")),
    ((49_952, 8, 0.0001, 50, 0.25), None),
    ((838_784, 4, 100, 0.1, 0.25), (0, None)),
    ((838_784, 4, 1, 50, 0.25), (1, "ef+sign")),
    ((838_784, 4, 0.02, 200, 0.25), (8, "ef+sign")),
    ((6.5e6, 4, 0.1, 50, 1), (1, "ef+sign")),
    ((1e9, 4, 1, 50, 1), (8, "ef+sign")),
    ((1e9, 4, 0.01, 50, 1), None),
]
HOPELESS = (1e9, 4, 1e-6, 50, 0.01)
# Cuts a command down to a model, batches and a tokenizer that take seconds; what the
# plan chose stays: regions, method, messages, intervals and rates.
SMALLEST = [
    "--num_layers=4",
    "--width=32",
    "--mlp_width=64",
    "--num_heads=2",
    "--num_kv_heads=2",
    "--tokenizer=bytes",
    "--sequence_length=32",
    "--batch_per_region=1",
    "--warmup_steps=2",
    "--eval_every=0",
    "--eval_batches=16",
]


@functools.cache
def recommended(network):
    params, regions, gbps, latency_ms, step_s = network
    links = uniform(regions, Link(gbps, latency_ms / 1000))
    return recommend.recommend(links, params, [step_s])


@pytest.fixture
def read(monkeypatch):
    """Reads a command's flags as `train` does; returns the configuration."""

    def read(command):
        python, minus_m, program, *words = shlex.split(command)
        assert (python, minus_m, program) == ("python", "-m", "experiments.train")
        monkeypatch.setattr(flags, "FLAGS", FlagValues())
        monkeypatch.setattr(sys, "argv", ["train", *words])
        train.define()
        flags.parse(sys.argv)
        return train.read_flags()[0]

    return read


@pytest.mark.parametrize(("network", "expected"), NETWORKS)
def test_each_network_has_one_command_that_train_can_run(read, network, expected):
    choice = recommended(network)
    config = read(choice.command)
    assert config.run.regions == network[1]

    values = {"method": config.method.method, "inner_lr": config.optimizer.inner_lr}
    values |= config.method.values
    assert choice.flags.items() <= values.items()
    assert config.method.build()

    if expected is not None:
        assert (choice.delay_steps, choice.flags.get("compress")) == expected


def test_measured_settings_are_not_called_extrapolated():
    near = recommended((838_784, 4, 1, 50, 0.25)).explain()
    assert "Extrapolated" not in near


def test_settings_that_were_not_measured_are_named():
    far = recommended((1e9, 17, 100, 1, 1)).explain()
    assert "Extrapolated, not measured: parameters 1,000,000,000" in far
    assert "regions 17 (measured: 2 to 16)" in far
    assert "the nearest preset, with 1.28 G parameters" in far


def test_a_delay_longer_than_the_measured_ones_is_named():
    late = recommended(HOPELESS)
    assert late.delay_steps > recipe.LONGEST_DELAY
    assert f"a delay of {late.delay_steps} steps (measured: up to 32)" in late.explain()


def test_if_regions_must_wait_the_least_wait_is_chosen_and_reported():
    choice = recommended(HOPELESS)
    assert choice.stall_share > recommend.NO_WAIT
    assert re.search(r"Regions wait for \d+\.\d% of the simulated", choice.explain())
    assert "No known setting keeps regions from waiting" in choice.explain()


def test_one_region_needs_no_plan():
    with pytest.raises(ValueError, match="a plan needs at least two regions"):
        recommended((1e6, 1, 1, 50, 1))


def test_the_program_prints_the_command_last_and_writes_the_plan(capsys, tmp_path):
    words = ["--plan", "--params=838784", "--step_time_s=0.25", f"--workdir={tmp_path}"]
    assert simulate.main(["simulate", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    choice = recommended((838_784, 4, 1, 50, 0.25))
    assert lines == [*choice.explain().splitlines(), choice.command]
    assert json.loads((tmp_path / "plan.json").read_text())["flags"] == choice.flags


def test_the_page_that_helps_to_choose_has_the_recommended_flags():
    page = (ROOT / "docs/start/choose.md").read_text()
    command = page.partition("```bash\n")[2].partition("```")[0]
    flags = dict(re.findall(r"--(\w+)=(\S+)", command.replace("\\\n", " ")))
    wanted = recipe.setting().flags
    assert {n: type(x)(flags[n]) for n, x in wanted.items()} == wanted


@pytest.mark.slow
@pytest.mark.parametrize("network", [network for network, _ in NETWORKS])
def test_the_commands_run(network, tmp_path):
    choice = recommended(network)
    slot_steps = choice.flags.get("sync_interval", 4) // 4
    steps = slot_steps + choice.delay_steps + 2  # One fragment is merged at least.
    words = [*shlex.split(choice.command)[1:], *SMALLEST]
    command = [sys.executable, *words, f"--steps={steps}", f"--workdir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["regions"]) == (steps, network[1])
    assert summary["parameters"] < 60_000
    assert summary["bytes_sent_per_region"] > 0
    trained = json.loads((tmp_path / "config.json").read_text())
    chosen = trained["method"] | {"inner_lr": trained["optimizer"]["inner_lr"]}
    assert choice.flags.items() <= chosen.items()
    merged = (tmp_path / "metrics.jsonl").read_text().count('"kind": "sync"')
    assert merged or choice.flags["method"] == "data_parallel"
