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
    """A region's local fragment, its staged one, and the new outer one."""
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


def replaced(x, s, o, nu):
    return o


def replayed(x, s, o, nu):
    return o + (x - s)


def outer_product(x, s, o, nu):
    """The published rule: H 7, tau 3, lambda 2, every factor far from 1."""
    g = (s - x) / 3
    return o - 3 * (g + 2 * g * g * (o - s) / 7)


PUBLISHED = delay_compensation(curvatures.get("outer_product", sync_interval=7), 2.0)
OF_ADAM = curvatures.get("adam_second_moment")
HALVED = optax.chain(delay_compensation("isotropic", 0.5), optax.scale(0.5))
# A rule, the delay, and the merge of local x, staged s and outer o with Adam's nu.
RULES = {
    "replace": (merge.replace(), 3, replaced),
    "mix, nothing kept": (merge.mix(0.0), 3, replaced),
    "mix": (merge.mix(0.3), 3, lambda x, s, o, nu: 0.3 * x + 0.7 * o),
    "mix, all kept": (merge.mix(1.0), 3, lambda x, s, o, nu: x),
    "no delay": (merge.compensate(delay_compensation("outer_product", 9)), 0, replaced),
    "no curvature": (merge.compensate(delay_compensation("none")), 5, replayed),
    "no ratio": (merge.compensate(optax.identity()), 2, replayed),
    "outer product": (merge.compensate(PUBLISHED), 3, outer_product),
    "adam": (
        merge.compensate(delay_compensation(OF_ADAM, 0.5), OF_ADAM.needs),
        2,
        lambda x, s, o, nu: o + (x - s) - 2 * 0.5 * 0.25 * np.sqrt(nu) * (o - s),
    ),
    "chain": (
        merge.compensate(HALVED),
        4,
        lambda x, s, o, nu: o - 0.5 * ((s - x) + 0.5 * (o - s)),
    ),
}
HAVE_A_RATIO = {"no curvature", "outer product", "adam", "chain"}


@pytest.mark.parametrize("name", RULES)
def test_each_rule_equals_its_formula(parts, moment, name):
    rule, delay, formula = RULES[name]
    extra = {"learning_rate": 0.25, "second_moment": moment}
    merged, metrics = apply(rule, *parts, delay, **extra)

    close(merged, jax.tree.map(formula, *parts, moment))
    if formula is replaced:
        jax.tree.map(np.testing.assert_array_equal, merged, parts[-1])

    assert metrics.keys() == ({"correction_ratio"} if name in HAVE_A_RATIO else set())

    if name == "chain":
        assert metrics["correction_ratio"] > 0
    elif name in HAVE_A_RATIO:
        replay = jax.tree.map(replayed, *parts, moment)
        correction = optax.tree.sub(merged, replay)
        progress = optax.tree.sub(*parts[:2])
        expected = optax.tree.norm(correction) / optax.tree.norm(progress)

        np.testing.assert_allclose(
            metrics["correction_ratio"], expected, rtol=1e-5, atol=1e-6
        )
        assert metrics["correction_ratio"].dtype == jnp.float32


def test_compensation_has_the_needs_of_its_transform():
    assert RULES["adam"][0].needs == {"learning_rate", "second_moment", "staged"}


def test_parts_of_a_fragment_compensated_differently_have_no_ratio_of_all(parts):
    both = optax.multi_transform(
        {name: delay_compensation(name) for name in ("none", "isotropic")},
        {"blocks/w": "isotropic", "head/w": "none"},
    )

    merged, metrics = apply(merge.compensate(both), *parts, 5)
    assert metrics == {}

    for key, name in (("blocks/w", "isotropic"), ("head/w", "none")):
        alone, _ = apply(merge.compensate(delay_compensation(name)), *parts, 5)
        close(merged[key], alone[key])


@pytest.mark.parametrize("name", ["replace", "mix", "no curvature"])
def test_bfloat16_regions_merge_in_the_outer_precision(name):
    """Local bfloat16, outer float32: the result is rounded once, at the end."""
    local, staged = (
        {k: jnp.asarray(x, jnp.bfloat16) for k, x in fragment().items()}
        for _ in range(2)
    )
    rule, delay, formula = RULES[name]

    outer = fragment()
    ones = jax.tree.map(np.ones_like, outer)

    merged, _ = apply(rule, local, staged, outer, delay, second_moment=ones)

    for k, o in outer.items():
        exact = formula(np.float64(local[k]), np.float64(staged[k]), o, ones[k])
        assert merged[k].dtype == jnp.bfloat16
        # Half a unit in the last place of 8 bits, and a little of float32.
        np.testing.assert_array_less(
            np.abs(np.float64(merged[k]) - exact), 2.0**-8 * np.abs(exact) + 1e-6
        )


@pytest.mark.parametrize("weight", [-0.1, 1.1, float("nan")])
def test_weights_outside_of_0_to_1_are_refused(weight):
    message = f"mixing_alpha={weight} must be between 0 and 1"
    with pytest.raises(ValueError, match=message):
        merge.mix(weight)

    message = "merge_feedback=True has" if weight > 1 else f"kept={weight} must be at"
    with pytest.raises(ValueError, match=message):
        merge.remembering(merge.mix(0.25), weight)


def test_where_drawn_keeps_the_feedback_of_its_rule():
    rule = merge.remembering(merge.mix(0.25), 0.25)
    assert "staged" in rule.needs
    assert merge.where_drawn(rule, SharedMask(0.5)).feedback_weight == 0.75


def test_where_drawn_leaves_the_other_entries_unchanged(parts):
    local, staged, outer = parts
    mask = SharedMask(0.4)
    key = sync_key(1, 6)
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
