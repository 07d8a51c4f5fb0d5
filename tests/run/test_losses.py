"""A run's kernels, the steps of its gathers, and its pace: the same numbers, later."""

import time
import types

import jax
import numpy as np
import optax
import pytest

import cocodc_jax as cc
from cocodc_jax import make_mesh, models
from cocodc_jax.engine.region_map import LocalRegions
from cocodc_jax.run.build import build_program, program_key
from cocodc_jax.run.config.presets import PRESETS
from cocodc_jax.run.losses import gather_steps, layout, paced, with_kernels
from tests.numerics import assert_within_ulps


def _chips(*shape, cores=1):
    """Chips of a box, those along its first axis first, and the cores of each."""
    return np.array(
        [
            types.SimpleNamespace(coords=place[::-1], core_on_chip=core)
            for place in np.ndindex(*shape[::-1])
            for core in range(cores)
        ]
    )


@pytest.mark.parametrize(
    ("devices", "steps"),
    [
        (_chips(4, 4, 4), (4, 4, 4)),
        (_chips(8, 8, 1), (8, 8)),
        (_chips(2, 2, 4), (2, 2, 4)),
        (_chips(2, 2, 2, cores=2), (2, 2, 2, 2)),
        # A model axis of 4 takes one axis, and one of 2 every other chip.
        (_chips(4, 4, 8)[::4], (4, 8)),
        (_chips(4, 4, 4)[::2], (2, 4, 4)),
        # Few, or in a line.
        (_chips(4, 4, 1), ()),
        (_chips(32, 1, 1), ()),
        # No box.
        (_chips(4, 4, 4)[:40], ()),
        (np.array([object()] * 64), ()),
    ],
)
def test_a_torus_is_gathered_over_axis_by_axis(devices, steps):
    assert gather_steps(devices) == steps


def _configured(**flags):
    return PRESETS["smoke"].replace(method="cocodc", **flags)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, "cpu"),
        ({"backward": "plain"}, "plain"),
        ({"data_axis": 2, "regions": 2}, "plain"),
        # Merges that differentiate gradients forward.
        ({"curvature": "hessian_vector"}, "plain"),
    ],
)
def test_regions_of_one_cpu_device_have_backward_passes_for_it(flags, expected):
    config = _configured(**flags)
    mesh = make_mesh(2, data=config.run.data_axis)
    is_divided = layout(config.run, mesh) is not None
    chosen = with_kernels(
        config, config.model, config.method.build(), jax.devices()[0], is_divided
    )
    assert (chosen.backward, chosen.attention) == (expected, "plain")


def test_backward_passes_that_a_method_cannot_have_are_refused():
    config = _configured(backward="cpu", curvature="hessian_vector")
    message = "backward='cpu' has no second derivatives, which the method takes; use"
    with pytest.raises(ValueError, match=message):
        build_program(config, config.model, make_mesh(1))


REGIONS = 4
STEPS = 2
SECONDS = 0.4
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
        build_program(config, config.model, mesh)


def test_runs_of_another_pace_have_another_program_key():
    config = PRESETS["smoke"]
    slower = config.replace(step_seconds=0.5)
    assert program_key(config) != program_key(slower)
    divided = config.replace(outer_channels=2)
    assert program_key(config) != program_key(divided)
