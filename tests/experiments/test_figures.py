"""The pictures of README and docs: made by their command, small, and shown there."""

import itertools
import pathlib
import re

import pytest
from matplotlib.text import Text

from cocodc_jax.report import points
from experiments.results import figures

ROOT = pathlib.Path(__file__).parents[2]


def test_the_command_makes_the_pictures_that_readme_shows(tmp_path):
    figures.main(tmp_path)
    readme = (ROOT / "README.md").read_text()
    shown = re.findall(r"!\[[^\]]*\]\(experiments/results/([\w.]+)\)", readme)
    page = (ROOT / "docs" / "results" / "methods.md").read_text()
    shown += re.findall(r"_static/pictures/(readme_[\w.]+)", page)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(shown) == sorted(made)
    assert "python -m experiments.results.figures" in readme

    for name, data in made.items():
        assert data.startswith(b"\x89PNG")
        assert len(data) < 150_000
        assert (figures.RESULTS / name).stat().st_size < 150_000


def test_fragments_cross_beside_the_steps_and_a_whole_model_does_not():
    above, below = figures.crossing().axes
    assert above.get_title(loc="left") == "diloco: 100 steps in 30.8 s"
    assert below.get_title(loc="left") == "streaming_diloco: 100 steps in 25.0 s"
    assert above.get_xlim() == below.get_xlim()
    assert above.get_xlim()[1] == pytest.approx(30.8, abs=0.1)


def test_no_name_lies_on_another_or_on_a_point():
    methods = {
        f"method_number_{i}": {
            "bytes_sent_per_region": {"mean": 1e6 * (1 + i % 3)},
            "eval_loss": {"mean": 2 + 0.01 * i},
        }
        for i in range(12)
    } | {
        "far": {"bytes_sent_per_region": {"mean": 1e9}, "eval_loss": {"mean": 1.5}},
        "silent": {"bytes_sent_per_region": {"mean": 0}, "eval_loss": {"mean": 2.5}},
    }
    figure = points.last_loss_by_bytes(methods)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.get_xlabel().endswith("; nothing: silent 2.500")
    texts = [text for text in axes.texts if text.get_text()]
    assert {text.get_text() for text in texts} == methods.keys() - {"silent"}
    renderer = figure.canvas.get_renderer()

    # Of the words alone, without the lines to the points.
    boxes = [Text.get_window_extent(text, renderer) for text in texts]
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    places = axes.transData.transform(axes.collections[0].get_offsets())
    assert not any(box.contains(*place) for box in boxes for place in places)
