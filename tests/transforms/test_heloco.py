"""HeLoCo against its rule in NumPy, its three cases by hand, and its limits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax.transforms import heloco, outer


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def correct(g, m, upper, lower, shrink):
    """Rule by angles: in the plane of m and g, g is at angle a from m."""
    if not np.any(m) or not np.any(g):
        return g, "keep"
    length, axis = np.linalg.norm(g), m / np.linalg.norm(m)
    angle = np.arccos(np.clip(g @ axis / length, -1, 1))
    if angle <= np.arccos(upper):
        return g, "keep"
    normal = g - (g @ axis) * axis
    normal = normal / np.linalg.norm(normal)
    to = np.arccos(upper)
    turned = length * (np.cos(to) * axis + np.sin(to) * normal)
    if angle <= np.arccos(lower):
        return turned, "turn"
    s = (1 + np.cos(angle)) / (1 + lower)
    return s * turned + (1 - s) * shrink * g, "shrink"


@pytest.mark.parametrize(
    ("upper", "lower", "shrink"), [(0.0, -0.5, 0.5), (0.4, -0.1, 0.2), (0.3, 0.3, 0.0)]
)
def test_against_numpy(upper, lower, shrink):
    lr, b = 0.3, 0.8
    optimizer = heloco.heloco(lr, b, upper, lower, shrink)
    gradients = np.random.default_rng(1).normal(size=(40, 2, 3))
    x = {"a": jnp.ones(3), "b": jnp.ones(3)}
    state, update = optimizer.init(x), jax.jit(optimizer.update)
    theta, m, seen = np.ones((2, 3)), np.zeros((2, 3)), set()
    for pair in gradients:
        step, state = update({"a": pair[0], "b": pair[1]}, state)
        x = optax.apply_updates(x, step)
        for i, g in enumerate(pair):  # each tensor by its own cosine
            corrected, case = correct(g, m[i], upper, lower, shrink)
            seen.add(case)
            m[i] = b * m[i] + corrected
            theta[i] -= lr * (corrected + b * m[i])
        np.testing.assert_allclose(np.stack([x["a"], x["b"]]), theta, atol=1e-10)
    assert seen >= {"keep", "shrink"}
    assert "turn" in seen or upper == lower


def corrected_by(m, g, **options):
    """What becomes of g when the momentum is m, without Nesterov's part."""
    transform = heloco.scale_by_heloco(0.0, **options)
    state = heloco.HelocoState(jnp.asarray(m))
    return transform.update(jnp.asarray(g), state)[0]


def test_the_cases_by_hand():
    m = np.array([2.0, 0.0])
    np.testing.assert_allclose(corrected_by(m, [0.1, 3.0]), [0.1, 3.0])
    np.testing.assert_allclose(corrected_by(m, [-5.0, 12.0]), [0.0, 13.0])
    np.testing.assert_allclose(corrected_by(m, [-3.0, 0.0]), [-1.5, 0.0])
    # cosine -0.8: s = 0.4, of [0, 5] and of half of [-4, 3]
    np.testing.assert_allclose(corrected_by(m, [-4.0, 3.0]), [-1.2, 2.9])


@pytest.mark.parametrize("cosine", [0.2, -0.4])
def test_the_rule_is_continuous_at_its_bounds(cosine):
    sides = []
    for c in (cosine - 1e-9, cosine + 1e-9):
        g = 3 * np.array([c, np.sqrt(1 - c**2)])
        sides.append(corrected_by([1.0, 0.0], g, upper=0.2, lower=-0.4))
    np.testing.assert_allclose(sides[0], sides[1], atol=1e-7)


def test_the_first_step_and_zeros_are_kept():
    g = np.array([1.0, -2.0])
    np.testing.assert_array_equal(corrected_by([0.0, 0.0], g, upper=1.0, lower=1.0), g)
    np.testing.assert_array_equal(corrected_by(g, 0 * g), 0 * g)


def test_a_scalar_can_turn_back():
    """A number has only cosines 1 and -1; shrunk to nothing it could never turn."""
    optimizer = outer.heloco(0.5, 0.5)
    x, state = jnp.array(4.0), optimizer.init(jnp.array(4.0))
    for _ in range(40):
        step, state = optimizer.update(x, state)  # of x**2 / 2
        x = x + step
    np.testing.assert_allclose(x, 0, atol=1e-3)


def test_with_lowest_bounds_it_is_nesterov():
    actual, wanted = heloco.heloco(0.3, 0.9, -1.0, -1.0), optax.sgd(0.3, 0.9, True)
    states = [actual.init(jnp.ones(4)), wanted.init(jnp.ones(4))]
    for g in np.random.default_rng(0).normal(size=(9, 4)):
        step, states[0] = actual.update(jnp.asarray(g), states[0])
        theirs, states[1] = wanted.update(jnp.asarray(g), states[1])
        np.testing.assert_allclose(step, theirs, rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, r"momentum=1\.0"),
        ({"upper": -0.6}, r"lower=-0\.5 and upper=-0\.6 must be cosines"),
        ({"upper": 1.5}, r"upper=1\.5"),
        ({"lower": -2.0}, r"lower=-2\.0"),
        ({"shrink": 1.5}, r"shrink=1\.5 must be between 0 and 1"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        heloco.heloco(**options)
