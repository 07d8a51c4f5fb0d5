"""The notebook of the tour: clean as it is committed, and it runs from top to bottom.

Jupyter is not needed: cells are plain Python, run one after another in one namespace.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

NOTEBOOK = pathlib.Path(__file__).parents[2] / "experiments" / "tour.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_it_has_no_outputs_and_installs_only_what_is_missing():
    for cell in CELLS:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
    namespace = {}
    exec(CODE[0], namespace)  # With the package here: no pip, which would fail.
    assert namespace["SOURCE"] == "..[all]"
    for number, code in enumerate(CODE):
        compile(code, f"cell {number}", "exec")


@pytest.mark.slow
def test_it_runs(tmp_path):
    script = tmp_path / "tour.py"
    script.write_text("\n\n".join(CODE))
    env = os.environ | {"TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    words = [sys.executable, script]
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("late ")

    for name in ("diloco", "streaming_diloco", "cocodc"):
        assert any(line.startswith(f"{name} ") for line in lines[3:]), done.stdout
        assert list(tmp_path.glob(f"cocodc_tour_*/{name}/summary.json"))
