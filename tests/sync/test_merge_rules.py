"""The merge rules beyond the papers', against NumPy, under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax.sync import merge
from cocodc_jax.sync.averages import SharedMask, sync_key
from cocodc_jax.transforms.compensation import delay_compensation

RNG = np.random.default_rng(3)
SHAPES = {"blocks/w": (2, 3), "head/w": (5,)}


def fragment():
    return {k: RNG.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}


@pytest.fixture
def parts():
    """Local, staged and outer fragment, and Adam's second moment."""
    moment = {k: x**4 for k, x in fragment().items()}
    return fragment(), fragment(), fragment(), moment


def apply(rule, local, staged, outer, moment, delay_steps=3):
    @jax.jit
    def merged(*parts):
        local, staged, outer, moment = parts
        return rule.apply(
            local, staged, outer, delay_steps=delay_steps, second_moment=moment
        )

    return merged(local, staged, outer, moment)


def close(actual, expected):
    # A few roundings of float32 on numbers of order one.
    np.testing.assert_allclose(actual, expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("mean_weight", [0.0, 0.3, 0.9])
def test_curvature_mix_is_the_formula(parts, mean_weight):
    local, staged, outer, moment = parts
    merged, metrics = apply(merge.curvature_mix(mean_weight), *parts)
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


def test_curvature_mix_without_weight_is_the_replay(parts):
    local, staged, outer, _ = parts
    merged, _ = apply(merge.curvature_mix(0.0), *parts)
    replay = merge.compensate(delay_compensation("none"))
    expected, _ = replay.apply(local, staged, outer, delay_steps=3)
    jax.tree.map(close, merged, expected)


def test_curvature_mix_of_equal_curvature_is_isotropic(parts):
    """All of nu alike: theta_g + progress - c D, the isotropic compensation."""
    local, staged, outer, moment = parts
    flat = {k: np.full_like(x, 0.2) for k, x in moment.items()}
    merged, metrics = apply(merge.curvature_mix(0.4), local, staged, outer, flat)
    isotropic = merge.compensate(delay_compensation("isotropic", 0.4))
    expected, expected_metrics = isotropic.apply(local, staged, outer, delay_steps=3)
    jax.tree.map(close, merged, expected)
    close(metrics["correction_ratio"], expected_metrics["correction_ratio"])


def test_curvature_mix_without_progress_reports_no_ratio(parts):
    _, staged, outer, moment = parts
    merged, metrics = apply(merge.curvature_mix(0.5), staged, staged, outer, moment)
    assert metrics["correction_ratio"] == 0
    assert all(np.isfinite(x).all() for x in merged.values())


def test_curvature_mix_keeps_the_local_dtype(parts):
    local, staged, outer, moment = parts
    narrow = [jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), t)
              for t in (local, staged)]  # fmt: skip
    merged, _ = apply(merge.curvature_mix(0.5), *narrow, outer, moment)
    assert {x.dtype for x in merged.values()} == {jnp.dtype(jnp.bfloat16)}


def test_curvature_mix_tells_what_it_needs():
    rule = merge.curvature_mix(0.5)
    assert rule.needs == {"second_moment", "staged"}


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
    local, staged, outer, _ = parts
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
