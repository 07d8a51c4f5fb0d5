"""Delay compensation in loops of other people's."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from cocodc_jax.transforms import curvature, delay_compensation, outer, secant


def loss(params):
    """A quadratic that couples its parts: no part has a gradient without the other."""
    return jnp.sum((params["w"] + 2 * params["b"]) ** 2) / 2


def test_nnx_keeps_a_copy_of_where_the_gradient_was_taken():
    """The docs' recipe copies parameters: the state alone would follow the model."""
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(
        model,
        optax.chain(delay_compensation("outer_product", strength=0.5), optax.sgd(0.1)),
        wrt=nnx.Param,
    )

    old = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    start = np.asarray(model.kernel[...])
    ones = jax.tree.map(jnp.ones_like, old)

    ratios = []
    kernels = []
    for _ in range(2):
        optimizer.update(model, ones, stale_params=old)
        ratios.append(float(optimizer.opt_state[0].correction_ratio[...]))
        kernels.append(np.asarray(model.kernel[...]))

    # The second gradient is used 0.1 below where it was taken: 1 + 0.5 * 1 * 1 * -0.1.
    np.testing.assert_allclose(ratios, [0, 0.05], rtol=1e-5)
    np.testing.assert_allclose(kernels[1], start - 0.1 - 0.095, rtol=1e-5)


def test_a_curvature_must_be_chosen():
    with pytest.raises(TypeError, match="curvature"):
        delay_compensation()


@pytest.mark.parametrize("value", [None, curvature.isotropic, 0.5])
def test_an_invalid_curvature_is_named(value):
    with pytest.raises(ValueError, match="^curvature=.* must be one of .*, or a Cur"):
        inspect.unwrap(delay_compensation)(value)


def test_stale_parameters_of_another_shape_are_not_broadcast():
    transform = delay_compensation("outer_product", 0.5)
    params = {"w": jnp.ones((2, 3))}
    state = transform.init(params)
    with pytest.raises(ValueError, match=r"stale_params has 'w' of shape \(3,\), but "):
        transform.update(params, state, params, stale_params={"w": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"params has 'w' of shape \(\), but its upd"):
        transform.update(params, state, {"w": jnp.ones(())}, stale_params=params)


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (delay_compensation("adam_second_moment", 0.5), "second_moment"),
        (delay_compensation(secant.secant(curvature.isotropic())), "later_params"),
        (delay_compensation(secant.secant(curvature.isotropic())), "later_gradient"),
        (outer.group_heavy_ball(), "group_mean_params"),
        (outer.scale_by_staleness_gap(), "stale_params"),
    ],
)
def test_extra_trees_of_another_shape_or_structure_are_refused(transform, name):
    params = {"w": jnp.ones((2, 3))}
    names = ("stale_params", "second_moment", "later_params", "later_gradient")
    extra = dict.fromkeys((*names, "group_mean_params"), params)
    extra |= {"learning_rate": 0.1, "delay_steps": 2}

    def update(tree):
        transform.update(params, transform.init(params), params, **extra | {name: tree})

    update(params)
    with pytest.raises(ValueError, match=rf"^{name} has 'w' of shape \(3,\), but its"):
        update({"w": jnp.ones(3)})
    with pytest.raises(ValueError, match=rf"^{name} has the structure .*'v'.*'w'"):
        update({"v": jnp.ones((2, 3))})
    with pytest.raises(ValueError, match=rf"^{name} has the structure .*'v'.*'w'"):
        update(params | {"v": jnp.ones(3)})


def test_stale_parameters_that_a_wrapper_did_not_flatten_are_refused():
    """`optax.flatten` flattens parameters, but not extra arguments."""
    transform = optax.flatten(delay_compensation("outer_product"))
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    with pytest.raises(ValueError, match="^stale_params has the structure .* the same"):
        transform.update(params, transform.init(params), params, stale_params=params)


@pytest.mark.parametrize("max_ratio", [None, 0.1])
def test_a_gradient_of_nan_gives_a_correction_ratio_of_nan(max_ratio):
    transform = delay_compensation("outer_product", 0.5, max_ratio)
    one = jnp.ones(2)
    _, state = transform.update(
        jnp.array([1.0, jnp.nan]), transform.init(one), one, stale_params=one - 1
    )
    assert np.isnan(state.correction_ratio)


@pytest.mark.parametrize("name", ["hessian_vector", "gauss_newton"])
def test_a_masked_part_has_the_curvature_of_the_whole(name):
    """The functions get all parameters, and correct the part that is not masked."""
    transform = optax.masked(delay_compensation(name, 1.0), {"w": True, "b": False})
    stale = {"w": jnp.array([1.0, 2.0]), "b": jnp.array([0.5, -1.0])}
    now = {"w": jnp.array([2.0, 0.0]), "b": jnp.array([9.0, 9.0])}
    gradient = jax.grad(loss)(stale)
    extra = {
        "hessian_vector": {"gradient_fn": jax.grad(loss)},
        "gauss_newton": {
            "model_fn": lambda p: p["w"] + 2 * p["b"],
            "output_loss_fn": lambda x: jnp.sum(x**2) / 2,
        },
    }[name]
    fresh, _ = transform.update(
        gradient, transform.init(now), now, stale_params=stale, **extra
    )

    # Along the step of w alone.
    wanted = jax.grad(loss)({"w": now["w"], "b": stale["b"]})["w"]
    np.testing.assert_allclose(fresh["w"], wanted, rtol=1e-6)
    np.testing.assert_array_equal(fresh["b"], gradient["b"])
