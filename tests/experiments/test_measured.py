"""What plans say of sizes at which nothing was measured."""

import json
import pathlib

import pytest

import experiments
from experiments.sweeps import advice

RESULTS = pathlib.Path(experiments.__file__).parent / "results"


def of_the_recipe():
    """Columns of cells of one or two bits with error feedback, in any sweep."""
    for path in RESULTS.glob("*.json"):
        found = json.loads(path.read_text())
        for cell in found.get("cells", ()) if isinstance(found, dict) else ():
            sent = cell.get("flags", {}).get("compress") or ""
            if sent.startswith("ef+") and sent.endswith(("sign", "stat2")):
                yield from (c for c in cell["columns"].values() if c["config"])


def test_the_ranges_are_those_of_the_results():
    found = [
        {
            "parameters": column["parameters"],
            "regions": column["config"]["run"]["regions"],
            "tokens a parameter": column["tokens"] / column["parameters"],
        }
        for column in of_the_recipe()
    ]
    assert len(found) > 50
    for name, ends in advice.MEASURED.items():
        values = [each[name] for each in found]
        assert (min(values), max(values)) == pytest.approx(ends, rel=1e-2), name


@pytest.mark.parametrize("end", [0, 1])
def test_the_ends_are_inside_and_beyond_is_outside(end):
    factor = (0.9, 1.1)[end]
    ends = {name: pair[end] for name, pair in advice.MEASURED.items()}
    assert advice.warning(ends) is None
    beyond = {name: value * factor for name, value in ends.items()}
    assert len(advice.outside(beyond)) == len(beyond)
    assert (advice.warning(beyond) or "").startswith("extrapolated, not measured: par")
