"""The plot of one loss a model: its structure; its looks were judged by eye."""

import pytest

from cocodc_jax.report import dots


def test_a_row_a_model_from_the_top_with_its_number():
    figure = dots.losses(
        {"expert 0": 2.0, "average": 3.25, "mixture": 1.5}, ["expert 0"]
    )
    (axes,) = figure.axes
    assert [t.get_text() for t in axes.get_yticklabels()] == [
        "expert 0",
        "average",
        "mixture",
    ]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines] == [
        (2.0, 0),
        (3.25, 1),
        (1.5, 2),
    ]
    assert [text.get_text() for text in axes.texts] == ["2.000", "3.250", "1.500"]
    bottom, top = axes.get_ylim()
    assert bottom > top
    grey, *others = [line.get_color() for line in axes.lines]
    assert grey not in others


@pytest.mark.parametrize("values", [{"one": 1.0}, {"one": 1.0, "same": 1.0}])
def test_losses_that_do_not_differ_still_have_an_axis(values):
    low, high = dots.losses(values).axes[0].get_xlim()
    assert low < 1.0 < high
