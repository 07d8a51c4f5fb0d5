"""The code in README.md runs as it stands, and keeps the promised size."""

import pathlib
import re
import subprocess
import sys

import pytest

TEXT = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_there_are_blocks_and_the_first_two_are_short():
    assert len(BLOCKS) == 4
    for block in BLOCKS[:2]:
        assert len([line for line in block.splitlines() if line.strip()]) < 40


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs(number):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCKS[number]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if number == 0:
        losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
        assert max(losses) < 0.3, done.stdout
    if number == 1:
        assert float(done.stdout.split()[0]) < 1e-2, done.stdout
