"""Merge rules against NumPy, each on one region's fragment, under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax.sync import merge
from cocodc_jax.transforms import curvature as curvatures
from cocodc_jax.transforms.compensation import delay_compensation

RNG = np.random.default_rng(0)


def fragment(dtype=np.float32):
    shapes = {"blocks/w": (2, 3), "head/w": (4,)}
    return {k: RNG.normal(size=s).astype(dtype) for k, s in shapes.items()}


def apply(rule, local, staged, outer, delay_steps, **extra):
    @jax.jit
    def merged(local, staged, outer, extra):
        return rule.apply(local, staged, outer, delay_steps=delay_steps, **extra)

    return merged(local, staged, outer, extra)


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        # One or two roundings of float32, on numbers of order 1.
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-6, atol=1e-6)


@pytest.fixture
def parts():
    """A region's own fragment, the one it staged, and the new outer one."""
    return fragment(), fragment(), fragment()


def test_replace_takes_the_outer_fragment(parts):
    local, _, outer = parts
    merged, metrics = apply(merge.replace(), local, None, outer, 3)
    jax.tree.map(np.testing.assert_array_equal, merged, outer)
    assert metrics == {}


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_mix_weighs_the_local_fragment(parts, alpha):
    local, _, outer = parts
    merged, metrics = apply(merge.mix(alpha), local, None, outer, 3)
    assert_close(merged, {k: alpha * local[k] + (1 - alpha) * outer[k] for k in outer})
    assert metrics == {}


def test_without_curvature_local_progress_is_replayed(parts):
    local, staged, outer = parts
    rule = merge.compensate(delay_compensation("none"))
    merged, metrics = apply(rule, local, staged, outer, 5)
    assert_close(merged, {k: outer[k] + (local[k] - staged[k]) for k in outer})
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
    assert_close(merged, expected)
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


def test_compensation_passes_on_what_the_transform_needs(parts):
    local, staged, outer = parts
    curvature = curvatures.get("adam_second_moment")
    moment = {k: np.abs(x) for k, x in fragment().items()}
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
    assert_close(merged, expected)


def test_a_chain_compensates_too(parts):
    local, staged, outer = parts
    chain = optax.chain(delay_compensation("isotropic", 0.5), optax.scale(0.5))
    merged, metrics = apply(merge.compensate(chain), local, staged, outer, 4)
    expected = {
        k: outer[k] - 0.5 * ((staged[k] - local[k]) + 0.5 * (outer[k] - staged[k]))
        for k in outer
    }
    assert_close(merged, expected)
    assert metrics["correction_ratio"] > 0


def test_a_transform_without_a_ratio_has_no_metric(parts):
    local, staged, outer = parts
    merged, metrics = apply(merge.compensate(optax.identity()), local, staged, outer, 2)
    assert_close(merged, {k: outer[k] + (local[k] - staged[k]) for k in outer})
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
}


@pytest.mark.parametrize("name", RULES)
def test_bfloat16_regions_merge_in_the_outer_precision(name):
    """Local bfloat16, outer float32: the result is rounded once, at the end."""
    local, staged = (
        {k: jnp.asarray(x, jnp.bfloat16) for k, x in fragment().items()}
        for _ in range(2)
    )
    outer = fragment()
    merged, _ = apply(RULES[name], local, staged, outer, 3)
    for k, o in outer.items():
        x, s = np.float64(local[k]), np.float64(staged[k])
        exact = {
            "replace": o, "mix": 0.3 * x + 0.7 * o, "compensate": o + (x - s)
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
