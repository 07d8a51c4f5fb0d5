"""CoCoDC: needs of its curvatures, its defaults, and the published rule."""

import jax
import numpy as np
import pytest

from cocodc_jax import methods
from cocodc_jax.sync.schedules import Measured, adaptive
from cocodc_jax.transforms import curvature


def test_syncs_per_interval_is_twice_k_where_the_interval_allows():
    made = methods.get("cocodc", sync_interval=5, num_fragments=3, delay_steps=0)
    assert made.schedule == adaptive(5, 3, 0, 5)


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({}, set()),
        ({"curvature": "outer_product"}, set()),
        ({"curvature": "outer_product", "curvature_units": "gradient"},
         {"learning_rate"}),
        ({"curvature": "none"}, set()),
        ({"curvature": "isotropic"}, set()),
        ({"curvature": "adam_second_moment"}, {"learning_rate", "second_moment"}),
        ({"curvature": "hessian_vector"},
         {"gradient_fn", "learning_rate", "second_moment"}),
        ({"curvature": "hessian_vector", "curvature_units": "parameter"},
         {"gradient_fn", "learning_rate"}),
        ({"curvature": curvature.hessian_vector("parameter")},
         {"gradient_fn", "learning_rate"}),
    ],
)  # fmt: skip
def test_curvature_adds_its_needs_to_the_merge(options, needs):
    assert methods.get("cocodc", **options).sync.merge.needs == needs | {"staged"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # G = (3, 4) in two steps, D = (2, 0): g = (1.5, 2), g g D / H = (0.45, 0), half
        # of it twice is 0.45; 2 - 3 - 0.45.
        ({}, [-1.45, -4.0]),
        # c = (18, 0) / 4e-4 is turned to the length of G, 5; 2 - 3 - 5.
        ({"rule": "code"}, [-6.0, -4.0]),
        ({"rule": "code", "relative_strength": 0.2}, [-2.0, -4.0]),
    ],
)
def test_the_papers_merge_by_hand(options, expected):
    made = methods.get("cocodc_paper", sync_interval=10, delay_steps=2, **options)
    local, staged, outer = (
        {"w": np.array(x, np.float32)} for x in ([-3, -4], [0, 0], [2, 0])
    )
    merged, _ = made.sync.merge.apply(local, staged, outer, delay_steps=2)
    np.testing.assert_allclose(merged["w"], expected, rtol=1e-6)


@pytest.mark.parametrize("rule", ["text", "code"])
def test_strengths_may_be_traced(rule):
    def name(strength):
        made = methods.get("cocodc_paper", rule=rule, compensation_strength=strength)
        assert made.name == "cocodc_paper"
        return strength

    jax.eval_shape(name, 0.5)


def test_the_rule_of_the_paper_sets_the_transmission_score():
    scores = {
        rule: methods.get("cocodc_paper", rule=rule).schedule.transmission_score
        for rule in ("text", "code")
    }
    assert scores == {"text": "pseudo_gradient", "code": "drift"}


def test_automatic_delays_and_syncs_follow_measured_times():
    made = methods.get("cocodc", delay_steps="auto", syncs_per_interval="auto")
    assert isinstance(made.schedule, Measured)
    assert made.schedule.network_share == 0.4
    assert made.needs == {"staged", "norm", "times"}
