import pytest

from cocodc_jax.report.curves import steps_to_loss
from experiments.simulation.described import read_curve

CURVE = [(0, 4.0), (10, 3.0), (20, 3.2), (30, 2.0)]


def test_first_crossing_counts():
    assert steps_to_loss(CURVE, 4.5) == 0.0
    assert steps_to_loss(CURVE, 3.5) == 5.0
    assert steps_to_loss(CURVE, 2.6) == pytest.approx(25.0)
    assert steps_to_loss(CURVE, 1.9) is None


def test_curves_are_read(tmp_path):
    lines = tmp_path / "metrics.jsonl"
    lines.write_text('{"step": 1, "eval_loss": 3.0}\n{"step": 2, "loss": 9}\n')
    assert read_curve(lines) == [(1.0, 3.0)]
    assert read_curve(lines, "loss") == [(2.0, 9.0)]
    pairs = tmp_path / "curve.json"
    pairs.write_text("[[1, 3], [2, 2.5]]")
    assert read_curve(pairs) == [(1.0, 3.0), (2.0, 2.5)]


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "eval_loss": 3.0}\n{"step": 2, "eval_lo')
    assert read_curve(path) == [(1.0, 3.0)]


def test_bad_curves_name_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="metrics.jsonl has no line with both 'step'"):
        read_curve(path)
    path.write_text("[1, 2]")
    with pytest.raises(
        ValueError, match="metrics.jsonl is not a loss curve: TypeError"
    ):
        read_curve(path)
    path.write_text('{"step": 1, "eval_lo\n{"step": 2}\n')
    with pytest.raises(
        ValueError, match="not a loss curve: .*metrics.jsonl, line 1 is n"
    ):
        read_curve(path)
    path.write_text("[[1, 2.0], [1, 1.0]]")
    with pytest.raises(ValueError, match="loss curve steps must increase"):
        read_curve(path)
