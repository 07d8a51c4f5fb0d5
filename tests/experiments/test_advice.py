"""Recommendations of a sweep's frontier for a network, by hand."""

import dataclasses
import json
import pathlib
import tomllib

import pytest

import experiments
from cocodc_jax.network.links import Link, uniform
from experiments import simulate
from experiments.sweeps import advice, grid

# 1,000 parameters in float32, or in four bits; a fragment is a quarter of the model.
GRID = """
[base]
preset = "smoke"
[groups.every_step]
method = "data_parallel"
[groups.streaming]
method = "streaming_diloco"
compress = "ef+int4"
sync_interval = 16
delay_steps = 3
"""
SIZES = ([4000.0], [125.0] * 4)
CURVES = ([[10, 3.0, 40_000], [20, 2.0, 80_000]], [[10, 3.2, 310], [20, 2.4, 620]])
MBIT = 1e6 / 8  # Bytes a second.


def cell(setting, sizes, curve):
    config = setting.config.to_json()
    method = config["method"]["method"]
    column = {
        "curve": curve,
        "seeds": [0, 1],
        "diverged": [],
        "parameters": 1000,
        "fragment_bytes": sizes,
        "bytes_per_step": curve[-1][2] / 20,
        "config": config,
    }
    flags = {"method": method, "compress": "ef+int4" if len(sizes) > 1 else None}

    return {"flags": flags, "columns": {"published": column}}


@pytest.fixture
def cells(tmp_path):
    settings = grid.from_table(tomllib.loads(GRID)).settings
    made = map(cell, settings, SIZES, CURVES)
    path = tmp_path / "cells.json"
    path.write_text(json.dumps({"cells": list(made)}))
    return path


def test_on_fast_links_the_least_loss_wins(cells):
    links = uniform(4, Link(100, 0))
    first, second = advice.advise(advice.read(cells), links, 1000, [1.0], "ring")
    assert first.choice.label == "data_parallel float32"
    assert first.loss == pytest.approx(2, abs=1e-4)
    assert first.steps == pytest.approx(20, abs=1e-3)
    assert second.loss == 2.4
    assert first.stall_share == pytest.approx(0, abs=1e-5)


def test_on_slow_links_a_method_that_waits_does_fewer_steps(cells):
    """A ring of four: 6 messages of a quarter, each with its delay."""
    links = uniform(4, Link(0.001, 0.05))
    num = 100_000  # A hundred times the parameters that were run.
    first, second = advice.advise(advice.read(cells), links, num, [2.0], "ring")

    assert first.choice.flags["method"] == "streaming_diloco"
    assert (first.loss, first.steps) == (2.4, 20)

    sync_s = 6 * (4 * num / 4 / MBIT + 0.05)
    steps = 20 * 2 / (2 + sync_s)
    assert steps < 10

    assert second.steps == pytest.approx(steps, abs=1e-4)
    assert second.loss == float("inf")  # Never evaluated so early.
    assert "not evaluated so early, after" in second.explain()
    assert "inf" not in second.explain()
    assert second.stall_share == pytest.approx(sync_s / (2 + sync_s))
    assert second.bytes_per_step == 4 * num


def test_on_links_of_medium_speed_the_loss_is_read_off_the_curve(cells):
    links = uniform(4, Link(1, 0.05))
    _, second = advice.advise(advice.read(cells), links, 1000, [1.0], "ring")
    sync_s = 6 * (1000 / (1000 * MBIT) + 0.05)
    assert second.steps == pytest.approx(20 / (1 + sync_s), abs=1e-4)
    assert second.loss == pytest.approx(2 + (20 - second.steps) / 10, abs=1e-4)
    first, _ = advice.advise(advice.read(cells), links, 1000, [1.0])
    assert first.steps == pytest.approx(20 / (1 + 4 * 0.05), rel=2e-3)  # Directly.


def test_a_method_of_one_region_is_left_out(cells):
    first, second = advice.read(cells)
    config = first.config.replace(method="snoo", regions=1)
    links = uniform(4, Link(1, 0.05))
    alone = dataclasses.replace(first, config=config)
    (advised,) = advice.advise([alone, second], links, 1000, [1.0])
    assert advised.choice is second
    with pytest.raises(ValueError, match="the frontier has no method for regions=4"):
        advice.advise([alone], links, 1000, [1.0])


def test_the_plan_prints_the_choices_and_their_flags(cells, capsys, tmp_path):
    words = ["--plan", f"--frontier={cells}", f"--workdir={tmp_path}"]
    links = ["--params=1e5", "--bandwidth_gbps=0.001", "--step_time_s=2"]
    assert simulate.main(["simulate", *words, *links]) == 0
    out = capsys.readouterr().out

    assert (
        "\n1. streaming_diloco ef+int4: loss 2.400 (of 2 seeds) after 20 of 20" in out
    )
    assert "--method=streaming_diloco --sync_interval=16" in out
    assert "--compress=ef+int4" in out

    choices = json.loads((tmp_path / "advice.json").read_text())["choices"]
    assert [choice["loss"] for choice in choices] == [2.4, None]


def test_files_of_several_sweeps_are_one_frontier(cells, tmp_path):
    both = json.loads(cells.read_text())["cells"]
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, one in zip(paths, both, strict=True):
        path.write_text(json.dumps({"cells": [one]}))

    assert advice.read(",".join(map(str, paths))) == advice.read(cells)
    both[1]["columns"]["published"]["parameters"] = 2000
    paths[1].write_text(json.dumps({"cells": [both[1]]}))

    message = "has runs of 1000 parameters, 20 steps, 10240 tokens and 2000 parameters"
    with pytest.raises(ValueError, match=message):
        advice.read(",".join(map(str, paths)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "is no cells.json of experiments.sweep (KeyError('cells'))"),
        ('{"cells": []}', "has no cell whose seeds all ended well"),
        (None, "No such file or directory"),
    ],
)
def test_an_invalid_file_is_named(text, message, tmp_path, refused):
    path = tmp_path / "cells.json"
    if text is not None:
        path.write_text(text)
    assert message in refused(simulate, "--plan", f"--frontier={path}")


RESULTS = pathlib.Path(experiments.__file__).parent / "results"


def of_the_recipe():
    """Columns of cells of one or two bits with error feedback, in any sweep."""
    for path in RESULTS.glob("*.json"):
        table = json.loads(path.read_text())
        for cell in table.get("cells", ()) if isinstance(table, dict) else ():
            sent = cell.get("flags", {}).get("compress") or ""
            if sent.startswith("ef+") and sent.endswith(("sign", "stat2")):
                yield from (c for c in cell["columns"].values() if c["config"])


def test_the_ranges_are_those_of_the_results():
    rows = [
        {
            "parameters": column["parameters"],
            "regions": column["config"]["run"]["regions"],
            "tokens a parameter": column["tokens"] / column["parameters"],
        }
        for column in of_the_recipe()
    ]
    assert len(rows) > 50

    for name, ends in advice.MEASURED.items():
        values = [row[name] for row in rows]
        assert (min(values), max(values)) == pytest.approx(ends, rel=1e-2), name


@pytest.mark.parametrize("end", [0, 1])
def test_values_beyond_the_measured_ranges_get_a_warning(end):
    factor = (0.9, 1.1)[end]
    ends = {name: pair[end] for name, pair in advice.MEASURED.items()}
    assert advice.warning(ends) is None
    beyond = {name: value * factor for name, value in ends.items()}
    warning = advice.warning(beyond) or ""
    assert warning.count(" (measured: ") == len(beyond)
    assert warning.startswith("extrapolated, not measured: par")
