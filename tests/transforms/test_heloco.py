"""HeLoCo against its rule in NumPy, its three cases by hand, and its limits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax.transforms import heloco, outer
from tests.program.family_reference import heloco_corrected


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    "numbers", [(0.2, 0.5, 1.0, 3.0, 0.5), (0.9, 8.0, 0.4, 0.1, 0.3)]
)
def test_against_numpy(numbers):
    lr, mu, rho = 0.3, 0.8, 0.7
    optimizer = heloco.heloco(lr, mu, *numbers, rho)
    start = heloco.look_ahead(lr, mu)
    gradients = np.random.default_rng(1).normal(size=(40, 2, 3))
    x = {"a": jnp.ones(3), "b": jnp.ones(3)}
    state, update = optimizer.init(x), jax.jit(optimizer.update)
    theta, m, seen = np.ones((2, 3)), np.zeros((2, 3)), set()
    for pair in gradients:
        step, state = update({"a": pair[0], "b": pair[1]}, state)
        x = optax.apply_updates(x, step)
        for i, g in enumerate(pair):  # each tensor by its own cosine
            corrected, case = heloco_corrected(g, m[i], *numbers)
            seen.add(case)
            m[i] = mu * m[i] + (1 - mu) * rho * corrected
            theta[i] -= lr * (rho * corrected + mu * m[i])
        np.testing.assert_allclose(np.stack([x["a"], x["b"]]), theta, atol=1e-10)
        ahead = start(x, state)
        expected = theta - lr * mu * m
        np.testing.assert_allclose(np.stack([ahead["a"], ahead["b"]]), expected)
    assert seen == {"keep", "turn", "take off"}


def corrected_by(m, g, **options):
    """What becomes of g when the momentum is m: all of it, as mu = 0 forgets m."""
    transform = heloco.scale_by_heloco(0.0, **options)
    state = heloco.AveragedMomentumState(jnp.asarray(m))
    return transform.update(jnp.asarray(g), state)[0]


def test_the_cases_by_hand():
    """m = [2, 0], so kappa ||m|| = 6 of kappa 3."""
    m = np.array([2.0, 0.0])
    np.testing.assert_allclose(corrected_by(m, [1.0, 3.0]), [1.0, 3.0])
    # c = -0.6, conf = 5 / 11: of the -3, 0.5 * 0.6 * 5 / 11 is taken off.
    np.testing.assert_allclose(
        corrected_by(m, [-3.0, 4.0]), [-3 * (1 - 0.3 * 5 / 11), 4.0]
    )
    # c = -1, conf = 1 where the momentum does not count: half, the most there is.
    free = {"confidence_scale": 0.0, "removal_rate": 9.0}
    np.testing.assert_allclose(corrected_by(m, [-4.0, 0.0], **free), [-2.0, 0.0])
    # c = 0, conf = 2 / (2 + 6): a quarter of the way from [0, 1] to [1, 0].
    turned = 2 * np.array([0.25, 0.75]) / np.sqrt(0.25**2 + 0.75**2)
    np.testing.assert_allclose(corrected_by(m, [0.0, 2.0]), turned)


@pytest.mark.parametrize("cosine", [-0.7, -0.1, 0.0, 0.1, 0.19, 0.3])
def test_what_opposes_shrinks_and_what_is_turned_keeps_its_length(cosine):
    g = 3 * np.array([cosine, np.sqrt(1 - cosine**2)])
    out = np.asarray(corrected_by([1.0, 0.0], g))
    assert out[0] >= g[0]
    if cosine < 0:
        assert abs(g[0]) / 2 <= abs(out[0]) < abs(g[0])
        np.testing.assert_allclose(out[1], g[1])
    else:
        np.testing.assert_allclose(np.linalg.norm(out), 3)


def test_the_first_step_and_zeros_are_kept():
    g = np.array([1.0, -2.0])
    zero = np.zeros(2)
    np.testing.assert_array_equal(corrected_by(zero, g, keep_cosine=1.0), g)
    np.testing.assert_array_equal(corrected_by(g, zero), zero)


def test_a_scalar_can_turn_back():
    """A number has only cosines 1 and -1; rid of all it could never turn."""
    optimizer = outer.heloco(0.5, 0.5)
    x, state = jnp.array(4.0), optimizer.init(jnp.array(4.0))
    for _ in range(40):
        step, state = optimizer.update(x, state)  # of x**2 / 2
        x = x + step
    np.testing.assert_allclose(x, 0, atol=1e-3)


def test_what_keeps_everything_is_look_ahead_bit_for_bit():
    actual, wanted = heloco.heloco(0.3, 0.9, keep_cosine=-1.0), heloco.mla(0.3, 0.9)
    states = [actual.init(jnp.ones(4)), wanted.init(jnp.ones(4))]
    for g in np.random.default_rng(0).normal(size=(9, 4)):
        step, states[0] = actual.update(jnp.asarray(g), states[0])
        theirs, states[1] = wanted.update(jnp.asarray(g), states[1])
        np.testing.assert_array_equal(step, theirs)


def test_look_ahead_finds_the_momentum_in_wrappers_and_misses_none():
    params, start = jnp.array([4.0]), heloco.look_ahead(1.0, 0.5)
    for factory in (heloco.heloco, heloco.mla):
        # Its state has the hyperparameter "momentum" too.
        wrapped = optax.inject_hyperparams(factory)(learning_rate=1.0, momentum=0.5)
        _, state = wrapped.update(jnp.array([2.0]), wrapped.init(params), params)
        np.testing.assert_allclose(start(params, state), [3.5])
    with pytest.raises(ValueError, match="state holds 0 momenta of heloco or mla"):
        start(params, optax.sgd(1.0, momentum=0.5).init(params))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, r"momentum=1\.0"),
        ({"keep_cosine": 1.5}, r"keep_cosine=1\.5 must be between -1 and 1"),
        ({"max_removal": -0.1}, r"max_removal=-0\.1 must be between 0 and 1"),
        ({"removal_rate": -1.0}, r"removal_rate=-1\.0 must be at least 0 and fi"),
        ({"turn_rate": -1.0}, r"turn_rate=-1\.0"),
        ({"confidence_scale": -3.0}, r"confidence_scale=-3\.0"),
        ({"weight": 0.0}, r"weight=0\.0 must be positive"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        heloco.heloco(**options)


def test_looking_ahead_leaves_what_is_masked_where_it_is():
    start, params = outer.look_ahead(1.0, 0.5), {"a": jnp.ones(1), "b": jnp.ones(1)}
    masked = optax.masked(outer.mla(1.0, 0.5), {"a": True, "b": False})
    _, state = masked.update(params, masked.init(params), params)  # m = 1/2 in a
    found = start(params, state)
    np.testing.assert_array_equal([found["a"][0], found["b"][0]], [0.75, 1])
