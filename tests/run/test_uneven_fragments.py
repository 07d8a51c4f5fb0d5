"""Uneven fragments of a run are named by flag, unless a preset has them so."""

import jax
import pytest

from cocodc_jax.run import PRESETS, build


@pytest.mark.parametrize(
    ("preset", "leaves", "is_said"),
    [("small", {}, False), ("tiny", {"fragment_strategy": "sequential"}, True)],
)
def test_the_flag_that_evens_them_is_named(preset, leaves, is_said, capfd, recwarn):
    config = PRESETS[preset].replace(method="streaming_diloco", regions=1, **leaves)
    config = config.resolve()
    mesh = build.mesh_of(config.run, jax.devices()[:1])
    program = build.build_program(config, config.model, mesh)
    sizes = program.fragments.num_params
    assert max(sizes) > 2 * min(sizes)

    build.say_if_uneven(config, program)
    warning = capfd.readouterr().err
    assert ("--fragment_strategy=balanced" in warning) == is_said
    assert not [x for x in recwarn if "cuts the model" in str(x.message)]
