"""Loops of other people's with a method in them: the scripts of the documentation."""

import pathlib
import runpy

import numpy as np
import pytest

import cocodc_jax as cc

SCRIPTS = sorted(pathlib.Path(__file__, "../../../docs/recipes").resolve().glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_recipe_trains_in_few_lines(script):
    assert sum(map(bool, script.read_text().splitlines())) <= 40
    losses, state = runpy.run_path(str(script))["main"]()
    losses, metrics = np.array(losses), cc.sync_metrics(state)
    assert losses.ndim == 2
    assert (losses[-10:].mean(0) < losses[:10].mean(0)).all()
    assert (np.asarray(metrics["bytes_sent"]) > 0).all()
    assert (np.asarray(metrics["norm"]) > 0).all()
