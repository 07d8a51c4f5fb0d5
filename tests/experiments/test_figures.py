"""The pictures of README and docs: made by their command, small, and shown there."""

import itertools
import json
import pathlib
import re

import pytest
from matplotlib.text import Text

from cocodc_jax.report import palette, points
from experiments.results import figures, studies

ROOT = pathlib.Path(__file__).parents[2]


def test_the_command_makes_the_pictures_that_readme_and_docs_show(tmp_path):
    figures.main(tmp_path)
    readme = (ROOT / "README.md").read_text()
    shown = set(re.findall(r"!\[[^\]]*\]\(experiments/results/([\w.]+)\)", readme))
    for page in (ROOT / "docs").rglob("*.md"):
        shown |= set(re.findall(r"_static/pictures/([\w.]+)", page.read_text()))

    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    # No picture is kept that no command makes, or that no page shows.
    kept = {path.name for path in figures.RESULTS.glob("*.png")}
    assert made.keys() == kept == shown
    assert "python -m experiments.results.figures" in readme

    for name, data in made.items():
        assert data.startswith(b"\x89PNG")
        assert len(data) < 160_000
        assert (figures.RESULTS / name).stat().st_size < 160_000


def test_the_first_table_of_readme_has_the_figures_of_its_plot():
    readme = (ROOT / "README.md").read_text()
    cells = json.loads((figures.RESULTS / figures.TUNED).read_text())["cells"]
    names = {
        "**recommended**": palette.RECIPE,
        "Streaming DiLoCo": "streaming_diloco",
        "DiLoCo": "diloco",
        "data parallel": "data_parallel",
    }
    rows = re.findall(r"^\| ([^|]+): [^|]+\| (.+) \| (.+) \| (.+) \|$", readme, re.M)

    assert [name for name, *_ in rows] == list(names)

    for name, sent, loss, steps in rows:
        column = figures.tuned_column(cells, names[name])
        assert len(column["seeds"]) == 5
        assert float(sent.split()[0]) == pytest.approx(column["bytes"] / 1e6, rel=0.01)
        half = column["loss"]["half"]
        assert loss == f"{column['loss']['mean']:.3f} ± {half:.3f}"
        to_reference = column["steps_to_reference"]
        assert steps == (f"{to_reference['mean']:.0f}" if to_reference else "never")


def test_the_recipe_is_marked_and_every_contender_is_named():
    (axes,) = figures.tuned().axes
    labels = [text.get_text() for text in axes.texts]
    assert len(labels) == len(figures.CONTENDERS)
    assert sum(label.startswith("recommended") for label in labels) == 1
    widths = {line.get_color(): line.get_linewidth() for line in axes.lines[::2]}
    assert max(widths, key=widths.get) == palette.COLORS[palette.RECIPE]


def test_rules_have_the_colors_of_their_methods():
    table = json.loads((figures.RESULTS / "delay_cost.json").read_text())
    panels = studies.left_of_delay(table).axes
    assert len(panels) == 3
    for axes in panels:
        colors = {line.get_label(): line.get_color() for line in axes.lines}
        mix = colors["Streaming DiLoCo: mix by halves"]
        assert mix == palette.COLORS["streaming_diloco"]
        assert colors["CoCoDC: isotropic compensation"] == palette.COLORS["cocodc"]

    best = studies.best_strength(table["rows"], "isotropic", delay_steps=10)
    others = [row for row in table["rows"] if row["rule"] == "isotropic"]
    recovered = [r["recovered"]["mean"] for r in others if r["delay_steps"] == 10]
    assert best["recovered"]["mean"] == max(recovered)


def test_laws_go_through_the_losses_that_they_were_fitted_to():
    fitted = json.loads((figures.RESULTS / "scaling.json").read_text())
    for law in fitted.values():
        off = [
            studies.predict(law, N=x["N"], M=x["M"], H=x["H"]) / x["loss"] - 1
            for x in law["observations"]
        ]
        # The files have the residual, the root of the mean square of logarithms.
        assert max(map(abs, off)) < 3 * law["residual"]

    (axes,) = studies.laws(fitted).axes
    colors = {line.get_color() for line in axes.lines}
    assert colors == {palette.COLORS["diloco"], palette.COLORS["data_parallel"]}


def test_the_figure_shows_that_fragments_cross_during_steps():
    above, below = figures.crossing().axes
    assert above.get_title(loc="left") == "diloco: 100 steps in 30.8 s"
    assert below.get_title(loc="left") == "streaming_diloco: 100 steps in 25.0 s"
    assert above.get_xlim() == below.get_xlim()
    assert above.get_xlim()[1] == pytest.approx(30.8, abs=0.1)


def test_no_name_overlaps_another_or_a_point():
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
