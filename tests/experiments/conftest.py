"""Real commands, run as a user runs them."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Flags of a small corpus: this package's own source."""
    prepared = tmp_path_factory.mktemp("data")
    return [f"--dataset=text:{ROOT / 'cocodc_jax'}", f"--data_dir={prepared}"]


@pytest.fixture(scope="session")
def command():
    """Starts `python -m MODULE FLAGS...` at the root of the checkout."""

    def start(module, *flags):
        # Devices are the program's own business, not this process's.
        env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS",)}
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, flags)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture(scope="session")
def run(command):
    """Runs a command to its end and returns (exit code, stdout, stderr)."""

    def finish(module, *flags):
        process = command(module, *flags)
        stdout, stderr = process.communicate(timeout=300)
        return process.returncode, stdout, stderr

    return finish
