"""Make the environment of a real trainer, one command:

    python tests/integrations/environments.py {maxtext,tunix,kauldron,levanter}

It needs `uv` and Python 3.12. The environment goes beside the checkout, into
`../envs/NAME`, or into `$COCODC_TRAINERS/NAME`; the tests under `pytest -m trainers`
look for it there. Packages are those of one date, so that it can be made again.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATE = "2026-11-28"

# MaxText's wheel requires nothing by itself, and its extras (`tpu`, `cuda12`) pin the
# world. Named are the packages that its trainer imports. `jax[tpu]` brings libtpu, a
# compiler; nothing needs a TPU.
MAXTEXT = """
    maxtext==0.2.5 jax[tpu]==0.12.* absl-py aqtp drjax etils flax grain
    huggingface-hub jaxtyping jinja2 ml-collections ml-dtypes numpy omegaconf optax
    orbax-checkpoint packaging pathwaysutils pillow psutil pydantic pyyaml qwix
    sentencepiece sympy tensorboardX tiktoken tokamax tokenizers transformers
"""
# What elastic regions need of this package's own extras.
OWN = ("fsspec", "pyzmq")
TRAINERS = {
    "maxtext": (*MAXTEXT.split(), *OWN),
    "tunix": ("google-tunix==0.1.7", "jax==0.12.*", *OWN),
    "kauldron": ("kauldron==1.4.4", "jax==0.12.*", *OWN),
    # A build of one day. It wants JAX below 0.12 and Optax below 0.2.7.
    "levanter": ("marin-levanter==0.2.227.dev40316220070", *OWN),
}


def python_of(name: str) -> Path:
    """Return the interpreter of an environment, which may not exist."""
    folder = os.environ.get("COCODC_TRAINERS") or ROOT.parent / "envs"
    return Path(folder) / name / "bin" / "python"


def command_for(name: str) -> str:
    """Return the command that makes an environment."""
    return f"python tests/integrations/environments.py {name}"


def make(name: str) -> None:
    """Make an environment, with this checkout installed in it."""
    uv = shutil.which("uv")
    if uv is None:
        raise SystemExit("uv is not installed; run: pip install uv")
    python = python_of(name)
    folder = python.parents[1]
    subprocess.run([uv, "venv", "--clear", "--python", _base(), folder], check=True)

    install = [uv, "pip", "install", "--python", python]
    dated = [*install, "--exclude-newer", DATE]
    subprocess.run([*dated, *TRAINERS[name]], check=True)
    # Only its metadata matters: tests put the checkout that they are of on PYTHONPATH.
    subprocess.run([*install, "--no-deps", "-e", ROOT], check=True)
    print(f"made {folder}; now: pytest -m trainers tests/integrations")


def _base() -> str:
    """Return a Python 3.12; pyenv hides those that are not its chosen one."""
    hidden = sorted(Path.home().glob(".pyenv/versions/3.12.*/bin/python3.12"))
    return str(hidden[-1]) if hidden else "3.12"


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in TRAINERS:
        raise SystemExit(f"usage: {command_for('NAME')}, NAME one of {[*TRAINERS]}")
    make(sys.argv[1])
