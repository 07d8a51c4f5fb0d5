"""Merge rules against NumPy, each on one region's fragment, under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax.sync import merge
from cocodc_jax.sync.averages import SharedMask, sync_key
from cocodc_jax.transforms import curvature as curvatures
from cocodc_jax.transforms.compensation import delay_compensation
from tests.numerics import assert_all_close

RNG = np.random.default_rng(0)
SHAPES = {"blocks/w": (2, 3), "head/w": (4,)}


def fragment():
    return {k: RNG.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}


@pytest.fixture
def parts():
    """A region's own fragment, the one it staged, and the new outer one."""
    return fragment(), fragment(), fragment()


@pytest.fixture
def moment():
    """Adam's second moment."""
    return {k: x**4 for k, x in fragment().items()}


def apply(rule, local, staged, outer, delay_steps=3, **extra):
    @jax.jit
    def merged(local, staged, outer, extra):
        return rule.apply(local, staged, outer, delay_steps=delay_steps, **extra)

    return merged(local, staged, outer, extra)


def close(actual, expected):
    # A few roundings of float32 on numbers of order one.
    assert_all_close(actual, expected, rtol=3e-6, atol=3e-6)


def test_replace_takes_the_outer_fragment(parts):
    local, _, outer = parts
    merged, metrics = apply(merge.replace(), local, None, outer, 3)
    jax.tree.map(np.testing.assert_array_equal, merged, outer)
    assert metrics == {}


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_mix_weighs_the_local_fragment(parts, alpha):
    local, _, outer = parts
    merged, metrics = apply(merge.mix(alpha), local, None, outer, 3)
    close(merged, {k: alpha * local[k] + (1 - alpha) * outer[k] for k in outer})
    assert metrics == {}


def test_without_curvature_local_progress_is_replayed(parts):
    local, staged, outer = parts
    rule = merge.compensate(delay_compensation("none"))
    merged, metrics = apply(rule, local, staged, outer, 5)
    close(merged, {k: outer[k] + (local[k] - staged[k]) for k in outer})
    assert metrics["correction_ratio"] == 0


def test_compensation_is_the_formula(parts):
    """The published rule, with every factor far from 1."""
    local, staged, outer = parts
    tau, interval, strength = 3, 7, 2.0
    transform = delay_compensation(
        curvatures.get("outer_product", sync_interval=interval), strength
    )
    merged, metrics = apply(merge.compensate(transform), local, staged, outer, tau)
    expected, term, length = {}, 0.0, 0.0
    for k in outer:
        g = (staged[k] - local[k]) / tau
        curved = strength * g * g * (outer[k] - staged[k]) / interval
        expected[k] = outer[k] - tau * (g + curved)
        term, length = term + (curved**2).sum(), length + (g**2).sum()
    close(merged, expected)
    ratio = metrics["correction_ratio"]
    np.testing.assert_allclose(ratio, np.sqrt(term / length), rtol=1e-5)
    assert ratio.dtype == jnp.float32


def test_parts_of_a_fragment_compensated_differently_have_no_ratio_of_all(parts):
    both = optax.multi_transform(
        {name: delay_compensation(name) for name in ("none", "isotropic")},
        {"blocks/w": "isotropic", "head/w": "none"},
    )
    merged, metrics = apply(merge.compensate(both), *parts, 5)
    assert metrics == {}
    for key, name in (("blocks/w", "isotropic"), ("head/w", "none")):
        alone, _ = apply(merge.compensate(delay_compensation(name)), *parts, 5)
        np.testing.assert_allclose(merged[key], alone[key], rtol=1e-6)


def test_compensation_passes_on_what_the_transform_needs(parts, moment):
    local, staged, outer = parts
    curvature = curvatures.get("adam_second_moment")
    rule = merge.compensate(delay_compensation(curvature, 0.5), curvature.needs)
    assert rule.needs == {"learning_rate", "second_moment", "staged"}
    merged, _ = apply(
        rule, local, staged, outer, 2, learning_rate=0.25, second_moment=moment
    )
    expected = {
        k: outer[k]
        + (local[k] - staged[k])
        - 2 * 0.5 * 0.25 * np.sqrt(moment[k]) * (outer[k] - staged[k])
        for k in outer
    }
    close(merged, expected)


def test_a_chain_compensates_too(parts):
    local, staged, outer = parts
    chain = optax.chain(delay_compensation("isotropic", 0.5), optax.scale(0.5))
    merged, metrics = apply(merge.compensate(chain), local, staged, outer, 4)
    expected = {
        k: outer[k] - 0.5 * ((staged[k] - local[k]) + 0.5 * (outer[k] - staged[k]))
        for k in outer
    }
    close(merged, expected)
    assert metrics["correction_ratio"] > 0


def test_a_transform_without_a_ratio_has_no_metric(parts):
    local, staged, outer = parts
    merged, metrics = apply(merge.compensate(optax.identity()), local, staged, outer, 2)
    close(merged, {k: outer[k] + (local[k] - staged[k]) for k in outer})
    assert metrics == {}


def test_without_a_delay_compensation_is_replacement(parts):
    local, staged, outer = parts
    rule = merge.compensate(delay_compensation("outer_product", 1e6))
    merged, metrics = apply(rule, local, staged, outer, 0)
    jax.tree.map(np.testing.assert_array_equal, merged, outer)
    assert metrics == {}


RULES = {
    "replace": merge.replace(),
    "mix": merge.mix(0.3),
    "compensate": merge.compensate(delay_compensation("none")),
    "curvature mix": merge.curvature_mix(0.3),
}


@pytest.mark.parametrize("name", RULES)
def test_bfloat16_regions_merge_in_the_outer_precision(name):
    """Local bfloat16, outer float32: the result is rounded once, at the end."""
    local, staged = (
        {k: jnp.asarray(x, jnp.bfloat16) for k, x in fragment().items()}
        for _ in range(2)
    )
    outer = fragment()
    ones = jax.tree.map(np.ones_like, outer)
    merged, _ = apply(RULES[name], local, staged, outer, 3, second_moment=ones)
    for k, o in outer.items():
        x, s = np.float64(local[k]), np.float64(staged[k])
        exact = {
            "replace": o, "mix": 0.3 * x + 0.7 * o, "compensate": o + (x - s),
            "curvature mix": o + (x - s) - 0.3 * (o - s),
        }[name]  # fmt: skip
        assert merged[k].dtype == jnp.bfloat16
        # Half a unit in the last place of 8 bits, and a little of float32.
        np.testing.assert_array_less(
            np.abs(np.float64(merged[k]) - exact), 2.0**-8 * np.abs(exact) + 1e-6
        )


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_alpha_must_be_a_weight(alpha):
    message = rf"mixing_alpha={alpha} must be in \[0, 1\], the weight on local"
    with pytest.raises(ValueError, match=message):
        merge.mix(alpha)


@pytest.mark.parametrize("mean_weight", [0.0, 0.3, 0.9])
def test_curvature_mix_is_the_formula(parts, moment, mean_weight):
    local, staged, outer = parts
    rule = merge.curvature_mix(mean_weight)
    merged, metrics = apply(rule, *parts, second_moment=moment)
    correction = progress = 0.0
    for k in SHAPES:
        root = np.sqrt(moment[k])
        w = np.minimum(1, mean_weight * root / root.mean())
        gap = outer[k] - staged[k]
        close(merged[k], outer[k] + local[k] - staged[k] - w * gap)
        correction += ((w * gap) ** 2).sum()
        progress += ((local[k] - staged[k]) ** 2).sum()
    close(metrics["correction_ratio"], np.sqrt(correction / progress))
    assert metrics["correction_ratio"].dtype == jnp.float32


def test_curvature_mix_of_equal_curvature_is_isotropic(parts, moment):
    """All of nu alike: theta_g + progress - c D, the isotropic compensation."""
    flat = {k: np.full_like(x, 0.2) for k, x in moment.items()}
    found = apply(merge.curvature_mix(0.4), *parts, second_moment=flat)
    isotropic = merge.compensate(delay_compensation("isotropic", 0.4))
    close(found, apply(isotropic, *parts))


def test_curvature_mix_without_progress_reports_no_ratio(parts, moment):
    _, staged, outer = parts
    rule = merge.curvature_mix(0.5)
    merged, metrics = apply(rule, staged, staged, outer, second_moment=moment)
    assert metrics["correction_ratio"] == 0
    assert all(np.isfinite(x).all() for x in merged.values())


@pytest.mark.parametrize("mean_weight", [-0.1, 1.5, float("nan")])
def test_the_mean_weight_is_a_weight(mean_weight):
    with pytest.raises(ValueError, match=rf"mean_weight={mean_weight} must be in"):
        merge.curvature_mix(mean_weight)


def test_where_drawn_tells_later_what_its_rule_does():
    rule = merge.remembering(merge.mix(0.25), 0.25)
    assert merge.where_drawn(rule, SharedMask(0.5)).feedback_weight == 0.75


@pytest.mark.parametrize("kept", [-1.0, float("nan")])
def test_a_share_that_makes_no_sense(kept):
    with pytest.raises(ValueError, match=f"kept={kept} must be at least 0 and below 1"):
        merge.remembering(merge.mix(0.25), kept)


def test_where_drawn_leaves_the_other_entries_as_they_are(parts):
    local, staged, outer = parts
    mask, key = SharedMask(0.4), sync_key(1, 6)
    rule = merge.where_drawn(merge.replay(), mask)
    assert rule.needs == {"staged", "sync_key"}
    merged, _ = rule.apply(local, staged, outer, delay_steps=3, sync_key=key)
    drawn = mask.mask(local, key)
    for k in SHAPES:
        expected = np.where(drawn[k], outer[k] + local[k] - staged[k], local[k])
        close(merged[k], expected)
        kept = ~np.asarray(drawn[k])
        np.testing.assert_array_equal(merged[k][kept], local[k][kept])
        assert kept.any()
