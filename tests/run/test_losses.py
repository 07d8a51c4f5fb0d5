"""In which steps weights are gathered, by where the devices of a region are."""

import types

import numpy as np
import pytest

from cocodc_jax.run.losses import gather_steps


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
