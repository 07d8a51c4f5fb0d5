"""Spikes of the loss: they are found, noise is not, and a run rolls back."""

import itertools
import json

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax import methods
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.train.checkpoint import Checkpoints
from cocodc_jax.train.hooks import Cadence
from cocodc_jax.train.spikes import LossSpikeError, Spikes, SpikeWatch
from tests.program import tiny


def test_a_spike_by_hand():
    """Losses 1, 2, 3, 4, 9 over and over: median 3, MAD 1; 20 is 17 / 1.4826 off."""
    watch = Spikes(10.0)
    step = 0
    for loss in [1.0, 2.0, 3.0, 4.0, 9.0] * 4:
        step += 1
        assert watch.observe(step, np.array([3.0, loss]), 2) == []

    assert watch.observe(21, np.array([3.0, 20.0]), 2) == []
    assert watch.observe(22, np.array([3.0, 3.0]), 2) == []
    assert watch.observe(23, np.array([3.0, 20.0]), 2) == []

    (spike,) = watch.observe(24, np.array([3.0, 20.0]), 2)
    assert (spike.step, spike.region, spike.loss, spike.usual) == (24, 3, 20.0, 3.0)
    assert spike.score == pytest.approx(17 / 1.4826)
    assert watch.observe(25, np.array([3.0, 20.0]), 2) == []  # The same spike.

    for step in range(26, 32):
        assert watch.observe(step, np.array([3.0, 3.0]), 2) == []

    spikes = [watch.observe(s, np.array([3.0, np.nan]), 2) for s in range(32, 35)]
    assert [len(x) for x in spikes] == [0, 0, 1]
    assert spikes[-1][0].loss is None


@settings(deadline=None, max_examples=6)
@given(st.integers(0, 2**31), st.floats(0.01, 0.2))
def test_a_falling_noisy_loss_has_none(seed, noise):
    rng = np.random.default_rng(seed)
    watch = Spikes(10.0)
    for step in range(200):
        losses = 2 + 3 * np.exp(-step / 50) + noise * rng.normal(size=2)
        assert watch.observe(step, losses, 0) == []


def test_a_restored_detector_finds_the_same_spikes():
    rng = np.random.default_rng(0)
    losses = rng.normal(3, 0.1, (60, 2))
    losses[45:] += 5

    whole = Spikes(8.0)
    expected = [whole.observe(i, x, 0) for i, x in enumerate(losses)]
    assert sum(map(len, expected)) == 2

    parts = Spikes(8.0)
    for i, x in enumerate(losses):
        if i == 46:
            known = json.loads(json.dumps(parts.to_json()))
            parts = Spikes(8.0)
            parts.continue_from(known)
        assert parts.observe(i, x, 0) == expected[i]


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="spike_zscore=-1.0 must be a positive number"):
        SpikeWatch(-1.0)
    with pytest.raises(ValueError, match="spike_zscore=0 finds no spikes"):
        SpikeWatch(0.0, rolls_back=True)


PARAMS = {"w": np.zeros(3, np.float32)}


def batches(first):
    """Those of steps 33 to 36 are far away."""
    for step in itertools.count(first):
        rng = np.random.default_rng(step)
        far = 100 if 32 <= step < 36 else 0
        yield (far + rng.normal(size=(2, 8, 3))).astype(np.float32)


@pytest.fixture(scope="module")
def program():
    def loss_fn(params, batch, key):
        return ((params["w"][None] - batch) ** 2).mean(), {}

    method = methods.get("diloco", sync_interval=4)
    return RegionProgram(loss_fn, optax.sgd(0.1), method, PARAMS, 2)


def run(program, folder, spikes, skipped=0):
    state = program.init(PARAMS, jax.random.key(0))
    return tiny.train_in(
        folder,
        program,
        state,
        lambda step: batches(step + skipped),
        44,
        cadence=Cadence(log_every=4, checkpoint_every=20),
        spikes=spikes,
    )


def test_a_spike_is_recorded_and_changes_no_number(program, tmp_path):
    watched, records = run(program, tmp_path / "watched", SpikeWatch(10.0))
    plain, without = run(program, tmp_path / "plain", SpikeWatch())
    spikes = [r for r in records if r["kind"] == "spike"]
    assert [(r["region"], r["step"]) for r in spikes] == [(0, 35), (1, 35)]
    assert [r for r in records if r["kind"] != "spike"] == without
    jax.tree.map(
        np.testing.assert_array_equal, watched.state.region, plain.state.region
    )


def test_a_run_rolls_back_from_a_spike_and_skips_its_data(program, tmp_path):
    spikes = SpikeWatch(10.0, rolls_back=True)
    with pytest.raises(LossSpikeError, match="last good checkpoint: step 20"):
        run(program, tmp_path, spikes)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step == 20
    result, records = run(program, tmp_path, spikes, skipped=20)
    assert result.state.step == 44
    assert not [r for r in records if r["kind"] == "spike"]
