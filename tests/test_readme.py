"""The code in README.md and CONTRIBUTING.md runs as it stands; README's is short."""

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def blocks_of(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


README, RECIPES = blocks_of("README.md"), blocks_of("CONTRIBUTING.md")


def num_lines(block):
    return len([line for line in block.splitlines() if line.strip()])


def start_code(block, folder, **variables):
    """Run a block as a script of its own, in a folder that is not the checkout."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", block],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process):
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return out


# Runs blocks one after another, each with names and devices of its own: to import what
# they need takes longer than most of them.
IN_TURN = """
import contextlib, io, json, sys, traceback
import jax, jax.extend.backend

for block in json.load(sys.stdin):
    out, error = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(block, "block", "exec"), {"__name__": "__main__"})
    except Exception:
        error = traceback.format_exc()
    print(json.dumps([out.getvalue(), error]), flush=True)
    jax.clear_caches()
    jax.extend.backend.clear_backends()
"""


def run_in_turn(blocks, folder):
    """Return what each block printed, and how it failed, if it did."""
    process = start_code(IN_TURN, folder)
    out, error = process.communicate(json.dumps(blocks), timeout=300)
    found = [json.loads(line) for line in out.splitlines()]
    assert len(found) == len(blocks), error
    return found


LOSS, LINEN, EQUINOX, PROCESSES, CHECKPOINTS, TRANSFORM, GALLERY, METHOD = range(8)
# The others are run by themselves.
TOGETHER = [LOSS, LINEN, EQUINOX, CHECKPOINTS, TRANSFORM, GALLERY, METHOD]


@pytest.fixture(scope="module")
def readme(tmp_path_factory):
    blocks = [README[number] for number in TOGETHER]
    found = run_in_turn(blocks, tmp_path_factory.mktemp("readme"))
    return dict(zip(TOGETHER, found, strict=True))


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    return run_in_turn(RECIPES, tmp_path_factory.mktemp("recipes"))


def test_there_are_blocks_and_what_comes_first_is_short():
    assert len(README) == 8
    for block in (README[LOSS], README[CHECKPOINTS], README[TRANSFORM]):
        assert num_lines(block) < 40


def test_there_are_five_recipes_and_each_is_short():
    assert len(RECIPES) == 5
    for block in RECIPES:
        assert num_lines(block) < 30


@pytest.mark.parametrize("number", TOGETHER)
def test_block_runs(number, readme):
    printed, error = readme[number]
    assert error is None, error
    words = [line.split() for line in printed.splitlines()]
    if number == LOSS:
        assert max(float(line[1]) for line in words) < 0.3, printed
    if number == LINEN:
        assert [line[0] for line in words] == ["20", "40", "60"]
        assert float(words[-1][1]) < 0.5, printed
    if number == EQUINOX:
        assert float(words[0][0]) < 0.3, printed
    if number == CHECKPOINTS:
        assert "schedule" in printed
        assert "inner optimizer" not in printed
    if number == TRANSFORM:
        assert float(words[0][0]) < 1e-2, printed


@pytest.mark.slow
def test_the_script_with_checkpoints_goes_on(tmp_path):
    whole = output_of(start_code(README[LINEN], tmp_path))
    shutil.rmtree(tmp_path / "checkpoints" / "60")  # The last two are kept.
    # Its batches are drawn anew, so that the numbers may differ.
    again = output_of(start_code(README[LINEN], tmp_path))
    steps = [[line.split()[0] for line in x.splitlines()] for x in (whole, again)]
    assert steps == [["20", "40", "60"], ["60"]]


def test_the_script_for_processes_does_the_same_as_two(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told = {
        "COCODC_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "COCODC_NUM_PROCESSES": "2",
    }
    alone = start_code(README[PROCESSES], tmp_path)
    both = [
        start_code(README[PROCESSES], tmp_path, COCODC_PROCESS_ID=str(i), **told)
        for i in range(2)
    ]
    printed = [output_of(process) for process in (alone, *both)]
    # What the collectives say of themselves has no such number, and may be anywhere.
    numbers = [re.findall(r"\d+\.\d+", text) for text in printed]
    assert numbers[0] == numbers[1] == numbers[2] != []


@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_recipe_runs(number, recipes):
    _, error = recipes[number]
    assert error is None, error
