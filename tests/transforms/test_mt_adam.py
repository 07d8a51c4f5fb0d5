"""Adam of several time scales: against NumPy, and where it is Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax.transforms.mt_adam import mt_adam, scale_by_mt_adam
from tests.program.family_reference import Momenta

B1S, WEIGHTS, B2, EPS = (0.9, 0.99), (0.6, 0.3), 0.95, 1e-8
GRADIENTS = np.random.default_rng(0).normal(size=(9, 5))


def steps_of(transform, gradients=GRADIENTS):
    state, update, out = transform.init(jnp.zeros(5)), jax.jit(transform.update), []
    for gradient in gradients:
        step, state = update(jnp.asarray(gradient), state)
        out.append(np.asarray(step))
    return np.stack(out)


@pytest.mark.parametrize(
    ("b1s", "weights"), [(B1S, WEIGHTS), ((0.999,), (0.7,)), (B1S, (0.3, 0.7))]
)
def test_it_is_its_formula(b1s, weights):
    with jax.enable_x64(True):
        found = steps_of(scale_by_mt_adam(b1s, weights, B2, EPS))
    own = Momenta(1.0, b1s, weights, B2)
    expected = [-own.step(np.zeros(5), gradient) for gradient in GRADIENTS]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


def test_one_momentum_of_weight_one_is_adam():
    found = steps_of(scale_by_mt_adam((0.9,), (1.0,), B2))
    np.testing.assert_allclose(
        found, steps_of(optax.scale_by_adam(0.9, B2)), rtol=1e-6, atol=1e-7
    )


def test_the_recipe_is_adamw():
    params = {"w": jnp.arange(5.0)}
    gradient = {"w": jnp.asarray(GRADIENTS[0], jnp.float32)}
    one, other = mt_adam(0.1, (0.9,), (1.0,)), optax.adamw(0.1)
    steps = [t.update(gradient, t.init(params), params)[0]["w"] for t in (one, other)]
    np.testing.assert_allclose(*steps, rtol=1e-5)


def test_errors():
    with pytest.raises(ValueError, match=r"weights=\(0.5,\) must be one for each of"):
        scale_by_mt_adam(B1S, (0.5,))
    with pytest.raises(ValueError, match=r"weights=\(0.5, -0.1\) .* none below 0"):
        scale_by_mt_adam(B1S, (0.5, -0.1))
    with pytest.raises(ValueError, match=r"weights=\(0.6, 0.5\) must add up to 1"):
        scale_by_mt_adam(B1S, (0.6, 0.5))
    with pytest.raises(ValueError, match="b1s=1.0 must be at least 0 and below 1"):
        scale_by_mt_adam((1.0,), (0.5,))
