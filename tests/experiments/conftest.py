"""Real commands, run as a user runs them."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from experiments import train

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Flags of a small corpus, a copy of this package's source."""
    folder = tmp_path_factory.mktemp("data")
    shutil.copytree(ROOT / "cocodc_jax", folder / "text")
    return [f"--dataset=text:{folder / 'text'}", f"--data_dir={folder / 'prepared'}"]


@pytest.fixture(scope="session")
def command():
    """Starts `python -m MODULE FLAGS...` at the root of the checkout."""

    def start(module, *flags, env=None):
        words = [sys.executable, "-m", module, *map(str, flags)]
        out = subprocess.PIPE
        environment = os.environ | (env or {})
        return subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=out, stderr=out, text=True
        )

    return start


@pytest.fixture(scope="session")
def run(command):
    """Runs a command to its end, checks its exit code, returns (stdout, stderr)."""

    def finish(module, *flags, code=0):
        process = command(module, *flags)
        stdout, stderr = process.communicate(timeout=300)
        assert process.returncode == code, stderr
        return stdout, stderr

    return finish


@pytest.fixture(scope="module")
def programs_shared():
    """Let runs of `train` in this process share equal programs, as `compare` does.

    A run that resumes in another process compiles them again (test_processes.py).
    """
    sessions = []
    prepare = train.prepare

    def remember(*args, **kwargs):
        session = prepare(*args, earlier=sessions[-4:], **kwargs)
        sessions.append(session)
        return session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "prepare", remember)
        yield
