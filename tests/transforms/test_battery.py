"""What Optax asks of a contributed transformation, asked of every one of ours.

Each case runs under jit, vmap, shard_map, masks and wrappers, and must give what the
plain call gives, in the dtypes it was given, compiling once.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from cocodc_jax.transforms import co2, curvature, dc_asgd, outer, secant, snoo
from cocodc_jax.transforms.compensation import delay_compensation

NUM_REGIONS = 4


class Case(NamedTuple):
    factory: Any
    options: dict  # what inject_hyperparams sees; numbers become arrays
    static: tuple = ()


CASES = {
    name: Case(delay_compensation, {"curvature": name, "strength": 0.5})
    for name in curvature.NAMES
} | {
    "max_ratio": Case(delay_compensation, {"strength": 9.0, "max_ratio": 0.1}),
    "schedule": Case(
        delay_compensation, {"strength": optax.linear_schedule(0.1, 1.0, 3)}
    ),
    "parameter_units": Case(
        delay_compensation, {"curvature": curvature.hessian_vector("adam")}
    ),
    "secant": Case(
        delay_compensation, {"curvature": secant.secant(curvature.outer_product())}
    ),
    "dc_asgd": Case(dc_asgd.dc_asgd, {"learning_rate": 0.1}),
    "dc_asgd_adaptive": Case(dc_asgd.dc_asgd_adaptive, {"learning_rate": 0.1}),
    "delayed_nesterov": Case(
        outer.delayed_nesterov,
        {"learning_rate": 0.1, "buffer_size": 2, "spread": 0.3},
    ),
    "group_heavy_ball": Case(outer.group_heavy_ball, {"learning_rate": 0.5}),
    "co2": Case(co2.co2, {"momentum": 0.5, "max_abs": 0.7}),
    "snoo": Case(
        snoo.snoo,
        {"inner": optax.sgd(1e-2, momentum=0.9), "sync_interval": 2},
        ("inner",),
    ),
}

battery = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def tree(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)  # noqa: E731
    return {"layers": [draw(3, 2), draw(2)], "scale": draw()}


def extras(like):
    """Every extra argument any case asks for, with the structure of `like`."""
    quartic = lambda p: jax.tree.map(lambda x: x**3, p)  # noqa: E731
    half_square = lambda o: sum(jnp.sum(x**2) for x in jax.tree.leaves(o)) / 2  # noqa: E731
    return {
        "stale_params": like,
        "second_moment": jax.tree.map(lambda x: x**2 + 1, like),
        "group_mean_params": jax.tree.map(lambda x: x / 2, like),
        "later_params": jax.tree.map(lambda x: x + 1, like),
        "later_gradient": jax.tree.map(lambda x: 3 * x, like),
        "learning_rate": 0.1,
        "delay_steps": 5,
        "key": jax.random.key(0),
        "gradient_fn": quartic,
        "model_fn": quartic,
        "output_loss_fn": half_square,
        "an_unknown_argument": object(),
    }


def run(transform, gradients, params, stale, steps=2):
    """Run a few updates; return the last one and the state."""
    transform = optax.with_extra_args_support(transform)
    state = transform.init(params)
    updates = gradients
    for i in range(steps):
        scaled = jax.tree.map(lambda g, i=i: g * (1 + i), gradients)
        updates, state = transform.update(scaled, state, params, **extras(stale))
    return updates, state


def build(case):
    return case.factory(**case.options)


@functools.cache
def expected(name):
    case = CASES[name]
    go = jax.jit(lambda g, p, s: run(build(case), g, p, s))
    return [go(tree(r), tree(r + 10), tree(r + 20)) for r in range(NUM_REGIONS)]


def stacked(seed):
    trees = [tree(seed + r) for r in range(NUM_REGIONS)]
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def assert_close(actual, wanted, rtol=1e-5):
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    for a, w in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, w, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_vmap_equals_one_region_at_a_time(name):
    go = jax.jit(jax.vmap(lambda g, p, s: run(build(CASES[name]), g, p, s)))
    updates, state = go(stacked(0), stacked(10), stacked(20))
    for r, wanted in enumerate(expected(name)):
        assert_close(jax.tree.map(lambda x, r=r: x[r], (updates, state)), wanted)


@pytest.mark.parametrize("name", CASES)
def test_shard_map_equals_one_region_at_a_time(name):
    mesh = jax.make_mesh(
        (NUM_REGIONS,), ("region",), axis_types=(jax.sharding.AxisType.Auto,)
    )

    def body(g, p, s):
        g, p, s = jax.tree.map(lambda x: x[0], (g, p, s))
        updates, _ = run(build(CASES[name]), g, p, s)
        return jax.tree.map(lambda x: x[None], updates)

    specs = P("region")
    go = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs))
    updates = go(stacked(0), stacked(10), stacked(20))
    for r, wanted in enumerate(expected(name)):
        assert_close(jax.tree.map(lambda x, r=r: x[r], updates), wanted[0])


@battery
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float64])
def test_keeps_dtypes_and_compiles_once(case, dtype):
    with jax.enable_x64(dtype == np.float64):
        transform = optax.with_extra_args_support(build(case))
        params = jax.tree.map(jnp.asarray, tree(1, dtype))
        traces = []

        @jax.jit
        def step(gradients, state, params):
            traces.append(1)
            return transform.update(gradients, state, params, **extras(params))

        state = jax.jit(transform.init)(params)
        updates, new_state = step(params, state, params)
        step(updates, new_state, params)
        assert len(traces) == 1
        assert isinstance(state, tuple)
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
        assert all(x.dtype == dtype for x in jax.tree.leaves(updates))


@pytest.mark.parametrize("name", CASES)
def test_none_and_masked_leaves_are_left_alone(name):
    transform = build(CASES[name])
    gradients, params, stale = tree(0), tree(10), tree(20)
    none = {"layers": [params["layers"][0], None], "scale": params["scale"]}
    cut = lambda t: jax.tree.map(  # noqa: E731
        lambda keep, x: None if keep is None else x,
        none,
        t,
        is_leaf=lambda x: x is None,
    )
    bare, _ = jax.jit(lambda *a: run(transform, *a))(
        cut(gradients), cut(params), cut(stale)
    )
    assert bare["layers"][1] is None

    mask = {"layers": [True, False], "scale": True}
    masked, _ = jax.jit(lambda *a: run(optax.masked(transform, mask), *a))(
        gradients, params, stale
    )
    assert_close(masked["layers"][0], bare["layers"][0])
    assert_close(masked["scale"], bare["scale"])
    # The second of two gradients, untouched.
    np.testing.assert_array_equal(masked["layers"][1], 2 * gradients["layers"][1])


@pytest.mark.parametrize("name", CASES)
def test_chain_and_multi_transform(name):
    transform = build(CASES[name])
    labels = {"layers": ["ours", "other"], "scale": "ours"}
    both = optax.multi_transform({"ours": transform, "other": optax.sgd(1.0)}, labels)
    chained = optax.chain(optax.identity(), both, optax.scale(-2.0))
    mask = {"layers": [True, False], "scale": True}
    alone = optax.masked(transform, mask)
    gradients, params, stale = tree(0), tree(10), tree(20)
    actual, _ = jax.jit(lambda *a: run(chained, *a))(gradients, params, stale)
    wanted, _ = jax.jit(lambda *a: run(alone, *a))(gradients, params, stale)
    assert_close(actual["layers"][0], -2 * wanted["layers"][0])
    np.testing.assert_allclose(
        actual["layers"][1], 4 * gradients["layers"][1], rtol=1e-6
    )


@pytest.mark.parametrize("name", CASES)
def test_inject_hyperparams_gives_the_same_numbers(name):
    case = CASES[name]
    injected = optax.inject_hyperparams(case.factory, static_args=case.static)
    transform = injected(**case.options)
    updates, state = jax.jit(lambda *a: run(transform, *a))(tree(0), tree(10), tree(20))
    assert_close(updates, expected(name)[0][0])
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(updates))
    assert all(isinstance(x, jax.Array) for x in state.hyperparams.values())
    assert len(state.hyperparams) >= 1


@pytest.mark.parametrize("name", CASES)
def test_gradients_flow_through(name):
    def size(gradients, params):
        updates, _ = run(build(CASES[name]), gradients, params, tree(20))
        return sum(jnp.sum(u) for u in jax.tree.leaves(updates))

    slope = jax.jit(jax.grad(size))
    at_zero = slope(jax.tree.map(np.zeros_like, tree(0)), tree(10))
    slopes = slope(tree(0), tree(10))
    for x in jax.tree.leaves((at_zero, slopes)):
        assert np.all(np.isfinite(x))
    assert any(np.any(x != 0) for x in jax.tree.leaves(slopes))
