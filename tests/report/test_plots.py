"""The structure of plots; their looks were checked by eye."""

import dataclasses
import io
import itertools

import matplotlib
import numpy as np
import pytest
from rich.console import Console

from cocodc_jax.report import experts, plots
from cocodc_jax.report.progress import RunProgress
from tests.report.made_up import run

METHODS = ("data_parallel", "diloco", "streaming_diloco", "cocodc")
RUNS = [run(m, s, 1.5 + 0.1 * i) for i, m in enumerate(METHODS) for s in range(3)]


def test_each_method_has_one_line_with_its_name_at_the_end():
    figure = plots.loss_by_steps(RUNS)
    whole, late = figure.axes
    assert len(whole.lines) == len(late.lines) == len(METHODS)
    assert [text.get_text().split()[0] for text in late.texts] == list(METHODS)
    assert late.get_xlim() == (150.0, 300.0)


def test_end_labels_keep_apart_also_where_lines_meet():
    heights = plots.spread([0.5, 0.5, 0.5, 0.1], gap=0.06)
    gaps = [b - a for a, b in itertools.pairwise(sorted(heights))]
    assert min(gaps) >= 0.06 - 1e-9
    # Labels of all methods are still next to the axes, in order.
    heights = plots.spread([0.0, *29 * [0.9]], gap=0.06)
    assert (min(heights), max(heights)) == (0.0, 1.0)
    assert heights == sorted(heights)


def test_bytes_are_on_a_log_axis_with_every_method_named():
    figure = plots.loss_by_bytes(RUNS)
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert [line.get_label() for line in axes.lines] == list(METHODS)


def test_runs_that_send_nothing_have_no_plot_of_bytes():
    alone = run("snoo")
    summary = alone.summary | {"bytes_sent_per_region": 0}
    with pytest.raises(ValueError, match="no run has sent anything"):
        plots.loss_by_bytes([dataclasses.replace(alone, summary=summary)])


def test_gantt_has_a_row_for_each_fragment_and_none_without_syncs():
    figure = plots.fragments_in_flight(RUNS)
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(METHODS[1:])
    assert len(figure.axes[0].get_yticks()) == 1
    assert len(figure.axes[1].get_yticks()) == 4
    with pytest.raises(ValueError, match="no run has a sync"):
        plots.fragments_in_flight([run("data_parallel")])


def test_gantt_shows_the_full_run_or_says_how_much_it_leaves_out(monkeypatch):
    (axes,) = plots.fragments_in_flight([run("diloco")]).axes
    assert axes.get_xlim()[1] == pytest.approx(300, abs=1)
    assert axes.get_xlabel() == "inner steps"

    monkeypatch.setattr(plots, "MAX_SYNCS", 4)
    (axes,) = plots.fragments_in_flight([run("diloco")]).axes
    assert axes.get_xlim()[1] == pytest.approx(120, abs=1)
    assert axes.get_xlabel() == (
        "inner steps: the first 120 of 300, at most 4 syncs of a method"
    )


def routed(method, load):
    """A run with two records of two regions, a layer and two experts."""
    record = {"kind": "experts", "divergence": 0.25, "dead": 1.0}
    made_run = run(method)
    records = [record | {"step": step} | load for step in (10, 20)]
    return dataclasses.replace(made_run, records=[*made_run.records, *records])


def test_experts_have_a_map_of_each_method_that_recorded_loads():
    assert experts.figures([run("diloco")]) == {}

    few = routed("cocodc", {"load_regions": [[[1.5, 0.5]], [[2.0, 0.0]]]})
    np.testing.assert_allclose(experts.loads(few), [[[1.5, 0.5]], [[2.0, 0.0]]])

    ((figure, caption),) = experts.figures(
        [run("diloco"), few, routed("streaming_diloco", {})]
    ).values()

    above, below = figure.subfigs
    divergence, dead = above.axes
    assert divergence.get_legend_handles_labels()[1] == ["cocodc", "streaming_diloco"]
    assert [line.get_ydata().tolist() for line in dead.lines] == [[1.0, 1.0]] * 2

    (image,) = below.axes[0].images
    np.testing.assert_allclose(image.get_array(), [[1.5, 0.5], [2.0, 0.0]])
    assert "last quarter" in caption


def test_a_plot_has_the_same_png_twice_without_pyplot():
    one = plots.png_bytes(plots.loss_by_bytes(RUNS))
    other = plots.png_bytes(plots.loss_by_bytes(RUNS))
    assert one == other
    assert one.startswith(b"\x89PNG")
    assert not matplotlib._pylab_helpers.Gcf.figs


def test_a_plot_is_saved_as_png(tmp_path):
    plots.save_png(plots.fragments_in_flight(RUNS), str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").stat().st_size > 1000


def progress(terminal, times):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=140)
    clock = iter(times).__next__
    with RunProgress(4, label="diloco", console=console, clock=clock) as bar:
        for step in (1, 2, 4):
            bar.update(step, 2.5, 1234.0, in_flight=1, bytes_sent=2e6)
    return out.getvalue()


def test_plain_lines_now_and_then_and_at_the_end():
    lines = progress(terminal=False, times=itertools.count(step=1.0)).splitlines()
    assert [line.split()[2] for line in lines] == ["1/4", "4/4"]
    assert "loss 2.500  1.23 k tokens/s  1 in flight  2.00 MB sent" in lines[0]


def test_the_time_left_is_of_steps_without_compilation():
    out = io.StringIO()

    with RunProgress(100, console=Console(file=out, width=140)) as bar:
        bar.update(2, 2.5, None, in_flight=1, bytes_sent=2e6)
    assert out.getvalue() == "step 2/100  loss 2.500  1 in flight  2.00 MB sent\n"
    with RunProgress(100, console=Console(file=out, width=140)) as bar:
        bar.update(40, 2.5, 512.0, in_flight=1, bytes_sent=2e6, step_s=2.0)
    assert out.getvalue().endswith(
        "512 tokens/s  1 in flight  2.00 MB sent  2 min 00 s left\n"
    )


def test_a_narrow_terminal_keeps_the_numbers(monkeypatch):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    with RunProgress(48, label="cocodc seed 0", console=console) as bar:
        bar.update(48, 2.936, 21_400.0, 1, 1.23e6, step_s=0.1)
    assert (
        "cocodc seed 0 48/48 loss 2.936  21.4 k tokens/s  1.23 MB sent"
        in out.getvalue()
    )


def test_a_terminal_shows_a_progress_bar():
    text = progress(terminal=True, times=itertools.count(step=1.0))
    assert "4/4" in text
    assert "━" in text
