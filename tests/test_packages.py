"""Packages as users find them: names, version, and requirements of the core."""

import importlib
import pkgutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import cocodc_jax
from cocodc_jax._extras import MissingExtraError, extra

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ["cocodc_jax"] + [
    module.name
    for module in pkgutil.walk_packages(cocodc_jax.__path__, "cocodc_jax.")
    if module.ispkg and not module.name.startswith("cocodc_jax.experiments")
]

CORE_ONLY = """
import sys

class Missing:
    \"\"\"As if what comes with extras were not installed.\"\"\"

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

EXTRAS = {"flax", "orbax", "yaml", "rich", "grain", "sentencepiece", "tokenizers",
          "tensorflow_datasets", "matplotlib", "tensorboardX"}
sys.meta_path.insert(0, Missing)
"""


@pytest.mark.parametrize("name", PACKAGES)
def test_dir_shows_the_public_names(name):
    package = importlib.import_module(name)
    inside = [m for m in pkgutil.iter_modules(package.__path__) if m.name[0] != "_"]
    public = {*getattr(package, "__all__", [module.name for module in inside])}
    if package is cocodc_jax:
        public |= {module.name for module in inside if module.ispkg}
    assert dir(package) == sorted(public)
    assert all(hasattr(package, name) for name in public)


def test_the_version_stands_once():
    assert cocodc_jax.__version__ == metadata.version("cocodc_jax")

    named = subprocess.run(
        ["git", "grep", "-l", f'"{PROJECT["version"]}"', "--", "*.py", "*.toml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert named.stdout.split() == ["pyproject.toml"]


def test_the_core_needs_jax_and_optax_alone():
    names = {need.partition(">")[0] for need in PROJECT["dependencies"]}
    assert names == {"jax", "optax"}
    assert (ROOT / "cocodc_jax" / "py.typed").exists()


SAYS = {
    "cc.Checkpoints('/tmp/none', 1)": "orbax is not installed: pip install "
    "'cocodc_jax[train]'",
    "cc.models.init_params": "flax is not installed: pip install 'cocodc_jax[train]'",
    "cc.network.load_topology": "pip install 'cocodc_jax[train]'",
    "cc.data.load(cc.data.DataConfig(), 2)": "pip install 'cocodc_jax[data]'",
    "cc.report.save_png": "pip install 'cocodc_jax[report]'",
}


def test_the_core_works_without_extras_and_names_a_missing_one():
    code = """
import cocodc_jax as cc
for package in (cc, cc.transforms, cc.sync, cc.methods):
    for name in package.__all__:
        if name != "Checkpoints":  # Orbax writes them.
            getattr(package, name)
cc.train.make_evaluate, cc.network.simulate_method, cc.network.make_plan
assert not EXTRAS & {name.partition(".")[0] for name in sys.modules}
for code in SAYS:
    try:
        eval(code)
    except ModuleNotFoundError as error:
        print(error)
""".replace("SAYS", str(list(SAYS)))
    done = subprocess.run(
        [sys.executable, "-c", CORE_ONLY + code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr

    lines = done.stdout.splitlines()
    for (code, end), line in zip(SAYS.items(), lines, strict=True):
        assert line.endswith(end), code


def test_a_module_of_ours_that_is_missing_is_no_extra():
    with pytest.raises(ModuleNotFoundError) as raised, extra("train"):
        importlib.import_module("cocodc_jax.no_such_module")
    assert raised.type is ModuleNotFoundError
    with pytest.raises(MissingExtraError, match=r"no_such_module is not .*\[data\]'"):
        with extra("train"), extra("data"):
            importlib.import_module("no_such_module")
