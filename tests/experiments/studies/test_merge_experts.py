"""`merge_experts` end to end: what it reports, its files, wrong flags."""

import dataclasses
import json
import math

import pytest

from cocodc_jax.run.presets import PRESETS
from experiments.studies import merge_experts
from experiments.studies.merge_experts import Routing


@pytest.fixture(scope="module")
def merged(call_once, corpus, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("merged")
    flags = [
        "--preset=smoke", "--steps=16", "--top_k=1",
        "--prefix_tokens=8", "--references=data_parallel", "--num_layers=1", *corpus,
        f"--workdir={workdir}",
    ]  # fmt: skip
    out, _ = call_once(merge_experts, *flags)
    return workdir, flags, out


def read(workdir):
    return json.loads((workdir / "merge.json").read_text())


def test_every_way_to_merge_is_reported(merged):
    workdir, _, out = merged
    found = read(workdir)
    assert found["partition"] == "source"
    rows = found["models"]
    assert list(rows) == [
        *(f"expert {r}" for r in range(4)), "mean of experts", "parameter average",
        "even mixture", "mean of logits", "posterior", "posterior, top 1",
        "data_parallel",
    ]  # fmt: skip
    loss = {name: row["loss"] for name, row in rows.items()}
    assert all(0 < x < math.log(272) for x in loss.values())
    alone = [loss[f"expert {r}"] for r in range(4)]
    assert len(set(alone)) == 4
    assert loss["mean of experts"] == pytest.approx(sum(alone) / 4)
    # Jensen's inequality, for both means.
    assert loss["even mixture"] < loss["mean of experts"]
    assert loss["mean of logits"] < loss["mean of experts"]
    passes = {name: row["passes_per_token"] for name, row in rows.items()}
    # Four experts read 8 tokens of 32, one the others.
    assert passes["posterior, top 1"] == 1.75
    assert (passes["expert 0"], passes["even mixture"]) == (1, 4)
    for name in rows:
        assert name in out


def test_a_mean_of_parameters_is_what_the_run_evaluated(merged):
    workdir, _, _ = merged
    rows = read(workdir)["models"]
    for name, folder in (
        ("parameter average", workdir),
        ("data_parallel", workdir / "references" / "data_parallel"),
    ):
        summary = json.loads((folder / "summary.json").read_text())
        assert rows[name]["loss"] == summary["eval_loss"]


def test_routers_are_even_within_the_prefix(merged):
    rows = read(merged[0])["models"]

    def within(row):
        return 32 * row["loss"] - 24 * row["loss_after_prefix"]

    for name in ("posterior", "posterior, top 1"):
        assert within(rows[name]) == pytest.approx(within(rows["even mixture"]))
        assert rows[name]["loss"] != rows["even mixture"]["loss"]


def test_the_same_command_again_trains_nothing(merged, call):
    workdir, flags, _ = merged
    before = read(workdir)
    (workdir / "merge.json").unlink()
    out, _ = call(merge_experts, *flags)
    assert "step " not in out
    assert read(workdir) == before


@pytest.mark.parametrize(("flags", "line"), [
    ("--top_k=5", "--top_k=5 must be from 1 to regions=4"),
    ("--references=diloco,nodiloco", "--references=diloco,nodiloco names"),
    ("--region_id=1", "--region_id=1 is of one elastic region, and this program"),
    ("--num_processes=2 --process_id=0 --coordinator_address=here:1",
     "--num_processes=2 is not possible: this program is one process"),
    ("--outer_lr=0.5", "--outer_lr=0.5 has no meaning for apart"),
    ("--slow_beta=0.5", "--slow_beta=0.5 has no "),
])  # fmt: skip
def test_wrong_flags(flags, line, refused, tmp_path):
    words = ["--preset=smoke", *flags.split(), f"--workdir={tmp_path}"]
    assert refused(merge_experts, *words).startswith(line)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("regions", "wrong", "message"), [
    (1, {}, "regions=1 leaves nothing to merge"),
    (4, {"top_k": 0}, "top_k=0 must be from 1 to regions=4"),
    (4, {"prefix_tokens": 0}, "prefix_tokens=0 must be from 1 to 31"),
    (4, {"prefix_tokens": 32}, "prefix_tokens=32 must be from 1 to 31"),
    (4, {"temperature": 0.0}, "temperature=0.0 must be positive"),
])  # fmt: skip
def test_routing_that_does_not_fit_the_run(regions, wrong, message):
    routing = Routing(top_k=1, prefix_tokens=8, temperature=1.0)
    config = PRESETS["smoke"].replace(regions=regions)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(routing, **wrong).check(config)


def test_a_workdir_of_another_method(merged, refused, corpus):
    taken = merged[0] / "references" / "data_parallel"
    flags = ["--preset=smoke", "--steps=16", "--num_layers=1", f"--workdir={taken}"]
    told = "holds a run of another configuration (method: data_parallel, not apart"
    assert told in refused(merge_experts, *flags, *corpus)
