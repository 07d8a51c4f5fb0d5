"""Stacks of layers along the second axis, as MaxText has them, in every way in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import cocodc_jax as cc
from tests.numerics import assert_all_close
from tests.slow import mostly_slow

NUM_REGIONS = 2
NUM_LAYERS = 4
WIDTH = 4
HIDDEN = 6
NUM_STEPS = 8
METHOD = cc.methods.get(
    "streaming_diloco", sync_interval=4, num_fragments=2, delay_steps=1
)
OPTIMIZER = optax.adam(0.05, eps=1e-3)
AXES = (0, 1)


@functools.cache
def batches():
    """Leaves `[T, R, B, D]`."""
    shape = NUM_STEPS, NUM_REGIONS, 3, WIDTH
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def make_params(axis):
    """A residual tower without names that mark its layers."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(0, 0.5, shape).astype(np.float32)

    layers = {
        "mlp": {
            "up": normal(NUM_LAYERS, WIDTH, HIDDEN),
            "down": normal(NUM_LAYERS, HIDDEN, WIDTH),
        },
        "norm": normal(NUM_LAYERS, WIDTH),
    }
    layers = jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), layers)
    return {"embedding": normal(WIDTH, WIDTH), "layers": layers}


def loss_fn(axis, params, batch, key=None):
    x = batch @ params["embedding"]
    for i in range(NUM_LAYERS):
        one = jax.tree.map(lambda x: jnp.take(x, i, axis), params["layers"])  # noqa: B023
        x = (
            x
            + jnp.tanh((x * one["norm"][None]) @ one["mlp"]["up"]) @ one["mlp"]["down"]
        )
    return jnp.mean((x - 1) ** 2), {}


def layers_first(axis, params):
    """Return parameters of all regions, `[R, ...]`, with layers as the next axis."""
    layers = jax.tree.map(lambda x: np.moveaxis(x, 1 + axis, 1), params["layers"])
    return params | {"layers": layers}


def stacked(tree):
    return jax.tree.map(lambda x: jnp.stack([x] * NUM_REGIONS), tree)


def step_of(axis, tx):
    def step(params, state, batch):
        grads = jax.grad(lambda p: loss_fn(axis, p, batch)[0])(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(jax.vmap(step, axis_name="region"))


def by_the_transform(axis):
    tx = cc.synchronized(OPTIMIZER, METHOD, axis_name="region")
    params = make_params(axis)
    step = step_of(axis, tx)
    params, state = stacked((params, tx.init(params)))
    for batch in batches():
        params, state = step(params, state, batch)
    return params


def after_the_step(axis):
    params = stacked(make_params(axis))
    step = step_of(axis, OPTIMIZER)
    opt_state = jax.vmap(OPTIMIZER.init)(params)
    sync = cc.RegionSync(METHOD, params, NUM_REGIONS)
    state = sync.init(params)

    for batch in batches():
        params, opt_state = step(params, opt_state, batch)
        params, state = sync.after_step(params, state)

    return params


def by_the_program(axis):
    """Layers are divided over devices, and with two of four rows still are."""
    params = make_params(axis)
    spec = P("data") if axis == 0 else P(None, "data")

    program = cc.RegionProgram(
        functools.partial(loss_fn, axis),
        OPTIMIZER,
        METHOD,
        params,
        NUM_REGIONS,
        mesh=cc.make_mesh(NUM_REGIONS, data=2),
        param_specs={
            "embedding": P(),
            "layers": jax.tree.map(lambda _: spec, params["layers"]),
        },
    )

    state = program.init(params, jax.random.key(0))
    halves = (np.concatenate([batch] * 2, axis=1) for batch in batches())
    *_, (state, _) = cc.run_steps(program, state, halves, NUM_STEPS)
    return state.region.params


@pytest.mark.parametrize(
    "train",
    mostly_slow(
        [by_the_transform, after_the_step, by_the_program],
        quick=[after_the_step, by_the_program],
    ),
)
def test_the_axis_of_layers_changes_no_number(train):
    one, other = (layers_first(axis, jax.device_get(train(axis))) for axis in AXES)
    assert_all_close(one, other, rtol=0, atol=1e-6)


def rows_of(fragments):
    return [
        {(part.path, part.rows, part.axis) for part in parts if "layers" in part.path}
        for parts in fragments.slices
    ]


@pytest.mark.parametrize("layer_axis", [None, 1])
def test_a_fragment_is_a_set_of_layers(layer_axis):
    params = make_params(1)
    fragments = cc.cut(params, 2, layer_axis=layer_axis)
    paths = ("layers/mlp/up", "layers/mlp/down", "layers/norm")
    assert rows_of(fragments) == [
        {(path, rows, 1) for path in paths} for rows in ((1, 3), (0, 2))
    ]
    part = fragments.take(stacked(params), 0, lead=1)
    assert part["layers/mlp/up"].shape == (NUM_REGIONS, WIDTH, 2, HIDDEN)


@pytest.mark.parametrize(("layer_axis", "axis"), [(None, 0), (0, 0), (1, 1)])
def test_the_first_axis_is_taken_unless_the_other_is_named(layer_axis, axis):
    """If both axes have one length in all leaves, shapes do not show which it is."""
    params = {"layers": {"w": np.zeros((4, 4, 8)), "b": np.zeros((4, 4))}}
    fragments = cc.cut(params, 2, layer_axis=layer_axis)

    assert {axis} == {part[2] for rows in rows_of(fragments) for part in rows}


@pytest.mark.parametrize("name", ["layers", "blocks"])
def test_a_stack_of_one_layer_is_not_cut_along_another_axis(name):
    params = {name: {"w": np.zeros((1, 8, 8)), "b": np.zeros((1, 8))}, "a": np.zeros(3)}
    parts = [part for parts in cc.cut(params, 1).slices for part in parts]
    assert {part.rows for part in parts} == (
        {None} if name == "layers" else {(0,), None}
    )
    assert {part.axis for part in parts} == {0}


def test_blocks_of_a_name_may_have_layers_on_any_axis():
    params = {"tower": {"w": np.zeros((2, 8, 3)), "b": np.zeros((4, 8, 3))}}
    fragments = cc.cut(params, 3, blocks="tower", layer_axis=2)
    parts = [part for parts in fragments.slices for part in parts]
    assert {(part.axis, len(part.rows)) for part in parts} == {(2, 1)}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layer_axis": -1}, "layer_axis=-1 must be a number of an axis, 0 or more"),
        ({"layer_axis": 0}, "no stack was found in these parameters: name it by"),
        (
            {"layer_axis": 0, "blocks": "layers"},
            r"stacked parameter 'layers/mlp/up' has shape \(4, 4, 6\), but 'layers' "
            "holds 6 blocks along axis 0; name another by layer_axis=",
        ),
        ({"layer_axis": 2, "blocks": "layers"}, "'layers' holds 4 blocks along axis 2"),
    ],
)
def test_invalid_axes_of_layers_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        cc.cut(make_params(1), 2, **options)


def test_ranges_of_experts_need_layers_in_front():
    experts = {"up": np.zeros((3, 4, 8, 2)), "down": np.zeros((3, 4, 2, 8))}
    blocks = {"experts": experts, "norm": np.zeros((8, 4))}
    params = {"blocks": {"moe": blocks}}
    with pytest.raises(ValueError, match="needs layers along the leading axis"):
        cc.cut(params, 2, strategy="experts")
