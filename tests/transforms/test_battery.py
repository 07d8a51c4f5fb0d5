"""Optax's tests of contributed transformations, for every one of ours.

Each case runs under jit, vmap, shard_map, masks and wrappers, and must give the results
of a plain call, keep dtypes, and compile once.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

from cocodc_jax.transforms import (
    curvature,
    mt_adam,
    muon,
    outer,
    primal_average,
    secant,
)
from cocodc_jax.transforms.compensation import delay_compensation
from tests.slow import mostly_slow

NUM_REGIONS = 4


class Case(NamedTuple):
    factory: Any
    options: dict  # Hyperparameters that inject_hyperparams turns into arrays.
    static: tuple = ()


CASES = {
    name: Case(delay_compensation, {"curvature": name, "strength": 0.5})
    for name in curvature.NAMES
} | {
    "schedule_and_max_ratio": Case(
        delay_compensation,
        {
            "curvature": "outer_product",
            "strength": optax.linear_schedule(0.1, 1.0, 3),
            "max_ratio": 0.1,
        },
    ),
    "parameter_units": Case(
        delay_compensation, {"curvature": curvature.hessian_vector("adam")}
    ),
    "secant": Case(
        delay_compensation, {"curvature": secant.secant(curvature.outer_product())}
    ),
    "delayed_nesterov": Case(
        outer.delayed_nesterov, {"learning_rate": 0.1, "buffer_size": 2, "spread": 0.3}
    ),
    "group_heavy_ball": Case(outer.group_heavy_ball, {"learning_rate": 0.5}),
    "co2": Case(
        outer.co2, {"momentum": 0.5, "max_abs": 0.7, "gap": "measured"}, ("gap",)
    ),
    "mla": Case(outer.mla, {"momentum": 0.5, "weight": 0.7}),
    "heloco": Case(outer.heloco, {"momentum": 0.5, "keep_cosine": 0.9}),
    "mt_adam": Case(
        mt_adam.mt_adam,
        {"learning_rate": 0.1, "b1s": (0.9, 0.99), "weights": (0.6, 0.3)},
        ("b1s", "weights"),
    ),
    "primal_average": Case(primal_average.primal_average, {"eval_interpolation": 0.6}),
    "muon": Case(muon.muon, {"learning_rate": 0.1, "blocks": "layers"}, ("blocks",)),
}


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


def over_shards(fn):
    """Each region has a device of its own."""
    mesh = jax.make_mesh(
        (NUM_REGIONS,), ("region",), axis_types=(jax.sharding.AxisType.Auto,)
    )

    def body(*trees):
        out = fn(*jax.tree.map(lambda x: x[0], trees))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], out)

    specs = P("region")
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs)


@pytest.mark.parametrize(
    "over_regions", mostly_slow([jax.vmap, over_shards], quick=[jax.vmap])
)
@pytest.mark.parametrize("name", CASES)
def test_many_regions_equal_one_at_a_time(name, over_regions):
    go = jax.jit(over_regions(lambda g, p, s: run(build(CASES[name]), g, p, s)))
    updates, state = go(stacked(0), stacked(10), stacked(20))
    for r, wanted in enumerate(expected(name)):
        assert_close(jax.tree.map(lambda x, r=r: x[r], (updates, state)), wanted)


@pytest.mark.parametrize("name", CASES)
def test_transforms_keep_dtypes_and_compile_once(name):
    dtypes = {"layers": [np.float64, jnp.bfloat16], "scale": np.float32}
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, tree(1), dtypes)
        transform = optax.with_extra_args_support(build(CASES[name]))
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
    assert jax.tree.map(lambda x: x.dtype.type, updates) == dtypes


# Optax promotes its bias corrections by a count.
@pytest.mark.parametrize("name", [x for x in CASES if x not in ("mt_adam", "muon")])
def test_no_dtype_is_promoted_implicitly(name):
    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(
            lambda *a: run(build(CASES[name]), *a), tree(0), tree(10), tree(20)
        )


def test_no_bfloat16_is_promoted_implicitly():
    half = functools.partial(jax.tree.map, lambda x: jnp.asarray(x, jnp.bfloat16))
    transform = delay_compensation("outer_product")
    with jax.numpy_dtype_promotion("strict"):
        trees = map(half, (tree(0), tree(10), tree(20)))
        updates, _ = jax.eval_shape(lambda *a: run(transform, *a), *trees)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(updates))


@pytest.mark.parametrize("name", CASES)
def test_none_leaves_and_labels_of_multi_transform(name):
    transform = build(CASES[name])
    gradients = tree(0)
    params = tree(10)
    stale = tree(20)
    cut = lambda t: {"layers": [t["layers"][0], None], "scale": t["scale"]}  # noqa: E731

    go = jax.jit(lambda *trees: run(transform, *trees)[0])
    alone = go(cut(gradients), cut(params), cut(stale))
    assert alone["layers"][1] is None

    # multi_transform cuts the same hole with a mask, but not into extra arguments.
    labels = {"layers": ["ours", "other"], "scale": "ours"}
    both = optax.multi_transform({"ours": transform, "other": optax.sgd(1.0)}, labels)
    chained = optax.chain(optax.identity(), both, optax.scale(-2.0))

    actual = jax.jit(lambda *trees: run(chained, *trees)[0])(gradients, params, stale)
    assert_close(cut(actual), jax.tree.map(lambda x: -2 * x, alone))

    # The second of two gradients, through sgd and scale alone.
    other = 4 * gradients["layers"][1]
    np.testing.assert_allclose(actual["layers"][1], other, rtol=1e-6)


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


# Optax's Newton-Schulz divides by a norm whose slope at zero is nan.
@pytest.mark.parametrize("name", [name for name in CASES if name != "muon"])
def test_gradients_flow_through_transforms(name):
    def size(gradients, params):
        updates, _ = run(build(CASES[name]), gradients, params, tree(20))
        return sum(jnp.sum(u) for u in jax.tree.leaves(updates))

    slope = jax.jit(jax.grad(size))
    at_zero = slope(jax.tree.map(np.zeros_like, tree(0)), tree(10))
    slopes = slope(tree(0), tree(10))
    for x in jax.tree.leaves((at_zero, slopes)):
        assert np.all(np.isfinite(x))
    assert any(np.any(x != 0) for x in jax.tree.leaves(slopes))


def test_orbax_restores_every_state(tmp_path):
    states = {name: build(case).init(tree(1)) for name, case in CASES.items()}
    states = jax.tree.map(lambda x: x + 1, states)

    shapes = jax.eval_shape(lambda: states)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "states", states)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "states", shapes)

    assert jax.tree.structure(restored) == jax.tree.structure(states)
    assert_close(restored, states, rtol=0)


@pytest.mark.parametrize("name", ["outer_product", "muon", "co2"])
def test_a_callers_mesh_changes_no_number(name):
    """With explicit axes, as `jax.make_mesh` makes them."""
    go = jax.jit(lambda *trees: run(build(CASES[name]), *trees))
    with jax.set_mesh(jax.make_mesh((4,), ("data",))):
        actual = go(tree(0), tree(10), tree(20))
    assert_close(jax.device_get(actual), expected(name)[0])
