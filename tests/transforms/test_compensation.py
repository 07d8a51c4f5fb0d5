"""Delay compensation: its sign, units, trust region and reported ratio.

- On a quadratic with the exact Hessian it gives the undelayed gradient to rounding,
  and with the sign flipped doubles the error.
- In the region program's units CoCoDC's merge (arXiv 2504.17672) comes out.
"""

from inspect import unwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax.transforms import compensation, curvature, secant
from cocodc_jax.transforms.compensation import delay_compensation


def apply(transform, updates, params, stale, **extra):
    @jax.jit
    def go(updates, params, stale):
        state = transform.init(params)
        return transform.update(updates, state, params, stale_params=stale, **extra)

    return go(updates, params, stale)


@pytest.fixture
def quadratic():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(6, 6))
    hessian = root @ root.T
    center = rng.normal(size=6)
    return hessian, lambda w: hessian @ (w - center), rng.normal(size=(2, 6))


def test_exact_hessian_gives_the_undelayed_gradient_and_its_negative_does_not(
    quadratic,
):
    _, gradient, (stale, now) = quadratic
    with jax.enable_x64(True):
        error = {}
        for strength in (1.0, 0.0, -1.0):
            fresh, _ = apply(
                delay_compensation("hessian_vector", strength),
                updates=gradient(stale),
                params=now,
                stale=stale,
                gradient_fn=gradient,
            )
            error[strength] = np.linalg.norm(fresh - gradient(now))

    scale = np.linalg.norm(gradient(now))
    assert error[1.0] < 1e-13 * scale
    assert error[0.0] > 0.1 * scale
    np.testing.assert_allclose(error[-1.0], 2 * error[0.0], rtol=1e-12)


def test_reported_ratio_and_trust_region():
    g = jnp.array([3.0, 4.0])
    now = jnp.array([10.0, 10.0])
    stale = jnp.zeros(2)
    correction = 0.5 * np.array([9 * 10.0, 16 * 10.0])
    ratio = np.linalg.norm(correction) / 5

    fresh, state = apply(delay_compensation("outer_product", 0.5), g, now, stale)
    np.testing.assert_allclose(fresh, g + correction, rtol=1e-6)
    np.testing.assert_allclose(state.correction_ratio, ratio, rtol=1e-6)

    fresh, state = apply(
        delay_compensation("outer_product", 0.5, max_ratio=0.2), g, now, stale
    )
    np.testing.assert_allclose(state.correction_ratio, 0.2, rtol=1e-6)
    np.testing.assert_allclose(fresh, g + correction * 0.2 / ratio, rtol=1e-6)

    fresh, state = apply(
        delay_compensation("outer_product", max_ratio=1e9), g, now, stale
    )
    np.testing.assert_allclose(fresh, g + correction, rtol=1e-6)


def test_ratio_is_zero_for_a_zero_update():
    zero = jnp.zeros(2)
    _, state = apply(
        delay_compensation("isotropic"), zero, zero + 1, zero, delay_steps=1
    )
    assert state.correction_ratio == 0
    assert state.correction_ratio.dtype == jnp.float32


def test_scheduled_strength_follows_the_update_count():
    transform = delay_compensation("outer_product", optax.linear_schedule(0.0, 1.0, 2))
    one = jnp.ones(1)
    state = transform.init(one)
    scales = []
    for _ in range(3):
        fresh, state = transform.update(one, state, one + 1, stale_params=one)
        scales.append(float(fresh[0]))

    assert scales == [1.0, 1.5, 2.0]
    assert state.update_count == 3


def test_squares_of_small_float16_updates_do_not_underflow():
    tiny = jnp.full(4, 1e-5, jnp.float16)
    transform = delay_compensation(curvature.normalized_outer_product(eps=0.0), 1.0)
    fresh, state = apply(transform, tiny, tiny * 0 + 1, tiny * 0)
    np.testing.assert_allclose(state.correction_ratio, 1.0, rtol=1e-2)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("isotropic", "delay_steps"),
        ("adam_second_moment", "learning_rate, second_moment"),
        ("hessian_vector", "gradient_fn"),
        ("gauss_newton", "model_fn, output_loss_fn"),
        ("hutchinson", "gradient_fn, key"),
    ],
)
def test_missing_extras_are_named_while_tracing(name, missing):
    one = jnp.ones(1)
    with pytest.raises(ValueError, match=f"'{name}' needs {missing}"):
        apply(delay_compensation(name), one, one, one)


def test_missing_parameters_are_named():
    one = jnp.ones(1)
    transform = delay_compensation("outer_product")
    with pytest.raises(ValueError, match="needs params, stale_params"):
        transform.update(one, transform.init(one))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: delay_compensation("fisher"), "'fisher' is unknown"),
        (lambda: delay_compensation("none", max_ratio=0.0), r"max_ratio=0\.0"),
        (lambda: delay_compensation("none", np.nan), "strength=nan must be a finite"),
        (lambda: compensation.adam_second_moment(1.0), r"b2=1\.0 must be"),
        (lambda: secant.secant("none", scope="leaf"), "scope='leaf'"),
        (lambda: secant.secant("none", max_weight=0), "max_weight=0"),
        (lambda: secant.secant("fisher"), "base='fisher' is unknown; use one of"),
        (lambda: unwrap(secant.secant)(None), "base=None must be one of"),
    ],
)
def test_wrong_arguments_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def run_sgd(optimizer, gradients, stales, w):
    state = optimizer.init(w)
    update = jax.jit(
        lambda g, s, p, stale: optimizer.update(g, s, p, stale_params=stale)
    )
    for g, stale in zip(gradients, stales, strict=True):
        step, state = update(g, state, w, stale)
        w = optax.apply_updates(w, step)
    return w


@pytest.fixture
def walk():
    rng = np.random.default_rng(3)
    return rng.normal(size=(4, 5)), rng.normal(size=(4, 5)), rng.normal(size=5)


def test_dc_asgd_against_numpy(walk):
    """Asynchronous SGD with delay compensation (arXiv 1609.08326, equation 10)."""
    gradients, stales, w = walk
    compensation = delay_compensation("outer_product", strength=2.0)
    optimizer = optax.chain(compensation, optax.sgd(0.1))

    with jax.enable_x64(True):
        actual = run_sgd(optimizer, gradients, stales, jnp.asarray(w))

    for g, stale in zip(gradients, stales, strict=True):
        w = w - 0.1 * (g + 2.0 * g * g * (w - stale))
    np.testing.assert_allclose(actual, w, rtol=1e-12)


@pytest.mark.parametrize("scope", ["tensor", "tree"])
def test_secant_weight_is_least_squares_per_tensor(scope):
    rng = np.random.default_rng(1)
    names = ("a", "b")
    g, noise, s, d = ({n: rng.normal(size=3) for n in names} for _ in range(4))
    stale = {n: rng.normal(size=3) for n in names}
    add = lambda x, y: {n: x[n] + y[n] for n in names}  # noqa: E731
    later = {n: g[n] + g[n] ** 2 * s[n] + 0.3 * noise[n] for n in names}

    with jax.enable_x64(True):
        fresh, _ = apply(
            delay_compensation(
                secant.secant(curvature.outer_product(), scope=scope), 1.0
            ),
            updates=g,
            params=add(stale, d),
            stale=stale,
            later_gradient=later,
            later_params=add(stale, s),
        )

    groups = [names] if scope == "tree" else [("a",), ("b",)]
    for group in groups:
        y = np.concatenate([later[n] - g[n] for n in group])
        predicted = np.concatenate([g[n] ** 2 * s[n] for n in group])
        weight = np.linalg.lstsq(predicted[:, None], y)[0][0]
        for n in group:
            np.testing.assert_allclose(
                fresh[n], g[n] + max(weight, 0) * g[n] ** 2 * d[n], rtol=1e-10
            )


@pytest.mark.parametrize(("sign", "weight"), [(1, 1), (-1, 0)])
def test_secant_is_one_on_the_true_hessian_and_zero_against_it(quadratic, sign, weight):
    _, gradient, (stale, now) = quadratic
    later = stale + 0.1

    with jax.enable_x64(True):
        fresh, _ = apply(
            delay_compensation(secant.secant(curvature.hessian_vector()), 1.0),
            updates=gradient(stale),
            params=now,
            stale=stale,
            gradient_fn=lambda w: sign * gradient(w),
            later_params=later,
            later_gradient=gradient(later),
        )

    wanted = gradient(now if weight else stale)
    np.testing.assert_allclose(fresh, wanted, rtol=1e-10)


def test_the_weight_of_a_secant_is_capped():
    one = jnp.ones(2)
    chosen = secant.secant(curvature.isotropic(), max_weight=0.5)

    fresh, _ = apply(
        delay_compensation(chosen, 1.0),
        *(one, one + 1, one),
        later_gradient=one + 3,
        later_params=one + 1,
        delay_steps=1,
    )

    np.testing.assert_allclose(fresh, 1.5 * np.ones(2))


def test_secant_of_a_name_is_that_of_its_defaults():
    by_name = secant.secant("isotropic")
    built = secant.secant(curvature.isotropic())
    assert (by_name.name, by_name.needs) == (built.name, built.needs)
