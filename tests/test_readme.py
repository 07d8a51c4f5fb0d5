"""The code in README.md and CONTRIBUTING.md runs as it stands; README's is short."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def blocks_of(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


README, RECIPES = blocks_of("README.md"), blocks_of("CONTRIBUTING.md")


def num_lines(block):
    return len([line for line in block.splitlines() if line.strip()])


def run_code(block):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_blocks_and_the_first_two_are_short():
    assert len(README) == 4
    for block in README[:2]:
        assert num_lines(block) < 40


def test_there_are_five_recipes_and_each_is_short():
    assert len(RECIPES) == 5
    for block in RECIPES:
        assert num_lines(block) < 30


@pytest.mark.parametrize("number", range(len(README)))
def test_block_runs(number):
    printed = run_code(README[number])
    if number == 0:
        losses = [float(line.split()[1]) for line in printed.splitlines()]
        assert max(losses) < 0.3, printed
    if number == 1:
        assert float(printed.split()[0]) < 1e-2, printed


@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_recipe_runs(number):
    run_code(RECIPES[number])
