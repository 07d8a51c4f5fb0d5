"""Trainers that own their step, with `cc.stacked`: `pytest -m trainers`.

The children run in the environments that `environments.py` makes. The tests compare the
parameters that they leave.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.integrations import environments, figures

pytestmark = pytest.mark.trainers

TRAINERS = ("tunix", "kauldron", "levanter", "nanodo")

# Of float32 parameters that moved by more than 0.02.
TOLERANCE = 5e-6


@pytest.fixture(scope="module", params=TRAINERS)
def folder(request, tmp_path_factory):
    """All runs of one trainer."""
    is_own = request.param == "nanodo"  # In the environment of pytest.
    python = sys.executable if is_own else environments.python_of(request.param)
    if not os.path.exists(python):
        pytest.fail(
            f"{python} is not there; make the environment by "
            f"{environments.command_for(request.param)}",
            pytrace=False,
        )

    folder = tmp_path_factory.mktemp(request.param)
    finish(start(python, folder, "stacked_runs.py", request.param, folder))
    return folder


def start(python, folder, script, *words):
    """Start a child in a folder, without settings of pytest."""
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(environments.ROOT),
    }
    return subprocess.Popen(
        [str(word) for word in (python, f"tests/integrations/{script}", *words)],
        cwd=environments.ROOT,
        env=env,
        stdout=sys.stderr,
    )


def finish(*children):
    try:
        assert [child.wait(1800) for child in children] == [0] * len(children)
    finally:
        for child in children:
            child.kill()


def params_of(folder, run):
    return dict(np.load(folder / f"{run}.npz"))


def trainer_of(folder):
    return facts_of(folder)["trainer"]


def facts_of(folder):
    return json.loads((folder / "facts.json").read_text())


def difference(one, other):
    assert one.keys() == other.keys()
    return max(float(np.abs(one[path] - other[path]).max()) for path in one)


@pytest.mark.parametrize(
    ("run", "plain"), [("diloco", "data_parallel"), ("streaming", "plain")]
)
def test_the_parameters_are_a_plain_loops(folder, run, plain):
    """DiLoCo at H 1 is data parallel; streaming is a loop in NumPy."""
    ours = params_of(folder, run)
    other = params_of(folder, plain)
    moved = difference(other, params_of(folder, "start"))
    seen = {run: difference(ours, other), f"{run}_moved": moved}
    figures.record(trainer_of(folder), **seen)
    assert difference(ours, other) < TOLERANCE
    assert moved > 0.02


@pytest.mark.parametrize("run", ["cocodc", "one_bit"])
def test_other_methods_run_and_learn(folder, run):
    fact = facts_of(folder)[run]
    assert np.isfinite(fact["losses"]).all()
    assert fact["losses"][-1] < fact["losses"][0]
    plain = facts_of(folder)["streaming"]["bytes_sent"]
    figures.record(trainer_of(folder), **{run: figures.learning(fact, plain)})
    if run == "one_bit":
        assert fact["bytes_sent"] < plain / 20


def test_a_trainers_own_checkpoint_goes_on_bit_for_bit(folder):

    assert facts_of(folder)["in_flight"] == 1
    apart = difference(params_of(folder, "resumed"), params_of(folder, "one_bit"))
    figures.record(
        trainer_of(folder),
        resumed=apart,
        versions=facts_of(folder)["versions"],
    )
    assert apart == 0

    full, resumed = (facts_of(folder)[run]["losses"] for run in ("one_bit", "resumed"))
    assert len(resumed) < len(full)
    assert resumed == full[-len(resumed) :]


@pytest.mark.parametrize("folder", ["levanter"], indirect=True)
def test_elastic_regions_of_levanters_own_loop(folder):
    """The documentation's launcher is a loop in NumPy, and resumes bit for bit."""
    python = environments.python_of("levanter")
    (folder / "key").write_bytes(b"a shared secret of 32 bytes ....")
    (folder / "key").chmod(0o600)
    script = "levanter_region.py"
    both = [(script, folder, index, 2, "full", 13) for index in range(2)]
    finish(*(start(python, folder, *words) for words in both))
    for run in (("alone", 13), ("cut", 6, 13)):
        finish(start(python, folder, script, folder, 0, 1, *run))

    plain = params_of(folder, "plain_of_each")
    apart = []
    for index in range(2):
        one = params_of(folder, f"full_{index}")
        apart.append(difference(one, {path: x[index] for path, x in plain.items()}))
    figures.record("levanter", regions=max(apart))
    assert max(apart) < TOLERANCE

    assert difference(params_of(folder, "alone_0"), params_of(folder, "cut_0")) == 0
    losses, rest = (
        json.loads((folder / f"{run}_0.json").read_text()) for run in ("alone", "cut")
    )
    assert rest == losses[6:]
