"""Gradients of weights: only the order of operands changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax.program.weight_gradients import in_quick_order
from tests.jaxprs import equations
from tests.numerics import assert_within_ulps

WIDTH = 128  # So large that a weight is reordered.


def layer(x, w):
    return jnp.tanh(x @ w)


def two_layers(params, x):
    return layer(layer(x, params[0]), params[1]).sum()


def layers_in_a_scan(params, x):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)[0].sum()


def checkpointed(params, x):
    return jax.checkpoint(two_layers)(params, x)


def with_a_branch(params, x):
    return jax.lax.cond(x.sum() > 0, two_layers, layers_in_a_scan, params, x)


def inputs(width=WIDTH):
    rng = np.random.default_rng(0)
    params = rng.normal(0, width**-0.5, (2, width, width)).astype(np.float32)
    return params, rng.normal(size=(2, 4, width)).astype(np.float32)


def transposed_products(fn, *args):
    """Number of transposes of the result of a product."""
    inside = list(equations(jax.make_jaxpr(fn)(*args).jaxpr))
    products = {
        equation.outvars[0]
        for equation in inside
        if equation.primitive.name == "dot_general"
    }

    return sum(
        equation.primitive.name == "transpose" and equation.invars[0] in products
        for equation in inside
    )


@pytest.mark.parametrize("loss", [two_layers, layers_in_a_scan, checkpointed])
def test_products_are_not_transposed_and_gradients_differ_by_rounding(loss):
    gradient = jax.value_and_grad(loss)
    quick = in_quick_order(gradient)
    assert transposed_products(gradient, *inputs()) > 0
    assert transposed_products(quick, *inputs()) == 0
    assert_within_ulps(jax.jit(quick)(*inputs()), jax.jit(gradient)(*inputs()), 64)


def test_a_branch_stays_a_branch():
    quick = in_quick_order(jax.grad(with_a_branch))
    names = {
        equation.primitive.name
        for equation in equations(jax.make_jaxpr(quick)(*inputs()).jaxpr)
    }
    assert "cond" in names


def test_small_products_and_products_read_twice_are_left_alone():
    small = inputs(width=8)
    gradient = jax.grad(two_layers)
    count = transposed_products(gradient, *small)
    assert transposed_products(in_quick_order(gradient), *small) == count > 0

    def read_twice(x, y):
        product = x @ y
        return product, product.T

    x = np.ones((WIDTH, WIDTH), np.float32)
    assert transposed_products(in_quick_order(read_twice), x, x) == 1


def test_a_second_transpose_is_left_to_the_compiler():
    def tied_head(embedding, x):
        return jnp.tanh(x @ embedding.T).sum()

    params, x = inputs()
    gradient = jax.grad(tied_head)
    count = transposed_products(gradient, params[0], x)
    assert transposed_products(in_quick_order(gradient), params[0], x) == count == 1


def test_precision_and_dtype_of_a_product_stay():
    def loss(w, x):
        both = jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT
        product = jnp.matmul(x, w, precision=both, preferred_element_type=jnp.float32)
        return jnp.tanh(product).sum()

    def products(fn):
        traced = equations(jax.make_jaxpr(fn)(w, x).jaxpr)
        return [
            equation for equation in traced if equation.primitive.name == "dot_general"
        ]

    params, x = (value.astype(jnp.bfloat16) for value in inputs())
    w = params[0]
    gradient = jax.grad(loss)
    before = products(gradient)[-1]
    after = products(in_quick_order(gradient))[-1]
    assert after.params["precision"] == before.params["precision"][::-1]
    assert after.invars[0].aval.shape == x.shape
    assert after.outvars[0].aval.dtype == before.outvars[0].aval.dtype
