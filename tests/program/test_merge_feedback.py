"""What merges leave out of regions' progress is told by the next message.

That whole runs are those of another implementation is in
`tests/experiments/studies/test_ablate.py`; that routes agree in
`exchange/test_outer_mesh.py`, windows with the plain form in `test_segment.py`.
"""

import pytest

from cocodc_jax import methods
from cocodc_jax.sync import merge
from tests.numerics import assert_all_close, assert_within_ulps
from tests.program import tiny


def make_program(rule=None, **options):
    """Streaming DiLoCo, with another merge rule where one is given."""
    options = {"sync_interval": 4, "num_fragments": 2} | options
    method = methods.get("streaming_diloco", **options)
    return tiny.program_of(method if rule is None else method.with_sync(merge=rule))


def test_without_a_delay_nothing_is_left_out():
    def final(**options):
        program = make_program(delay_steps=0, compress="ef+int8", **options)
        state, _ = tiny.finish(program, tiny.start(program), 12)
        return tiny.host((state.region, state.sync.outer, state.sync.compressors))

    with_it, without = final(merge_feedback=True), final()
    assert_within_ulps(with_it, without)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"merge_feedback": True}, "merge_feedback=True needs messages"),
        ({"merge_feedback": True, "compress": "int8"}, "such as compress='ef"),
        ({"merge_feedback": True, "mixing_alpha": 1.0}, "has nothing to tell"),
        ({"merge_feedback": True, "merge_rule": "replay"}, "has nothing to tell"),
    ],
)
def test_where_nothing_can_be_remembered_it_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_program(delay_steps=2, **options)


def test_what_compensation_drops_is_told_as_what_the_mix_drops():
    """With rho = lambda = alpha isotropic compensation is the mix, feedback and all."""

    def final(name, **options):
        rule = methods.get(name, merge_feedback=True, **options).sync.merge
        program = make_program(rule, delay_steps=4, compress="ef+int8")
        state, _ = tiny.finish(program, tiny.start(program), 12)
        return tiny.host((state.region.params, state.sync.outer))

    mixed = final("streaming_diloco", mixing_alpha=0.25)
    compensated = final("cocodc", compensation_strength=0.25, progress_weight=0.25)
    assert_all_close(mixed, compensated, rtol=1e-4, atol=1e-6)


def test_compensation_that_keeps_all_progress_has_nothing_to_tell():
    with pytest.raises(ValueError, match="or lower mixing_alpha or progress_weight"):
        methods.get("cocodc", merge_feedback=True)


def test_a_rule_that_remembers_keeps_the_copy_from_the_start():
    rule = merge.remembering(merge.mix(0.25), 0.25)
    assert rule.feedback_weight == 0.75
    assert "staged" in rule.needs
