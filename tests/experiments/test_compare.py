"""`experiments.compare` end to end: the same for every method, and a report of it."""

import json
import re
import time

import pytest

from cocodc_jax.report.records import read_records
from cocodc_jax.run.config.presets import PRESETS
from experiments import compare


@pytest.fixture(scope="module")
def compared(call_once, corpus, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("compared")
    flags = [
        "--preset=smoke",
        "--methods=data_parallel,streaming_diloco",
        "--steps=32",
        "--num_layers=2",
        "--num_fragments=2",
        "--log_every=2",  # As far apart as events: another length is another program.
        "--seeds=1",
        *corpus,
        f"--workdir={workdir}",
    ]
    out, _ = call_once(compare, *flags)

    return workdir, flags, out


def test_methods_are_compared_on_the_same_footing(compared):
    workdir, _, _ = compared
    methods = json.loads((workdir / "comparison.json").read_text())["methods"]
    assert list(methods) == ["data_parallel", "streaming_diloco"]
    runs = [row["runs"][0] for row in methods.values()]

    for same in ("tokens", "steps", "parameters", "seed", "regions"):
        assert len({run[same] for run in runs}) == 1

    one, other = (
        read_records(workdir / f"{name}_seed0" / "metrics.jsonl") for name in methods
    )
    # Equal until the first merge: the same start and data.
    losses = [
        next(r["loss_regions"] for r in records if r["kind"] == "train")
        for records in (one, other)
    ]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=0.05)

    for records in (one, other):
        assert [r["step"] for r in records if r["kind"] == "eval"] == [16, 32]

    # Data parallel sends every gradient, streaming each fragment every 16 steps.
    parameters = runs[0]["parameters"]
    assert runs[0]["bytes_sent_per_region"] == 32 * 4 * parameters
    assert runs[1]["bytes_sent_per_region"] == 2 * 4 * parameters


def test_report_is_written_and_shown(compared):
    workdir, _, out = compared
    for name in ("loss_by_steps", "loss_by_bytes", "fragments_in_flight"):
        assert (workdir / f"{name}.png").read_bytes().startswith(b"\x89PNG")

    page = (workdir / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "streaming_diloco" in page
    assert "<h2>Settings of each run</h2>" in page
    assert "win at the bytes sent" in page or "beats another" in page
    assert re.search(r"cocodc_jax [\d.]+, jax [\d.]+.*; \d{4}-\d\d-\d\d\.", page)

    assert "streaming_diloco" in out
    assert str(workdir / "report.html") in out.replace("\n", "")


def test_a_method_that_diverges_has_a_row_of_its_own(compared, call):
    """The others are reported, and the exit code is 1."""
    workdir, flags, _ = compared
    target = "--target_method=diloco"
    others = [flag for flag in flags if not flag.startswith("--num_fragments")]

    methods = "--methods=data_parallel,diloco"
    try:
        out, err = call(compare, *others, methods, "--outer_lr=1e30", target, code=1)
        assert re.search(r"^error: diloco, seed 0: .* at step \d+ in ", err, re.M)
        assert "warning: target_method='diloco' diverged" in err
        assert re.search(r"^data_parallel +\d", out, re.M)
        assert re.search(r"^diloco +diverged", out, re.M)

        comparison = json.loads((workdir / "comparison.json").read_text())
        assert list(comparison["methods"]) == ["data_parallel"]
        assert " at step " in comparison["diverged"]["diloco"]
        assert "diverged: seed 0: " in (workdir / "report.html").read_text()
    finally:
        call(compare, *flags)  # The other tests read its files.


def test_a_repeated_command_trains_nothing(compared, call):
    workdir, flags, _ = compared
    before = (workdir / "comparison.json").read_text()
    began = time.monotonic()
    out, _ = call(compare, *flags)
    assert "step 16/32" not in out
    assert json.loads((workdir / "comparison.json").read_text()) == json.loads(before)
    assert time.monotonic() - began < 120


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--methods=diloco,dilocoo"], "--methods=diloco,dilocoo names 'diloco"),
        (["--methods="], "--methods='' is empty"),
        (["--methods=diloco,diloco+lion"], "--methods=diloco,diloco+lion names"),
        (["--methods=diloco+muon,diloco+muon"], "--methods=diloco+muon,diloco"),
        (["--seeds=0"], "--seeds=0 must be at least 1"),
        (
            ["--methods=diloco,streaming_diloco", "--rank=8"],
            "--rank=8 has no meaning for diloco, streaming_diloco, which take",
        ),
        (
            ["--methods=demo,diloco+muon", "--slow_beta=0.9"],
            "--slow_beta=0.9 has no meaning for the inner optimizer muon or sgd",
        ),
        # A flag that one of them takes is no error; this is the next one.
        (
            ["--methods=diloco,streaming_diloco", "--mixing_alpha=0.25", "--seeds=0"],
            "--seeds=0 must be at least 1",
        ),
        (["--methods=all", "--curvature=none", "--sync_intervl=3"], "Unknown c"),
    ],
)
def test_wrong_flags_are_refused_in_a_line(flags, line, refused, tmp_path):
    error = refused(compare, "--preset=smoke", *flags, f"--workdir={tmp_path}")
    assert error.startswith(line)
    assert not list(tmp_path.iterdir())


def test_a_method_with_another_inner_optimizer_has_a_row_of_its_own(refused, tmp_path):
    methods = "diloco,diloco+muon,data_parallel+muon,all"
    flags = ["--preset=smoke", "--seeds=0", "--target_method=diloco+muon"]
    flags.append(f"--workdir={tmp_path}")

    error = refused(compare, f"--methods={methods}", *flags)
    assert error.startswith(f"--methods={methods[:-4]},data_parallel,")
    assert "names one twice" in error  # All of them have diloco.

    methods = "diloco,diloco+muon,muloco"
    error = refused(compare, f"--methods={methods}", *flags)
    assert error.startswith("--seeds=0")  # No other difference.

    assert compare._methods(PRESETS["smoke"]) == {
        "diloco": {"method": "diloco"},
        "diloco+muon": {"method": "diloco", "inner_optimizer": "muon"},
        "muloco": {"method": "muloco"},
    }


def test_the_recipe_is_trained_with_a_fragment_at_every_step(refused, tmp_path):
    flags = ["--preset=smoke", "--num_fragments=2", "--seeds=0"]
    refused(compare, "--methods=recipe", *flags, f"--workdir={tmp_path}")

    base = PRESETS["smoke"].where(num_fragments=2)
    (leaves,) = compare._methods(base).values()

    # A value that a flag sets holds for all runs.
    assert "num_fragments" not in leaves
    method = base.replace(**leaves).method.build()
    assert (method.schedule.sync_interval, method.num_fragments) == (2, 2)
    assert leaves["compress"] == "ef+sign"
    assert leaves["inner_lr"] == 2 * base.optimizer.inner_lr


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("data_parallel", {"H": "\u2013", "K": "\u2013", "tau": "\u2013"}),
        ("diloco", {"H": "40", "compressor": "float32", "outer momentum": "0.9"}),
        ("streaming_diloco", {"H": "40", "K": "4", "tau": "5", "alpha": "0.5"}),
    ],
)
def test_settings_are_those_of_the_run(method, settings):
    settings_shown = compare.described(PRESETS["tiny"].replace(method=method))
    assert settings.items() <= settings_shown.items()
    assert settings_shown["inner optimizer"] == "adamw"
    assert settings_shown["inner rate"] == "0.002"
