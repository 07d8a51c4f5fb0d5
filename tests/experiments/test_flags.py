"""Flags of a program: what they build, and how a wrong one is answered."""

import subprocess
import sys

import pytest

PROGRAM = """
from experiments import flags
flags.define()
def main():
    with flags.usage_errors():
        config = flags.config()
    print(config.method.method, config.model.width, config.run.seed, config.data.seed)
flags.run_main(main)
"""


def call(*arguments):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_run_is_its_preset_with_the_flags_given():
    done = call("--preset=smoke", "--method=diloco", "--width=64", "--seed=3")
    assert done.stdout.split() == ["diloco", "64", "3", "3"]


def test_help_explains_every_flag():
    text = call("--help").stdout
    for name in ("delay_steps", "outer_lr", "inner_lr", "regions", "workdir", "width"):
        assert f"--{name}" in text or f"--[no]{name}" in text
    assert "inner steps from a sync's start" in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--preset=tinny"], "error: --preset='tinny' is unknown"),
        (["--method=dilocoo"], "error: --method='dilocoo' is unknown"),
        (["--delay_step=3"], "error: Unknown command line flag 'delay_step'. Did you"),
        (["--steps=many"], "error: flag --steps=many"),
        (["train"], "error: unexpected argument 'train'"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(arguments, line):
    done = call(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1
