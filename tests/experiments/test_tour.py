"""The notebook of the tour is committed without outputs; `test_wheel.py` runs it."""

import json
import pathlib

NOTEBOOK = pathlib.Path(__file__).parents[2] / "experiments" / "tour.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_the_tour_has_no_outputs_and_installs_only_missing_packages():
    for cell in CELLS:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)

    namespace = {}
    exec(CODE[0], namespace)  # With the package here: no pip, which would fail.
    assert namespace["SOURCE"] == "..[all]"

    for number, code in enumerate(CODE):
        compile(code, f"cell {number}", "exec")
