"""From a wheel, in a fresh environment outside of the checkout: what users install.

Builds the wheel and installs it twice, with what the package index has: as it is, and
with all extras.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

from experiments import commands

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[1]
PROGRAMS = list(commands.programs())

# Programs that print their help without any extra.
EXPLAINED = {"message-time", "timeline"}

# A transform alone, and a method around a loss, without any extra.
CORE = """
import jax, jax.numpy as jnp, numpy as np, optax
import cocodc_jax as cc
from cocodc_jax.transforms import delay_compensation

cc.use_cpu_devices(3)
optimizer = optax.chain(delay_compensation("outer_product", 0.5), optax.sgd(0.1))
w = jnp.ones(3)
state = optimizer.init(w)
updates, state = optimizer.update(w, state, w, stale_params=w - 0.1)
print(f"{state[0].correction_ratio:.2f}")

def loss_fn(params, batch, key):
    return jnp.mean((batch @ params["in"] @ params["out"]) ** 2), {}

params = {"in": jnp.ones((4, 2)), "out": jnp.ones((2, 2))}
method = cc.methods.get("cocodc", sync_interval=4, num_fragments=2, delay_steps=1)
program = cc.RegionProgram(
    loss_fn, optax.sgd(1e-3), method, params, 2, fragments=cc.cut(params, 2))
state = program.init(params, jax.random.key(0))
batches = iter([np.ones((2, 3, 4), np.float32)] * 8)
for state, output in cc.run_steps(program, state, batches, 8):
    pass
print(state.step, state.bytes_sent > 0, cc.__version__)
"""


def finish(*words, cwd):
    """Run a command as a user outside of the checkout does."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
    return subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env=kept,
        capture_output=True,
        text=True,
        check=False,
    )


def succeed(*words, cwd):
    done = finish(*words, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build from a copy of the tracked files, as a build leaves files behind."""
    copy, folder = (tmp_path_factory.mktemp(name) for name in ("copy", "wheel"))
    listed = succeed("git", "ls-files", cwd=ROOT).splitlines()
    for name in listed:
        if not name.startswith(("tests/", "experiments/results/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)

    pip = (sys.executable, "-m", "pip")
    succeed(*pip, "wheel", "--no-deps", "-w", folder, copy, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def install(requirement, folder):
    """Return the folder of the commands of a fresh environment."""
    venv.create(folder / "env", with_pip=True)
    commands = folder / "env" / "bin"
    succeed(commands / "python", "-m", "pip", "install", requirement, cwd=folder)
    return commands


@pytest.fixture(scope="module")
def core(wheel, tmp_path_factory):
    return install(wheel, tmp_path_factory.mktemp("core"))


@pytest.fixture(scope="module")
def everything(wheel, tmp_path_factory):
    return install(f"{wheel}[all]", tmp_path_factory.mktemp("all"))


def test_a_wheel_has_one_name_and_all_that_programs_read(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"cocodc_jax"}

    read = ("grids/example.toml", "networks/unequal.yaml", "launch/slurm.sbatch")
    for name in (
        "py.typed",
        "run/config/presets.py",
        *(f"experiments/{x}" for x in read),
    ):
        assert f"cocodc_jax/{name}" in names


def test_programs_are_listed_without_extras(core, tmp_path):
    listed = succeed(core / "cocodc", cwd=tmp_path)
    assert all(f"  {name} " in listed for name in PROGRAMS)


def test_the_core_runs_with_jax_and_optax_alone(core, tmp_path):
    out = succeed(core / "python", "-W", "error", "-c", CORE, cwd=tmp_path)
    ratio, state = out.splitlines()
    assert ratio == "0.05"
    assert state.startswith("8 True ")
    there = succeed(core / "python", "-m", "pip", "list", cwd=tmp_path)
    for name in ("flax", "orbax", "matplotlib", "tensorflow", "grain", "PyYAML"):
        assert name not in there


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_command_names_the_extra_that_it_lacks(core, tmp_path, name):
    done = finish(core / "cocodc", name, "--help", cwd=tmp_path)
    if name in EXPLAINED:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "is not installed: pip install 'cocodc_jax[" in done.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_command_explains_itself(everything, tmp_path, name):
    out = succeed(everything / "cocodc", name, "--help", cwd=tmp_path)
    assert f"cocodc {name}" in out
    assert "experiments." not in out


def test_commands_train_compare_and_start_processes(everything, tmp_path):
    """The tour, at the smallest size, on text of the package itself."""
    text = tmp_path / "text"
    shutil.copytree(ROOT / "cocodc_jax" / "sync", text)
    read = (f"--dataset=text:{text}", f"--data_dir={tmp_path / 'data'}")
    steps = ("--steps=8", "--sync_interval=4", "--warmup_steps=1", "--eval_every=0")
    small = ("--preset=smoke", *steps, *read)
    compared = ("--methods=diloco,cocodc", "--workdir=compared")
    cocodc = everything / "cocodc"

    out = succeed(cocodc, "compare", *small, *compared, cwd=tmp_path)
    assert "cocodc" in out
    page = (tmp_path / "compared" / "report.html").read_text()
    assert "cocodc compare --preset=smoke" in page

    train = ("--method=diloco", "--workdir=trained")
    started = ("launch-local", "--regions=2", "--", *small, *train)
    succeed(cocodc, *started, cwd=tmp_path)
    assert (tmp_path / "trained" / "process_1" / "metrics.jsonl").exists()

    done = finish(cocodc, "wan", "--", "--preset=tiny", cwd=tmp_path)
    assert "as in -- cocodc train --preset=tiny" in done.stderr


def test_the_notebook_runs(everything, tmp_path):
    cells = json.loads((ROOT / "experiments" / "tour.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]

    lines = succeed(
        everything / "python", "-c", "\n\n".join(code), cwd=tmp_path
    ).splitlines()

    assert lines[0].startswith("late ")
    for name in ("diloco", "streaming_diloco", "cocodc"):
        assert any(line.startswith(f"{name} ") for line in lines[3:]), lines
