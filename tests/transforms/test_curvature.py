"""Curvatures against dense matrices and hand-written formulas, in float64.

The tests, each of which would fail otherwise:
- every formula equals its NumPy oracle, sign and units included;
- the exact products equal the dense Hessian and the dense Gauss-Newton matrix;
- Hutchinson's estimate is exact for a diagonal Hessian and unbiased otherwise.
"""

import functools
from inspect import unwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from cocodc_jax.transforms import curvature
from cocodc_jax.transforms.compensation import adam_second_moment, delay_compensation
from cocodc_jax.transforms.secant import secant

pytestmark = pytest.mark.usefixtures("float64")


def random_tree(seed):
    rng = np.random.default_rng(seed)
    return {"w": rng.normal(size=(3, 2)), "b": rng.normal(size=(2,))}


def model(params, inputs):
    return jnp.tanh(inputs @ params["w"] + params["b"][None])


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    inputs = jnp.asarray(rng.normal(size=(5, 3)))
    labels = jnp.arange(5) % 2

    def output_loss_fn(outputs):
        logits = jax.nn.log_softmax(outputs)
        return -jnp.mean(logits[jnp.arange(5), labels])

    def model_fn(params):
        return model(params, inputs)

    def loss(params):
        return output_loss_fn(model_fn(params))

    return {
        "model_fn": model_fn,
        "output_loss_fn": output_loss_fn,
        "gradient_fn": jax.grad(loss),
        "stale_params": jax.tree.map(jnp.asarray, random_tree(1)),
    }, loss


def call(chosen, displacement, **extra):
    extra = {name: extra[name] for name in chosen.needs}
    gradient = random_tree(2)
    return jax.jit(lambda g, d: chosen.product(g, d, **extra))(gradient, displacement)


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


G = random_tree(2)
D = random_tree(3)
g = flat(G)
d = flat(D)
NU = jax.tree.map(lambda x: x**2 + 0.1, random_tree(4))
nu = flat(NU)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (curvature.none(), 0 * d),
        (curvature.isotropic(), d / 5),
        (curvature.outer_product(), g * g * d),
        (curvature.outer_product(sync_interval=100), g * g * d / 100),
        # learning_rate * (g / learning_rate)^2 D / H
        (
            curvature.outer_product(100, units="gradient"),
            1e-3 * (g / 1e-3) ** 2 * d / 100,
        ),
        (curvature.adam_second_moment(), 1e-3 * np.sqrt(nu) * d),
        (curvature.adam_second_moment(units="gradient"), nu * d),
    ],
)
def test_elementwise_curvatures_equal_their_formulas(chosen, expected):
    product = call(chosen, D, delay_steps=5, learning_rate=1e-3, second_moment=NU)
    np.testing.assert_allclose(flat(product), expected, rtol=1e-12, atol=0)


def test_normalized_outer_product_has_the_length_of_the_gradient_per_tensor():
    product = call(curvature.normalized_outer_product(eps=0.0), D)
    for name in G:
        gi = np.asarray(G[name])
        di = np.asarray(D[name])
        c = gi * gi * di
        expected = np.linalg.norm(gi) / np.linalg.norm(c) * c
        np.testing.assert_allclose(product[name], expected, rtol=1e-12)


def test_normalized_outer_product_over_the_tree_and_capped():
    c = g * g * d
    weight = np.linalg.norm(g) / (np.linalg.norm(c) + 1e-3)

    free = call(curvature.normalized_outer_product(scope="tree", eps=1e-3), D)
    np.testing.assert_allclose(flat(free), weight * c, rtol=1e-12)

    cap = weight / 3
    capped = call(curvature.normalized_outer_product(cap, scope="tree"), D)
    np.testing.assert_allclose(flat(capped), cap * c, rtol=1e-12)


def dense_hessian(loss, params):
    vector, unravel = ravel_pytree(params)
    return np.asarray(jax.jit(jax.hessian(lambda v: loss(unravel(v))))(vector))


@pytest.mark.parametrize("units", ["gradient", "parameter", "adam"])
def test_hessian_vector_equals_the_dense_hessian(problem, units):
    extra, loss = problem
    dense = dense_hessian(loss, extra["stale_params"])
    scale = {"gradient": 1.0, "parameter": 0.3, "adam": 0.3 / (np.sqrt(nu) + 1e-8)}
    product = call(
        curvature.hessian_vector(units), D, learning_rate=0.3, second_moment=NU, **extra
    )
    np.testing.assert_allclose(flat(product), scale[units] * (dense @ d), rtol=1e-10)


def test_before_its_first_step_adam_has_a_second_moment_of_zero():
    nu = {"w": jnp.array([[0.0, 0.0], [0.1, 0.2]])}
    state = optax.ScaleByAdamState(jnp.array([0, 2]), nu, nu)
    moment = adam_second_moment(0.5)(state)
    np.testing.assert_allclose(moment["w"], [[0, 0], [0.1 / 0.75, 0.2 / 0.75]])


def test_hessian_vector_in_units_of_adam_is_zero_before_adams_first_step(problem):
    extra, _ = problem
    extra |= {"learning_rate": 0.3, "second_moment": jax.tree.map(jnp.zeros_like, NU)}
    product = call(curvature.hessian_vector("adam"), D, **extra)
    np.testing.assert_array_equal(flat(product), 0 * d)


@pytest.mark.parametrize("units", ["gradient", "parameter"])
def test_gauss_newton_equals_the_dense_matrix(problem, units):
    extra, _ = problem
    vector, unravel = ravel_pytree(extra["stale_params"])

    @jax.jit
    def parts(vector):
        jacobian = jax.jacobian(lambda v: extra["model_fn"](unravel(v)).ravel())(vector)
        outputs = extra["model_fn"](unravel(vector))
        of_flat = lambda o: extra["output_loss_fn"](o.reshape(outputs.shape))  # noqa: E731
        return jacobian, jax.hessian(of_flat)(outputs.ravel())

    jacobian, head = map(np.asarray, parts(vector))
    dense = jacobian.T @ head @ jacobian
    scale = {"gradient": 1.0, "parameter": 0.3}[units]

    product = call(curvature.gauss_newton(units), D, learning_rate=0.3, **extra)
    np.testing.assert_allclose(flat(product), scale * (dense @ d), rtol=1e-10)
    assert d @ dense @ d >= 0


def test_hutchinson_is_unbiased(problem):
    extra, loss = problem
    diagonal = np.diag(dense_hessian(loss, extra["stale_params"]))
    product = call(curvature.hutchinson(4000), D, key=jax.random.key(0), **extra)
    # Standard error: sqrt(sum of squared off-diagonals / samples), below 0.3 / 63.
    np.testing.assert_allclose(flat(product) / d, diagonal, atol=4 * 0.3 / 63)


@pytest.mark.parametrize(
    ("chosen", "gradients"),
    [(curvature.hessian_vector(), 3.0), (curvature.gauss_newton(), 2.0)],
)
def test_curvature_products_cost_a_few_gradients(chosen, gradients):
    """By XLA's count of operations: a dense Hessian would cost thousands."""
    x = np.ones((64, 64))
    params = {f"w{i}": np.eye(64) for i in range(4)}

    def model_fn(params):
        return functools.reduce(lambda h, w: jnp.tanh(h @ w), params.values(), x)

    def half_square(outputs):
        return jnp.sum(outputs**2) / 2

    def gradient_fn(params):
        return jax.grad(lambda p: half_square(model_fn(p)))(params)

    extra = {
        "gradient_fn": gradient_fn,
        "model_fn": model_fn,
        "output_loss_fn": half_square,
        "stale_params": params,
    }
    extra = {name: extra[name] for name in chosen.needs}
    product = lambda d: chosen.product(d, d, **extra)  # noqa: E731
    assert flops(product, params) < gradients * flops(gradient_fn, params)


def flops(function, *args):
    return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: curvature.get("hesian"), "curvature='hesian' is unknown"),
        (lambda: curvature.outer_product(0), "sync_interval=0"),
        (lambda: curvature.outer_product(units="adam"), "units='adam'"),
        (lambda: curvature.normalized_outer_product(-1.0), r"max_weight=-1\.0"),
        (lambda: curvature.normalized_outer_product(scope="leaf"), "scope='leaf'"),
        *(
            (
                lambda x=x: curvature.normalized_outer_product(eps=x),
                f"eps={x} must be at",
            )
            for x in (-1e-8, float("nan"), float("inf"))
        ),
        (lambda: curvature.adam_second_moment("adam"), "units='adam'"),
        (lambda: curvature.hessian_vector("steps"), "units='steps'"),
        (lambda: curvature.gauss_newton("steps"), "units='steps'"),
        (lambda: curvature.hutchinson(0), "num_samples=0"),
        # Unwrapped, as users have them: only in tests are types checked at every call.
        (lambda: unwrap(curvature.hutchinson)(2.5), r"num_samples=2\.5 .* whole numb"),
        (lambda: unwrap(curvature.outer_product)(0.0), r"sync_interval=0\.0 must be"),
        (lambda: call(curvature.isotropic(), D, delay_steps=0), "delay_steps=0"),
        (lambda: call(curvature.isotropic(), D, delay_steps=0.0), r"delay_steps=0\.0"),
    ],
)
def test_wrong_arguments_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_learning_rate_of_zero_gives_no_correction():
    """Schedules end at zero; a positive rate gives g g D / (rate H)."""
    chosen = curvature.outer_product(sync_interval=10, units="gradient")
    g = jnp.array([1e-3, 0.0])
    d = jnp.array([2.0, 3.0])
    product = jax.jit(lambda rate: chosen.product(g, d, learning_rate=rate))
    np.testing.assert_array_equal(product(0.0), [0, 0])
    np.testing.assert_allclose(product(1e-2), [2e-5, 0], rtol=1e-6)


@pytest.mark.parametrize("shape", [(2,), ()])  # A number below blocks is no stack.
@pytest.mark.parametrize("eps", [0.0, 1e-50])
def test_a_layer_that_did_not_move_is_not_corrected(eps, shape):
    one = jnp.ones(shape)
    chosen = curvature.normalized_outer_product(eps=eps, scope="layer")

    product = chosen.product({"blocks": {"x": one}}, {"blocks": {"x": 0 * one}})

    np.testing.assert_array_equal(product["blocks"]["x"], 0 * one)


def test_samples_of_bfloat16_are_summed_wide():
    """Of a diagonal Hessian every sample is the diagonal itself."""
    scale = jnp.bfloat16(1.1015625)
    params = jnp.ones(3, jnp.bfloat16)

    product = curvature.hutchinson(num_samples=512).product(
        params,
        jnp.ones(3),
        gradient_fn=lambda x: scale * x,
        stale_params=params,
        key=jax.random.key(0),
    )

    np.testing.assert_array_equal(product, np.full(3, 1.1015625, np.float32))


def test_a_rate_of_float16_does_not_underflow():
    """1e-5 times 1e-3 is below the smallest number of float16."""
    params = jnp.ones(1, jnp.float16)

    product = curvature.hessian_vector(units="parameter").product(
        params,
        jnp.ones(1),
        gradient_fn=lambda x: jnp.float16(1e-3) * x,
        stale_params=params,
        learning_rate=1e-5,
    )

    np.testing.assert_allclose(product, [1e-8], rtol=1e-3)


@pytest.mark.parametrize("scope", ["tensor", "tree"])
def test_the_scale_of_a_secants_base_does_not_matter(scope):
    """A gradient that grows twice as fast as the parameters; H 100, late training."""
    move = np.float32([1e-6, 3e-6])
    base = curvature.outer_product(100)
    product = secant(base, scope=scope).product(
        jnp.asarray(move),
        jnp.asarray(5 * move),
        stale_params=jnp.zeros(2),
        later_params=jnp.asarray(move),
        later_gradient=jnp.asarray(3 * move),
    )

    curved = move.astype(float) ** 3 / 100  # Of s = move; D is five times that.
    weight = (2 * move * curved).sum() / (curved**2).sum()
    np.testing.assert_allclose(product, 5 * weight * curved, rtol=1e-5)


def test_a_secant_of_no_leaves_is_none():
    """As of a label of `optax.multi_transform` that no parameter has."""
    product = secant(curvature.outer_product(1), scope="tree").product(
        {}, {}, stale_params={}, later_params={}, later_gradient={}
    )
    assert product == {}


def test_float64_and_traced_delays_are_not_promoted():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        transform = delay_compensation("isotropic", strength=0.5, max_ratio=10.0)
        stale = jnp.zeros(2)
        now = jnp.full(2, 4.0)
        fresh, _ = jax.jit(
            lambda delay: transform.update(
                now, transform.init(now), now, stale_params=stale, delay_steps=delay
            )
        )(jnp.int32(2))

        np.testing.assert_array_equal(fresh, [5, 5])
        assert fresh.dtype == np.float64
