"""NoLoCo: a pair's mean in place of everyone's, and where regions stay together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax import methods
from cocodc_jax.sync.outer import RegionalOuter
from cocodc_jax.transforms.compressor import identity
from cocodc_jax.transforms.outer import group_heavy_ball


def test_its_parts():
    method = methods.get("noloco", pair_seed=5)
    outer = method.sync.outer
    assert isinstance(outer, RegionalOuter)
    assert (outer.name, outer.group, outer.seed) == ("noisy_pairs", "pairs", 5)
    assert method.schedule == methods.get("diloco", sync_interval=50).schedule
    assert method.sync.merge.name == "replace"


def moments(momentum, pull):
    """What a sync does to the moments (A, B, C) of one of many regions."""
    c = np.array([pull**2 / 2, momentum * pull, momentum**2])
    b = np.array([pull / 2, momentum, 0])  # E phi v'
    return np.stack([np.array([1, 0, 0]) - 2 * b + c, b - c, c])


def growth(momentum, pull):
    return np.abs(np.linalg.eigvals(moments(momentum, pull))).max()


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.7, 0.9])
def test_the_border_of_stability_is_that_of_the_moments(momentum):
    """Found by halving, of the rule as the method's docstring has it."""
    low, high = 1e-3, 4.0
    assert growth(momentum, low) < 1 < growth(momentum, high)
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if growth(momentum, middle) < 1 else (low, middle)
    np.testing.assert_allclose(low, 2 * (1 - momentum**2), rtol=1e-6)


@functools.partial(jax.jit, static_argnames="rounds")
def spread(momentum, pull, seed, rounds, num_regions=1024):
    """Log of the RMS distance to the mean, `[rounds]`, of the package's own step.

    Each region is one number, paired anew with any other in every round.
    """
    optimizer = group_heavy_ball(0.7, momentum, pull)

    def sync(carry, key):
        phi, state = carry
        order = jax.random.permutation(key, num_regions)
        crossed = order.reshape(-1, 2)[:, ::-1].ravel()
        partner = jnp.zeros_like(order).at[order].set(crossed)
        step, state = optimizer.update(
            jnp.zeros_like(phi), state, phi, group_mean_params=(phi + phi[partner]) / 2
        )
        phi = phi + step
        return (phi, state), jnp.log(phi.std())

    first, *keys = jax.random.split(jax.random.key(seed), rounds + 1)
    phi = jax.random.normal(first, (num_regions,))
    carry = phi, optimizer.init(phi)
    return jax.lax.scan(sync, carry, jnp.stack(keys))[1]


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_many_regions_that_meet_at_random_part_at_that_border(momentum):
    """A twelfth below it they come together, as much above they part.

    Rates are those of the moments: to 0.02 a round, of 1024 regions.
    """
    border = 2 * (1 - momentum**2)
    for pull in (border * 11 / 12, border * 13 / 12):
        path = np.asarray(spread(momentum, pull, 0, 60))
        rate = (path[-1] - path[20]) / (len(path) - 21)
        np.testing.assert_allclose(rate, np.log(growth(momentum, pull)) / 2, atol=0.02)
        assert (rate < 0) == (pull < border)


@pytest.mark.parametrize(("momentum", "pull"), [(0.5, 0.1), (0.9, 0.3), (0.5, 0.7)])
def test_a_pull_below_the_momentum_does_no_harm(momentum, pull):
    assert growth(momentum, pull) < 1
    assert methods.get("noloco", outer_momentum=momentum, pair_pull=pull)


def test_the_pull_is_the_learning_rate_unless_it_is_given():
    params = jnp.float32(2)
    for options in ({"outer_lr": 0.4}, {"outer_lr": 0.9, "pair_pull": 0.4}):
        outer = methods.get("noloco", **options).sync.outer
        arrived = {"params": jnp.float32(1), "pseudo_gradient": jnp.float32(0)}
        state = outer.init(params, identity())
        moved, _ = outer.receive(params, state, arrived, 4)
        np.testing.assert_allclose(moved, 2 - 0.4, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outer_momentum": 1.0}, "outer_momentum=1.0 must be at least 0"),
        (
            {"outer_momentum": 0.9},
            r"pair_pull=0.7 must be .* below 2 \(1 - outer_momentum\^2\) = 0.38",
        ),
        ({"pair_pull": 1.5}, "pair_pull=1.5 must be above 0 and below .* = 1.5 with"),
        ({"pair_pull": 0.0}, "pair_pull=0.0 must be above 0"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        methods.get("noloco", **options)
