"""`synchronized` under Explicit mesh axes, which `jax.make_mesh` makes by default."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cocodc_jax as cc
from tests.numerics import assert_all_close
from tests.slow import mostly_slow

PARAMS = {"w": np.ones((4, 8), np.float32), "b": np.zeros(8, np.float32)}
SPECS = {"w": P(None, "data"), "b": P("data")}
BATCH = np.random.default_rng(0).normal(size=(4, 8, 4)).astype(np.float32)
USER_INPUTS = cc.UserInputs(1e-2, cc.adam_second_moment(0.999))
CASES = {
    "sparseloco": ({"sync_interval": 2}, optax.adamw(1e-2)),
    "cocodc": (
        {"sync_interval": 4, "num_fragments": 1, "delay_steps": 2,
         "curvature": "hessian_vector"}, optax.adamw(1e-2),
    ),
    "lt_admm": ({"sync_interval": 2}, optax.sgd(0.1)),
    "noloco": ({"sync_interval": 2}, optax.sgd(0.1)),
    "multi_ring": ({"sync_interval": 2}, optax.sgd(0.1)),
    "des_loc": ({"sync_interval": 2, "sync_moments": "1,1"}, optax.adamw(1e-2)),
    "dilocox": ({"sync_interval": 2, "rank": 1, "adaptive_rank": False,
                 "sum_factors": True}, optax.sgd(0.1)),
    "distributed_lion": ({}, optax.sgd(1e-2)),
}  # fmt: skip
LAYOUTS = ("stacked", "sync_axes")


def loss_fn(params, batch, key=None):
    return jnp.square(batch @ params["w"] + params["b"][None]).mean(), {}


def parts_of(case, layout):
    options, optimizer = CASES[case]
    method = cc.methods.get(case, **options)
    tx = cc.synchronized(
        optimizer, method, axis_name="region", num_regions=4, user_inputs=USER_INPUTS
    )
    return tx, method, cc.sync_axes(method) if layout == "sync_axes" else 0


def make_step(tx):
    def step(params, state, batch):
        value_fn = lambda params: loss_fn(params, batch)[0]  # noqa: E731
        value, grads = jax.value_and_grad(value_fn)(params)
        updates, state = tx.update(
            grads, state, params, value=value, value_fn=value_fn, batch=batch
        )
        return optax.apply_updates(params, updates), state

    return step


def first_carry(tx, axes, params):
    carry = params, tx.init(params)
    return jax.vmap(lambda x: x, None, (0, axes), axis_size=4)(carry)


def mapped(tx, axes, **options):
    fn = make_step(tx)
    both = (0, axes)
    return jax.vmap(fn, (*both, 0), both, axis_name="region", axis_size=4, **options)


def train(step, params, state, batch, steps=5):
    """Returns parameters and metrics, on the host."""
    step = jax.jit(step)
    for _ in range(steps):
        params, state = step(params, state, batch)
    assert step._cache_size() <= 2  # Results may have other shardings than the first.
    return jax.device_get((params, cc.sync_metrics(state)))


@functools.cache
def expected(case):
    tx, _, axes = parts_of(case, "stacked")
    params = jax.tree.map(jnp.asarray, PARAMS)
    return train(mapped(tx, axes), *first_carry(tx, axes, params), jnp.asarray(BATCH))


def placed(mesh, method, layout, carry, specs):
    """Puts parameters and state of all regions on the mesh."""
    axes = cc.sync_axes(method) if layout == "sync_axes" else 0
    one = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    shapes = jax.eval_shape(lambda x: x, PARAMS)
    where = cc.sync_shardings(shapes, one)

    of_state = jax.tree.map(lambda x: NamedSharding(mesh, P("region")), carry[1])
    if axes != 0:
        flags = jax.tree.broadcast(cc.sync_axes(method, P("region"), P()), carry[1])
        of_state = jax.tree.map(lambda spec: NamedSharding(mesh, spec), flags)

    return jax.device_put(carry, (where, of_state))


def assert_as_without_a_mesh(ends, case):
    leaves = jax.tree.leaves(ends)
    assert_all_close(leaves, jax.tree.leaves(expected(case)), rtol=2e-5, atol=2e-6)


WAYS = [(case, layout, None) for case in CASES for layout in LAYOUTS] + [
    (case, "stacked", "region") for case in ("sparseloco", "cocodc")
]
# Each way that messages take once, each layout with and without an outer model.
QUICK = [
    ("sparseloco", "sync_axes", None),
    ("cocodc", "sync_axes", None),
    ("cocodc", "stacked", "region"),
    ("noloco", "stacked", None),
    ("multi_ring", "sync_axes", None),
    ("dilocox", "stacked", None),
    ("distributed_lion", "sync_axes", None),
]


@pytest.mark.parametrize(("case", "layout", "spmd"), mostly_slow(WAYS, quick=QUICK))
def test_regions_on_an_explicit_axis_change_no_number(case, layout, spmd):
    mesh = jax.make_mesh((4, 2), ("region", "data"))
    assert set(mesh.axis_types) == {AxisType.Explicit}

    tx, method, axes = parts_of(case, layout)
    with jax.set_mesh(mesh):
        params = jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), PARAMS, SPECS
        )
        carry = first_carry(tx, axes, params)
        carry = placed(mesh, method, layout, carry, SPECS)
        batch = jax.device_put(BATCH, NamedSharding(mesh, P("region")))
        ends = train(mapped(tx, axes, spmd_axis_name=spmd), *carry, batch)

    assert_as_without_a_mesh(ends, case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_manual_regions_with_an_explicit_axis_change_no_number(layout):
    mesh = jax.make_mesh((4, 2), ("region", "data"))
    tx, method, axes = parts_of("sparseloco", layout)
    step = make_step(tx)
    spec = P("region")
    is_own = True
    if layout == "sync_axes":
        spec = cc.sync_axes(method, P("region"), P())
        is_own = cc.sync_axes(method, True, False)

    def of_region(params, state, batch):
        which = jax.tree.broadcast(is_own, state)
        local = jax.tree.map(lambda yes, x: x[0] if yes else x, which, state)
        new, local = step(jax.tree.map(lambda x: x[0], params), local, batch[0])
        state = jax.tree.map(lambda yes, x: x[None] if yes else x, which, local)
        return jax.tree.map(lambda x: x[None], new), state

    both = P("region"), spec
    program = jax.shard_map(
        of_region,
        in_specs=(*both, P("region")),
        out_specs=both,
        axis_names={"region"},
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        carry = first_carry(tx, axes, jax.tree.map(jnp.asarray, PARAMS))
        carry = placed(mesh, method, layout, carry, {"w": P(), "b": P()})
        batch = jax.device_put(BATCH, NamedSharding(mesh, P("region")))
        ends = train(program, *carry, batch)

    assert_as_without_a_mesh(ends, "sparseloco")


def test_a_program_trains_parameters_on_an_explicit_mesh():
    mesh = jax.make_mesh((2, 4), ("replica", "data"))
    method = cc.methods.get("cocodc", sync_interval=4, num_fragments=2, delay_steps=2)

    def run(params):
        program = cc.RegionProgram(
            loss_fn, optax.adamw(1e-2), method, params, 4, user_inputs=USER_INPUTS
        )
        state = program.init(params, jax.random.key(0))
        steps = cc.run_steps(program, state, iter([BATCH] * 5), num_steps=5)
        *_, (state, _) = steps
        return jax.device_get((program.mean_params(state), program.outer_params(state)))

    with pytest.warns(UserWarning, match="fragments"):
        plain = run(PARAMS)
    with jax.set_mesh(mesh), pytest.warns(UserWarning, match="fragments"):
        divided = run(
            jax.tree.map(
                lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
                PARAMS,
                SPECS,
            )
        )
    jax.tree.map(np.testing.assert_array_equal, divided, plain)
