"""Which kernels a run has, and in which steps its weights are gathered."""

import types

import numpy as np
import pytest

from cocodc_jax import make_mesh
from cocodc_jax.run.build import build_program
from cocodc_jax.run.losses import gather_steps, with_kernels
from cocodc_jax.run.presets import PRESETS


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
    chosen = with_kernels(config, config.model, config.method.build(), mesh)
    assert (chosen.backward, chosen.attention) == (expected, "plain")


def test_backward_passes_that_a_method_cannot_have_are_refused():
    config = _configured(backward="cpu", curvature="hessian_vector")
    message = "backward='cpu' has no second derivatives, which the method takes; use"
    with pytest.raises(ValueError, match=message):
        build_program(config, config.model, make_mesh(1))
