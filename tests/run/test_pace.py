"""Paced steps: as long as was asked for, side by side, the same numbers."""

import time

import jax
import numpy as np
import optax
import pytest

import cocodc_jax as cc
from cocodc_jax import models
from cocodc_jax.run import build
from cocodc_jax.run.losses import paced
from cocodc_jax.run.presets import PRESETS
from cocodc_jax.sharding.region_map import LocalRegions
from tests.numerics import assert_within_ulps

REGIONS, STEPS, SECONDS = 4, 2, 0.4
MODEL = models.TransformerConfig(
    vocab_size=7, num_layers=1, width=8, mlp_width=8, num_heads=2, num_kv_heads=1
)


def trained(method, num_devices, seconds):
    """The state after two scans of `STEPS`, and the seconds that the second took."""
    mesh = cc.make_mesh(REGIONS, devices=jax.devices()[:num_devices])
    loss_fn = models.make_loss_fn(MODEL)
    if seconds:
        loss_fn = paced(loss_fn, seconds, LocalRegions.of(mesh, REGIONS, "in_turn"))
    params = models.init_params(MODEL, jax.random.key(0))
    program = cc.RegionProgram(
        loss_fn,
        optax.adam(1e-2),
        method,
        params,
        REGIONS,
        mesh=mesh,
        local_regions="in_turn",
    )
    state = program.init(params, jax.random.key(1))
    rows = np.random.default_rng(0).integers(0, 7, (2 * STEPS, REGIONS, 2, 9))
    state, output = program.advance(state, rows[:STEPS])  # Compiled here.
    jax.block_until_ready((state.region, output))
    begin = time.monotonic()
    state, output = program.advance(state, rows[STEPS:])
    jax.block_until_ready((state.region, output))
    return (state.region, output.losses), time.monotonic() - begin


# A region a device is where the compiler has most to fuse, and bits to change.
@pytest.mark.parametrize(
    ("name", "num_devices"),
    [pytest.param("apart", 4, marks=pytest.mark.slow), ("data_parallel", 2)],
)
def test_steps_take_their_time_and_numbers_stay(name, num_devices):
    method = cc.methods.get(name)
    plain, _ = trained(method, num_devices, 0)
    slow, seconds = trained(method, num_devices, SECONDS)
    assert_within_ulps(slow, plain)
    # One after another, two regions of a device would take twice as long.
    assert STEPS * SECONDS <= seconds + 0.001 * STEPS  # The clock's own grain.
    assert seconds < 1.6 * STEPS * SECONDS


def test_a_merge_that_takes_gradients_is_refused():
    config = PRESETS["smoke"].replace(step_seconds=0.5, curvature="hessian_vector")
    mesh = cc.make_mesh(REGIONS, devices=jax.devices()[:4])
    with pytest.raises(ValueError, match=r"step_seconds=0.5 .* method='cocodc'"):
        build.build_program(config, config.model, mesh)


def test_another_pace_is_another_program():
    config = PRESETS["smoke"]
    slower = config.replace(step_seconds=0.5)
    assert build.program_key(config) != build.program_key(slower)
    divided = config.replace(outer_channels=2)
    assert build.program_key(config) != build.program_key(divided)
