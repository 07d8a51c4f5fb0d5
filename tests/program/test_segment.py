"""Segments: start, inner steps and merge as one program, with the plain form's numbers.

To rounding: XLA may fuse otherwise where more is in one program, and sums the norm of
an outer state that is divided part by part.
"""

import functools

import jax
import numpy as np
import pytest

from cocodc_jax import methods
from cocodc_jax.engine import segment
from cocodc_jax.engine.mesh import make_mesh
from cocodc_jax.engine.transfer import PINNED
from cocodc_jax.engine.transport import Transport
from cocodc_jax.train.checkpoint import Checkpoints
from tests.numerics import assert_within_ulps
from tests.program import tiny
from tests.slow import mostly_slow

NUM_STEPS = 12
SHORT = dict(sync_interval=6, num_fragments=2, delay_steps=2)
CASES = {
    "streaming": {},
    "streaming, tau > H / K": dict(delay_steps=5),
    "streaming, feedback": dict(compress="ef+int8", merge_feedback=True),
    "cocodc": dict(syncs_per_interval=2),
    "cocodc, Hessian": dict(curvature="hessian_vector"),
    "streaming, divided": dict(outer_placement="divided"),
    "streaming, exclude": dict(exclude_above=9.0),
    "streaming, whole": dict(num_fragments=1),
    # None of these messages is hidden.
    "diloco": dict(sync_interval=3),
    "co2": dict(sync_interval=3, staleness_gap="measured"),
}


def make(case, overlap):
    """Regions of two devices each in the first case, of one in the others."""
    family = case.split(",")[0]
    options = CASES[case]
    if family in ("streaming", "cocodc"):
        options = SHORT | options

    name = "streaming_diloco" if family == "streaming" else family
    devices = 8 if case == "streaming" else 4

    return tiny.program_of(
        methods.get(name, **options),
        make_mesh(tiny.NUM_REGIONS, devices // 4, devices=jax.devices()[:devices]),
        param_specs=tiny.SPECS if devices == 8 else None,
        transport=Transport("program", overlap=overlap),
    )


program = functools.cache(make)


# What the others add is in one of these, or in a form without windows.
QUICK = (
    "streaming",
    "streaming, tau > H / K",
    "streaming, feedback",
    "cocodc",
    "co2",
)


@pytest.mark.parametrize("case", mostly_slow(CASES, quick=QUICK))
def test_both_forms_give_the_same_numbers(case):
    plain, plain_outputs = tiny.trained(program(case, "no"), NUM_STEPS)
    fused, fused_outputs = tiny.trained(program(case, "yes"), NUM_STEPS)
    assert_within_ulps(tiny.numbers(fused), tiny.numbers(plain))

    def records(outputs):
        return [(output.losses, output.aux, output.syncs) for output in outputs]

    assert_within_ulps(records(fused_outputs), records(plain_outputs))


@pytest.mark.parametrize("case", ["streaming, feedback", "cocodc"])
@pytest.mark.parametrize("cut", [6, 7])
def test_a_checkpoint_in_the_middle_changes_no_number(tmp_path, case, cut):
    """At the step of a start, which then leaves by itself; and with it in flight."""
    windows = program(case, "yes")
    expected, _ = tiny.trained(windows, NUM_STEPS)
    state, _ = tiny.finish(windows, tiny.start(windows), cut)
    assert len(state.sync.leaving) == (cut == 6)

    state, restored = tiny.saved_and_restored(windows, state, tmp_path)
    assert len(state.sync.in_flight) == 1
    assert not state.sync.leaving

    plain = program(case, "no")
    with Checkpoints(tmp_path) as checkpoints:
        by_other, _ = checkpoints.restore(plain)

    for other, begun in ((windows, restored), (plain, by_other)):
        again, _ = tiny.finish(other, begun, NUM_STEPS - cut)
        again = other.synchronize(again)
        assert_within_ulps(tiny.numbers(again), tiny.numbers(expected))


LATE = [(((0, 0),), None, 2), (((1, 0),), None, 2), (((1, 0),), None, 3)]


@pytest.mark.parametrize(
    ("case", "windows"),
    [
        ("streaming", [(((k, 0),), k, 2) for k in (0, 1)]),
        ("streaming, tau > H / K", LATE),
    ],
)
def test_windows_are_few_and_traced_once(case, windows, monkeypatch):
    """The second and third cycle trace nothing.

    With a long delay a window ends at the next event: of a fragment that starts at 6
    and arrives at 11 at the merge of the other, at 8; only before the first merge it is
    another start.
    """
    made = []
    make_segment = segment.make_segment

    def counted(spec, model, steps, key):
        function = make_segment(spec, model, steps, key)

        def traced(*arguments):
            made.append((*key, arguments[1]["x"].shape[0]))
            return function(*arguments)

        return traced

    monkeypatch.setattr(segment, "make_segment", counted)
    tiny.trained(make(case, "yes"), 18)

    assert sorted(made) == windows


def test_outer_state_of_windows_is_sharded_in_host_memory():
    windows = program("streaming", "yes")
    outer = tiny.start(windows).sync.outer
    for leaf in jax.tree.leaves(outer):
        assert leaf.sharding.memory_kind == PINNED
        # Two devices a region.
        assert leaf.addressable_shards[0].data.size * 2 == leaf.size

    plain = program("streaming", "no")
    tiny.assert_same(
        *(tiny.host(p.outer_params(tiny.start(p))) for p in (plain, windows))
    )


@pytest.mark.parametrize("old", ["yes", "no"])
def test_a_run_is_adopted_by_the_other_form_with_other_fragments(old):
    """A start that waits for inner steps goes along; no outer state is lost."""
    before = program("streaming", old)
    state, _ = tiny.finish(before, tiny.start(before), 6)
    params = tiny.host(before.outer_params(state))
    after = program("streaming, whole", "no" if old == "yes" else "yes")
    adopted = after.adopt(state, before)

    assert {"outer parameters", "outer optimizer"} <= set(adopted.kept)
    assert set(adopted.lost) <= {"schedule"}  # The schedule starts again.

    landed = tiny.host(after.outer_params(adopted.state))
    assert jax.tree.map(np.shape, landed) == jax.tree.map(np.shape, params)

    _, outputs = tiny.finish(after, adopted.state, 4)
    assert all(np.isfinite(output.losses).all() for output in outputs)


@pytest.mark.parametrize(
    ("method", "transport", "data_axis", "message"),
    [
        ("data_parallel", {}, 1, "method='data_parallel' has no outer model"),
        ("noloco", {}, 1, "method='noloco' has no outer model"),
        ("diloco", dict(exchange="outer"), 1, "messages cross by exchange='outer'"),
        ("diloco", {}, 4, "all regions share the same devices"),
    ],
)
def test_unsupported_overlap_is_refused(method, transport, data_axis, message):
    mesh = make_mesh(tiny.NUM_REGIONS, data_axis, devices=jax.devices()[:4])
    transport = Transport(overlap="yes", **transport)
    with pytest.raises(ValueError, match=f"overlap='yes' is not possible: {message}"):
        tiny.program_of(methods.get(method), mesh, transport=transport)
