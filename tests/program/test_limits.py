"""The ladder: each method collapses to a simpler one at a limit, and symmetries hold.

To a few roundings of float32: two methods are two programs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax import methods
from cocodc_jax.core.checks import check_feedback
from cocodc_jax.sync import merge
from cocodc_jax.sync.cutting import cut
from cocodc_jax.transforms.compensation import delay_compensation
from cocodc_jax.transforms.curvature import hessian_vector
from tests.numerics import assert_all_close, assert_within_ulps
from tests.program import quadratic, reference, tiny
from tests.program.quadratic import HESSIAN, LR, NUM_REGIONS, OUTER, PARAMS, TARGETS
from tests.slow import mostly_slow

LATE = {"sync_interval": 4, "num_fragments": 2, "delay_steps": 2}
SHORT = LATE | {"delay_steps": 1} | OUTER
RNG = np.random.default_rng(1)
ORACLE = reference.Quadratic({n: PARAMS[n].shape for n in PARAMS}, HESSIAN)


def train(method, targets=TARGETS, stops=(), **options):
    return quadratic.run(quadratic.make(method, **options), targets, stops)


def test_cocodc_with_n_equal_to_k_mixing_is_streaming():
    """The adaptive round begins with fragment 0, the staggered one with 1."""
    options = {**LATE, **OUTER}
    streaming = methods.get("streaming_diloco", mixing_alpha=0.3, **options)
    cocodc = methods.get("cocodc", syncs_per_interval=2, **options)
    cocodc = cocodc.with_sync(merge=streaming.sync.merge)
    expected = train(streaming, patterns=["a", "b|c"])
    assert_within_ulps(train(cocodc, patterns=["b|c", "a"]), expected)


def test_cocodc_that_keeps_as_much_progress_as_of_where_it_was_is_a_mix():
    """Isotropic, rho = lambda = alpha: alpha theta^m + (1 - alpha) theta^g."""
    options = {**LATE, "syncs_per_interval": 2, **OUTER}
    streaming = methods.get("streaming_diloco", mixing_alpha=0.3)
    mixed = methods.get("cocodc", **options).with_sync(merge=streaming.sync.merge)
    options["compensation_strength"] = 0.3
    ours = train(methods.get("cocodc", progress_weight=0.3, **options))
    assert_within_ulps(ours, train(mixed))
    whole = train(methods.get("cocodc", **options))
    assert max(np.abs(ours[0][n] - whole[0][n]).max() for n in PARAMS) > 1e-2


def test_the_true_hessian_gives_the_undelayed_gradient():
    """A step's delay, in the region program.

    Fragment 0 (`a` and `c`) starts at step 2 and is applied at 3: SGD's step in
    between becomes a step from the new outer values, `b` being where it was.
    """
    cocodc = methods.get(
        "cocodc",
        syncs_per_interval=2,
        curvature="hessian_vector",
        curvature_units="parameter",
        compensation_strength=1.0,
        **SHORT,
    )

    (staged, _), (local, outer) = train(cocodc, TARGETS[:3], stops=(2,))

    merged = []
    wanted = []
    for m in range(NUM_REGIONS):
        there = ORACLE.join({"a": outer["a"], "b": staged["b"][m], "c": outer["c"]})
        stepped = there - LR * ORACLE.gradient(there, (TARGETS[2, m], 1.0))
        merged.append([local[n][m] for n in "ac"])
        wanted.append([ORACLE.split(stepped)[n] for n in "ac"])

    assert_within_ulps(merged, wanted)


@pytest.mark.parametrize("strength", [1.0, -1.0])
def test_over_several_steps_it_gives_the_gradients_along_the_moved_path(strength):
    """tau steps from staged become the gradients at x_i + D, to rounding of float64."""
    tau = 5
    staged, outer, target = (RNG.normal(size=9) for _ in range(3))

    path = [staged]
    for _ in range(tau):
        path.append(path[-1] - LR * HESSIAN @ (path[-1] - target))
    moved = [x + (outer - staged) for x in path[:-1]]
    wanted = outer - LR * sum(HESSIAN @ (x - target) for x in moved)

    curvature = hessian_vector("parameter")
    rule = merge.compensate(delay_compensation(curvature, strength), curvature.needs)

    with jax.enable_x64(True):
        merged, _ = rule.apply(
            *({"w": jnp.asarray(x)} for x in (path[-1], staged, outer)),
            delay_steps=tau,
            learning_rate=jnp.asarray(LR),
            gradient_fn=lambda p: {"w": jnp.asarray(HESSIAN) @ (p["w"] - target)},
        )

    error = np.abs(np.asarray(merged["w"]) - wanted).max()
    assert error < 1e-14 if strength == 1 else error > 0.1


def test_gauss_newton_of_a_linear_model_is_the_hessian():
    options = LATE | {"curvature_units": "parameter", "compensation_strength": 1.0}
    ours, exact, none = (
        train(methods.get("cocodc", curvature=name, **options | more))[0]
        for name, more in (
            ("gauss_newton", {}),
            ("hessian_vector", {}),
            ("none", {"curvature_units": None}),
        )
    )

    assert_within_ulps(ours, exact)
    assert max(np.abs(ours[n] - none[n]).max() for n in PARAMS) > 1e-3


# --- The next message feeds back the progress that a merge drops.
# That routes agree is in `exchange/test_between_hosts.py`, windows with the plain form
# in `test_segment.py`.


def regression(num_steps=12, rule=None, **options):
    """Streaming DiLoCo of the tiny regression, with another merge rule if given."""
    options = {"sync_interval": 4, "num_fragments": 2} | options
    method = methods.get("streaming_diloco", **options)
    program = tiny.program_of(method.with_sync(merge=rule) if rule else method)
    state, _ = tiny.finish(program, tiny.start(program), num_steps)
    return tiny.host((state.region.params, state.sync.outer)), state


def test_without_a_delay_merge_feedback_changes_nothing():
    ends = []
    for has_feedback in (True, False):
        _, state = regression(
            delay_steps=0, compress="ef+int8", merge_feedback=has_feedback
        )
        ends.append((state.region, state.sync.outer, state.sync.compressors))
    assert_within_ulps(*ends)


def test_compensation_feeds_back_the_same_progress_as_the_mix():
    """With rho = lambda = alpha isotropic compensation is the mix, feedback and all."""
    mixed, compensated = (
        methods.get(name, merge_feedback=True, **options).sync.merge
        for name, options in (
            ("streaming_diloco", {"mixing_alpha": 0.25}),
            ("cocodc", {"compensation_strength": 0.25, "progress_weight": 0.25}),
        )
    )

    options = {"delay_steps": 4, "compress": "ef+int8"}
    ends = [regression(rule=rule, **options)[0] for rule in (mixed, compensated)]

    assert_all_close(*ends, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "merge_feedback=True needs messages"),
        ({"compress": "int8"}, "such as compress='ef"),
        ({"mixing_alpha": 1.0}, "has no effect where"),
        ({"merge_rule": "replay"}, "has no effect where"),
    ],
)
def test_merge_feedback_is_refused_without_a_memory(options, message):
    with pytest.raises(ValueError, match=message):
        regression(0, delay_steps=2, merge_feedback=True, **options)


def test_merge_feedback_needs_a_memory_for_every_fragment():
    params = {"a": jnp.ones((4, 4)), "b": jnp.ones(4)}
    method = methods.get(
        "streaming_diloco",
        num_fragments=2,
        compress="matrices+ef+int8",
        merge_feedback=True,
    )
    fragments = cut(params, 2, "balanced_tensors")
    with pytest.raises(ValueError, match="fragment 1 has other ones"):
        check_feedback(method, fragments, params)


def test_merge_feedback_is_refused_if_a_merge_keeps_all_progress():
    with pytest.raises(ValueError, match="or lower mixing_alpha or progress_weight"):
        methods.get("cocodc", merge_feedback=True)


# --- One region, and regions in another order ---

QUICK = ["data_parallel", "cocodc"]
METHODS = {
    "data_parallel": {},
    "diloco": {"sync_interval": 4, **OUTER},
    "streaming_diloco": SHORT,
    "cocodc": SHORT,
}


@pytest.mark.parametrize("name", mostly_slow(METHODS, quick=QUICK))
def test_one_region_alone_is_each_of_several_that_see_the_same(name):
    method = methods.get(name, **METHODS[name])
    targets = TARGETS[:, :1]
    local, outer = train(method, targets, regions=1)
    expected, same_outer = train(method, np.tile(targets, (4, 1)))
    assert_within_ulps(outer, same_outer)
    assert_within_ulps({n: np.repeat(x, 4, 0) for n, x in local.items()}, expected)


@pytest.mark.parametrize("name", mostly_slow(METHODS, quick=QUICK))
def test_regions_permuted_with_their_data_permute_the_result(name):
    program = quadratic.make(methods.get(name, **METHODS[name]))
    order = np.array([2, 0, 3, 1])
    targets = TARGETS[:-1]  # Between two syncs, so that regions differ.

    local, outer = quadratic.run(program, targets)
    permuted_local, permuted_outer = quadratic.run(program, targets[:, order])

    assert_within_ulps({n: x[order] for n, x in local.items()}, permuted_local)
    assert_within_ulps(outer, permuted_outer)
    if name != "data_parallel":
        assert np.abs(local["b"] - permuted_local["b"]).max() > 1e-2
