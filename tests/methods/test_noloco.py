"""NoLoCo: a pair's mean in place of everyone's."""

import numpy as np
import pytest

from cocodc_jax import methods
from cocodc_jax.methods.noloco import noisy_pairs
from cocodc_jax.sync.outer import RegionalOuter
from cocodc_jax.transforms.compressor import identity
from tests.methods.regional_steps import assert_is, one, send


def test_its_parts():
    method = methods.get("noloco", pair_seed=5)
    outer = method.sync.outer
    assert isinstance(outer, RegionalOuter)
    assert (outer.name, outer.group, outer.seed) == ("noisy_pairs", "pairs", 5)
    assert method.schedule == methods.get("diloco", sync_interval=50).schedule
    assert method.sync.merge.name == "replace"


def test_noisy_pairs():
    """phi 2, theta 1; partner phi 4, theta 0: g (1 + 4) / 2, phi 3.

    v = 0.5 * 0 + 0.4 * 2.5 + 0.2 * (2 - 3) = 0.8; phi = 1.2; again with the same:
    v = 0.4 + 1 + 0.2 * (1.2 - 3) = 1.04.
    """
    outer, plain = noisy_pairs(0.4, 0.5, 0.2, 0), identity()
    params, state = one(2.0), outer.init(one(2.0), plain)
    sent, state = send(outer, params, state, one(1.0), plain)
    assert_is(sent["params"], 2)
    assert_is(sent["pseudo_gradient"], 1)
    arrived = {"params": one(3.0), "pseudo_gradient": one(2.5)}
    params, state = outer.receive(params, state, arrived, 4)
    assert_is(params, 1.2)
    params, state = outer.receive(params, state, arrived, 4)
    assert_is(params, 1.2 - 1.04)


def spread(momentum, pull, rounds=300):
    """How far two regions without gradients are apart, in their first distance."""
    outer, plain = noisy_pairs(0.7, momentum, pull, 0), identity()
    here, there = one(1.0), one(-1.0)
    mine, yours = outer.init(here, plain), outer.init(there, plain)
    for _ in range(rounds):
        mean = {"params": one(float(here["w"][0] + there["w"][0]) / 2)}
        mean["pseudo_gradient"] = one(0.0)
        here, mine = outer.receive(here, mine, mean, 2)
        there, yours = outer.receive(there, yours, mean, 2)
    return float(np.abs(here["w"] - there["w"])[0]) / 2


@pytest.mark.parametrize(("momentum", "pull"), [(0.5, 0.7), (0.5, 0.1), (0.9, 0.3)])
def test_two_regions_that_always_meet_come_together(momentum, pull):
    """Defaults, and gamma below mu, which does no harm."""
    assert spread(momentum, pull) < 1e-3


def test_too_strong_a_pull_drives_them_apart():
    """Two that always meet: heavy ball, unstable from gamma 2 (1 + mu) on."""
    assert spread(0.5, 3.2, rounds=100) > 10


def test_errors():
    with pytest.raises(ValueError, match="momentum=1.0 must be at least 0"):
        methods.get("noloco", outer_momentum=1.0)
