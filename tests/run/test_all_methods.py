"""Every entry of the method table on the smoke preset: it learns, and goes on."""

import shutil

import numpy as np
import pytest

import cocodc_jax as cc
from cocodc_jax.report.records import read_records
from cocodc_jax.run.config.presets import PRESETS
from cocodc_jax.run.preparing import prepare

STEPS = 32
CUT = 16


def configuration(method):
    """Two rounds of sixteen steps; regions of unequal speed where that is the point."""
    leaves = {
        "method": method,
        "steps": STEPS,
        "checkpoint_every": CUT,
        "eval_every": CUT,
        "eval_batches": 4,
        "warmup_steps": 4,
    }

    leaves["regions"] = cc.methods.get(method).num_regions or 4
    if method in ("delayed_nesterov", "mla", "heloco", "decoupled_diloco"):
        leaves["step_times"] = "1,1,2,4"
    if cc.methods.defaults(method).get("sync_interval"):
        leaves["sync_interval"] = 8

    return PRESETS["smoke"].replace(**leaves)


@pytest.mark.slow
@pytest.mark.parametrize("method", cc.methods.METHODS)
def test_it_trains_resumes_bit_for_bit_and_counts_its_bytes(method, tmp_path):
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    config = configuration(method)
    session = prepare(config, whole)
    summary = session.train()
    records = read_records(whole / "metrics.jsonl")
    losses = [r["loss"] for r in records if r["kind"] == "train"]
    assert losses[-1] < 0.95 * losses[0]

    # As if it had been killed between the two checkpoints.
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / str(STEPS))
    (cut / "summary.json").unlink()
    again = prepare(config, cut, earlier=[session]).train()
    resumed = (cut / "metrics.jsonl").read_bytes()
    assert resumed == (whole / "metrics.jsonl").read_bytes()
    assert again["eval_loss"] == summary["eval_loss"]

    # What was sent is what the syncs that were applied say, and what is on its way.
    synced = sum(r["bytes"] for r in records if r["kind"] == "sync")
    every_step = STEPS * session.program.bytes_per_step
    sent = summary["bytes_sent_per_region"]
    sync = session.program.method.sync

    if sync and sync.schedule.is_by_region:  # Each counts for one of M regions.
        assert sent == pytest.approx(synced / 4, abs=STEPS)
        return

    largest = max((r["bytes"] for r in records if r["kind"] == "sync"), default=0)
    num_fragments = session.program.method.num_fragments
    assert 0 <= sent - synced - every_step <= largest * num_fragments
    assert np.isfinite(summary["eval_loss_outer"])
