import pytest

from cocodc_jax.network.links import Link, LinkChange, uniform
from cocodc_jax.network.losses import read_curve, seconds_to_loss, steps_to_loss
from cocodc_jax.network.simulator import Workload, simulate
from cocodc_jax.network.syncs import Schedule

CURVE = [(0, 4.0), (10, 3.0), (20, 3.2), (30, 2.0)]


def test_first_crossing_counts():
    assert steps_to_loss(CURVE, 4.5) == 0.0
    assert steps_to_loss(CURVE, 3.5) == 5.0
    assert steps_to_loss(CURVE, 2.6) == pytest.approx(25.0)
    assert steps_to_loss(CURVE, 1.9) is None


def test_steps_must_increase():
    with pytest.raises(ValueError, match="loss curve steps must increase"):
        steps_to_loss([(1, 2.0), (1, 1.0)], 1.5)
    with pytest.raises(ValueError, match="loss curve steps must increase"):
        steps_to_loss([], 1.5)


def timeline(num_steps, changes=()):
    # DiLoCo, H = 4, 1 s a step, 3 s a sync: 7 s for four steps.
    work = Workload((2e9,), (1.0, 1.0))
    topology = uniform(2, Link(8.0, 0.5), changes)
    return simulate(topology, work, Schedule("diloco", 1, 4), num_steps)


def test_seconds_within_the_simulated_steps():
    assert seconds_to_loss(timeline(8), CURVE, 3.5) == 8.0  # four steps, sync, one step
    assert seconds_to_loss(timeline(8), CURVE, 3.65) == pytest.approx(3.5 + 3 * 0.5)


def test_seconds_beyond_them_go_on_at_the_last_pace():
    assert seconds_to_loss(timeline(8), CURVE, 2.6) == pytest.approx(25 / 4 * 7)
    assert seconds_to_loss(timeline(8), CURVE, 1.0) is None


def test_an_early_outage_is_not_taken_for_the_pace():
    slow_start = timeline(8, (LinkChange(4.5, 10.0, bandwidth_factor=0.0),))
    assert slow_start.sim_s == 24.0
    seconds = seconds_to_loss(slow_start, CURVE, 2.6)
    assert seconds == pytest.approx(24 + 17 / 4 * 7)


def test_curves_are_read(tmp_path):
    lines = tmp_path / "metrics.jsonl"
    lines.write_text('{"step": 1, "eval_loss": 3.0}\n{"step": 2, "loss": 9}\n\n')
    assert read_curve(lines) == [(1.0, 3.0)]
    assert read_curve(lines, "loss") == [(2.0, 9.0)]
    pairs = tmp_path / "curve.json"
    pairs.write_text("[[1, 3], [2, 2.5]]")
    assert read_curve(pairs) == [(1.0, 3.0), (2.0, 2.5)]


def test_bad_curves_name_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}')
    with pytest.raises(ValueError, match="metrics.jsonl has no line with both 'step'"):
        read_curve(path)
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match="metrics.jsonl is no loss curve: TypeError"):
        read_curve(path)
