"""Every entry of the method table on the smoke preset learns and resumes."""

import pathlib
import shutil
from typing import NamedTuple

import numpy as np
import pytest

import cocodc_jax as cc
from cocodc_jax.report.records import read_records
from cocodc_jax.run.config.presets import PRESETS
from cocodc_jax.run.preparing import prepare
from cocodc_jax.run.session import Session

pytestmark = pytest.mark.slow

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


class Trained(NamedTuple):
    """A finished run of a method."""

    session: Session
    folder: pathlib.Path
    summary: dict
    records: list[dict]

    def of_kind(self, kind):
        return [record for record in self.records if record["kind"] == kind]


@pytest.fixture(scope="module", params=cc.methods.METHODS)
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "whole"
    session = prepare(configuration(request.param), folder)
    summary = session.train()
    return Trained(session, folder, summary, read_records(folder / "metrics.jsonl"))


def test_every_method_learns(trained):
    losses = [record["loss"] for record in trained.of_kind("train")]
    assert losses[-1] < 0.95 * losses[0]


def test_a_run_killed_between_checkpoints_goes_on_bit_for_bit(trained, tmp_path):
    folder = tmp_path / "killed"
    shutil.copytree(trained.folder, folder)
    shutil.rmtree(folder / "checkpoints" / str(STEPS))
    (folder / "summary.json").unlink()

    config = trained.session.config
    summary = prepare(config, folder, earlier=[trained.session]).train()

    records = (folder / "metrics.jsonl").read_bytes()
    assert records == (trained.folder / "metrics.jsonl").read_bytes()
    assert summary["eval_loss"] == trained.summary["eval_loss"]


def test_bytes_sent_are_those_of_syncs_recorded_and_in_flight(trained):
    program = trained.session.program
    sync_bytes = [record["bytes"] for record in trained.of_kind("sync")]
    sent = trained.summary["bytes_sent_per_region"]

    sync = program.method.sync
    if sync and sync.schedule.is_by_region:  # Each counts for one of M regions.
        assert sent == pytest.approx(sum(sync_bytes) / 4, abs=STEPS)
        return

    on_their_way = sent - sum(sync_bytes) - STEPS * program.bytes_per_step
    largest = max(sync_bytes, default=0)
    assert 0 <= on_their_way <= largest * program.method.num_fragments


def test_the_outer_model_is_evaluated(trained):
    assert np.isfinite(trained.summary["eval_loss_outer"])
