"""Events among the inner steps of one device, with the plain form's numbers.

To rounding: where more is in one program XLA may fuse otherwise. Bit for bit wherever
stretches are cut, as they are one program whatever their length.
"""

import functools

import jax
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.runtime import stretches
from cocodc_jax.runtime.devices.mesh import make_mesh
from cocodc_jax.runtime.exchange.transport import Transport
from cocodc_jax.runtime.loop.checkpoint import Checkpoints
from cocodc_jax.runtime.program import RegionProgram
from cocodc_jax.sync.regions import Regions
from tests.numerics import assert_within_ulps

NUM_STEPS = 20
SHORT = dict(sync_interval=6, num_fragments=2, delay_steps=2)
CASES = {
    "streaming": ("streaming_diloco", SHORT),
    "streaming, back as it leaves": ("streaming_diloco", SHORT | dict(delay_steps=6)),
    "streaming, feedback": (
        "streaming_diloco", SHORT | dict(compress="ef+int8", merge_feedback=True),
    ),
    "cocodc": ("cocodc", SHORT | dict(syncs_per_interval=6)),
    "cocodc, no slot free": ("cocodc", SHORT | dict(delay_steps=5)),
    "cocodc, no delay": ("cocodc", SHORT | dict(delay_steps=0)),
    "cocodc, round robin": ("cocodc", SHORT | dict(transmission_score="round_robin")),
    "cocodc, second_moment, aged": (
        "cocodc",
        SHORT | dict(curvature="adam_second_moment", transmission_score="aged"),
    ),
    "cocodc, Hessian": ("cocodc", SHORT | dict(curvature="hessian_vector")),
    "diloco": ("diloco", dict(sync_interval=3)),
}  # fmt: skip
SLOW = ("cocodc, no delay", "cocodc, round robin", "cocodc, Hessian", "diloco")


def make(tiny, case, fuse_syncs="auto"):
    name, options = CASES[case]
    return tiny.program_of(
        methods.get(name, **options),
        make_mesh(tiny.NUM_REGIONS, devices=jax.devices()[:1]),
        transport=Transport(fuse_syncs=fuse_syncs),
    )


@pytest.fixture(scope="module")
def program(tiny):
    return functools.cache(functools.partial(make, tiny))


def told(outputs):
    """All steps' losses, aux and bytes, and what is told of each sync."""
    losses = np.concatenate([np.asarray(o.losses) for o in outputs])
    draws = np.concatenate([np.asarray(o.aux["draw"]) for o in outputs])
    syncs = [(s[:4], s.norm, s.metrics) for o in outputs for s in o.syncs]
    return losses, draws, sum((o.bytes_sent for o in outputs), ()), syncs


def assert_alike(tiny, one, other):
    assert_within_ulps(*map(tiny.numbers, (one, other)))


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in CASES],
)
def test_both_forms_give_the_same_numbers(tiny, program, case):
    (plain, before), (embedded, after) = (
        tiny.trained(program(case, fuse), NUM_STEPS) for fuse in ("no", "auto")
    )
    if case != "diloco":  # Whose events are an interval apart.
        assert len(after) < len(before)  # Several events in one call.
    assert_alike(tiny, plain, embedded)
    assert_within_ulps(*map(told, (after, before)))


@pytest.mark.parametrize("case", ["streaming, feedback", "cocodc"])
@pytest.mark.parametrize("cut", [6, 7])
def test_a_checkpoint_in_the_middle_changes_nothing(tiny, program, tmp_path, case, cut):
    """Either form goes on from it, with what is in flight."""
    own = program(case)
    expected, _ = tiny.trained(own, NUM_STEPS)
    state, _ = tiny.finish(own, tiny.start(own), cut)
    with Checkpoints(tmp_path) as checkpoints:
        state = checkpoints.save(own, state, {})
    assert state.sync.in_flight
    for other in ("auto", "no"):
        with Checkpoints(tmp_path) as checkpoints:
            restored, _ = checkpoints.restore(program(case, other))
        again, _ = tiny.finish(program(case, other), restored, NUM_STEPS - cut)
        assert_alike(tiny, program(case, other).synchronize(again), expected)


def test_where_stretches_are_cut_changes_no_bit(tiny, program):
    own = program("cocodc")
    expected, _ = tiny.trained(own, NUM_STEPS)
    for cuts in ([1] * NUM_STEPS, [5, 6, 2, 6, 1]):
        state = tiny.start(own)
        for cut in cuts:
            state, _ = tiny.finish(own, state, cut)
        tiny.assert_same(*map(tiny.numbers, (own.synchronize(state), expected)))


def test_what_is_in_flight_lands_and_the_run_goes_on(tiny, program):
    own = program("cocodc")
    state, _ = tiny.finish(own, tiny.start(own), 7)
    assert state.sync.in_flight
    state, dropped = own.land(state)
    assert not dropped
    assert not state.sync.in_flight
    state, outputs = tiny.finish(own, state, 6)
    assert any(output.syncs for output in outputs)


def test_one_program_is_traced_once(tiny, monkeypatch):
    """Whatever fragments are served, and wherever stretches are cut."""
    made, make_stretch = [], stretches.make_stretch

    def counted(*arguments):
        function = make_stretch(*arguments)

        def traced(*arguments):
            made.append(1)
            return function(*arguments)

        return traced

    monkeypatch.setattr(stretches, "make_stretch", counted)
    own = make(tiny, "cocodc")
    state = tiny.start(own)
    for num_steps in (20, 3, 1, 6):
        state, _ = tiny.finish(own, state, num_steps)
    assert made == [1]


def test_batches_too_large_for_room_are_steps_of_one_length(tiny, program, monkeypatch):
    """Then the number of steps is compiled in."""
    expected, _ = tiny.trained(program("streaming"), NUM_STEPS)
    monkeypatch.setattr("cocodc_jax.runtime.counted._MOST_BYTES", 1)
    state, _ = tiny.trained(make(tiny, "streaming"), NUM_STEPS)
    assert_alike(tiny, state, expected)


def test_the_program_is_listed_as_it_is_called(tiny):
    own = make(tiny, "cocodc")
    batches = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((6, *x.shape), x.dtype), tiny.make_batch(0)
    )
    listed = {each.name: each for each in own.listed(batches)}
    assert list(listed) == ["first state", "inner steps and syncs", "mean of regions"]
    found = listed["inner steps and syncs"]
    assert found.num_steps == 6
    assert found.sent_bytes == sum(own.fragments.num_bytes) * 3
    found.program.lower(*found.arguments).compile()
    tiny.trained(own, NUM_STEPS)
    assert found.program._cache_size() == 1


@pytest.mark.parametrize(
    ("name", "options", "arguments", "why"),
    [
        (
            "co2",
            dict(sync_interval=3),
            {},
            "its schedule's order or choices cannot be had inside a program",
        ),
        (
            "cocodc",
            SHORT | dict(transmission_score="drift"),
            {},
            "its schedule's order or choices cannot be had inside a program",
        ),
        (
            "streaming_diloco",
            SHORT | dict(exclude_above=9.0),
            {},
            "regions are looked at before each merge",
        ),
        (
            "streaming_diloco",
            SHORT,
            dict(regions=Regions((1.0, 1.0, 2.0, 1.0), (4,) * 4)),
            "its regions are not equally fast",
        ),
        (
            "des_loc",
            dict(sync_interval=6, sync_moments="2,3"),
            {},
            "more belongs to its syncs than a message of one size",
        ),
    ],
)
def test_what_cannot_be_embedded_runs_plainly_or_is_refused(
    tiny, name, options, arguments, why
):
    def make(fuse_syncs):
        return RegionProgram(
            tiny.loss_fn,
            optax.adam(0.1),
            methods.get(name, **options),
            tiny.make_params(),
            arguments.get("regions", tiny.NUM_REGIONS),
            mesh=make_mesh(tiny.NUM_REGIONS, devices=jax.devices()[:1]),
            transport=Transport(fuse_syncs=fuse_syncs),
        )

    own = make("auto")
    assert own.steps_at_once(tiny.start(own)) == own.steps_to_event(tiny.start(own))
    with pytest.raises(ValueError, match=f"fuse_syncs='yes' is not possible .*{why}"):
        make("yes")


def test_large_models_run_plainly_unless_told_otherwise(tiny, monkeypatch):
    """Their events cost nothing, and room for a message of each fragment would."""
    monkeypatch.setattr(
        "cocodc_jax.runtime.devices.local_regions._MAX_BATCHED_PARAMS", 1
    )
    for fuse_syncs, ahead, room in (("auto", 3, 10), ("yes", 6, 20)):
        own = make(tiny, "streaming", fuse_syncs)
        assert own.steps_at_once(tiny.start(own)) == ahead
        assert own.round_steps == room
