"""Inner steps: no traffic between regions or to the host, keys, and their number."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from cocodc_jax import methods
from cocodc_jax.aot import hlo
from cocodc_jax.aot.collectives import collectives
from cocodc_jax.engine.mesh import REGION, make_mesh
from cocodc_jax.engine.region_map import LocalRegions
from cocodc_jax.program import batches as counted
from tests.jaxprs import equations
from tests.numerics import assert_within_ulps
from tests.program import tiny

# Every primitive of JAX 0.10 that communicates over a named axis (axis_index does not,
# and pcast only changes a type).
COLLECTIVES = {
    "all_gather", "all_gather_invariant", "all_gather_reduced", "all_reduce",
    "all_to_all", "pbroadcast", "pgather", "pmax", "pmean", "pmin", "ppermute",
    "psend", "precv", "psum", "psum2", "psum_invariant", "psum_scatter",
    "ragged_all_to_all", "reduce_scatter", "unreduced_psum", "unreduced_reduce_scatter",
}  # fmt: skip
TALKS_TO_HOST = re.compile("callback|infeed|outfeed|debug_print")


def primitives(jaxpr):
    """Names of the primitives of a jaxpr and of all jaxprs inside it."""
    return {equation.primitive.name for equation in equations(jaxpr.jaxpr)}


def inner_primitives(program):
    """Return the primitives that `advance` runs for one step without an event."""
    state = tiny.start(program)

    def advance(region, batches):
        before = dataclasses.replace(state, region=region)
        return program.advance(before, batches)[0].region

    batches = jax.tree.map(lambda x: x[None], tiny.make_batch(0))
    names = primitives(jax.make_jaxpr(advance)(state.region, batches))
    assert {"shard_map", "scan", "dot_general"} <= names  # The walk went inside.
    return names


def test_only_data_parallel_steps_talk_between_regions_and_none_to_the_host(
    method_name,
):
    primitives = inner_primitives(tiny.shared_program(method_name))
    assert bool(primitives & COLLECTIVES) == (method_name == "data_parallel"), (
        primitives
    )
    assert not list(filter(TALKS_TO_HOST.search, primitives))


def test_the_check_catches_the_gradient_of_replicated_parameters():
    mesh = make_mesh(4)

    def found(varying):
        def body(params, batch):
            if varying:
                params = jax.lax.pcast(params, REGION, to="varying")
            batch = jax.tree.map(lambda x: x[0], batch)
            gradient = jax.grad(tiny.loss_fn, has_aux=True)
            grads, _ = gradient(params, batch, jax.random.key(0))
            return jax.tree.map(lambda x: x[None], grads)

        mapped = jax.shard_map(
            body,
            mesh=mesh,
            axis_names={REGION},
            in_specs=(P(), P(REGION)),
            out_specs=P(REGION),
        )
        jaxpr = jax.make_jaxpr(mapped)(tiny.make_params(), tiny.make_batch(0))
        return primitives(jaxpr) & COLLECTIVES

    assert found(varying=False)
    assert not found(varying=True)


@pytest.mark.parametrize(("length", "data", "model"), [(4, 1, 1), (2, 2, 2)])
def test_compiled_steps_send_nothing_between_regions(length, data, model):
    """The jaxpr does not show collectives that the compiler adds inside a region."""
    mesh = make_mesh(length, data, model)
    program = tiny.make_program("diloco", mesh, param_specs=tiny.SPECS)
    state = tiny.start(program)
    batches = program._batches.put(jax.tree.map(lambda x: x[None], tiny.make_batch(0)))
    arguments = state.region, batches, None, None, ()
    text = program._steps.lower(*arguments).compile().as_text()
    listed = collectives(hlo.parse(text), dict(mesh.shape))

    assert bool(listed) == (data * model > 1)
    for collective in listed:
        assert "region" not in collective.axes, collective


def test_a_step_copies_no_moments_of_the_optimizer():
    """XLA has to copy an array if both an old and a new one are read in a step."""
    adam = optax.adam(tiny.LEARNING_RATE)
    program = tiny.program_of(tiny.METHODS["diloco"], make_mesh(4), optimizer=adam)
    state = tiny.start(program)

    batches, counted = program._batches.for_steps(
        jax.tree.map(lambda x: x[None], tiny.make_batch(0))
    )
    arguments = state.region, batches, None, counted, ()

    module = hlo.parse(program._steps.lower(*arguments).compile().as_text())

    bodies = [
        module.computations[loop.called["body"][0]]
        for computation in module
        for loop in computation.instructions
        if loop.opcode == "while"
    ]

    copies = [
        instruction.shape
        for body in bodies
        for instruction in body.instructions
        if instruction.opcode == "copy" and instruction.shape.startswith("f32[")
    ]

    params = jax.tree.leaves(state.region.params)
    assert len(copies) <= len(params), copies


def test_keys_differ_between_regions_and_steps_and_are_reproducible():
    program = tiny.shared_program("diloco")

    def draws(seed):
        _, outputs = tiny.finish(program, tiny.start(program, seed), 8)
        for output in outputs:
            assert (output.losses.shape, output.losses.dtype) == ((2, 4), np.float32)
        return np.concatenate([output.aux["draw"] for output in outputs])

    first, again, other = map(draws, (0, 0, 1))
    assert first.shape == (8, 4)
    assert len(np.unique(first)) == 32
    np.testing.assert_array_equal(first, again)
    assert not np.isin(other, first).any()


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("size", [1, 3])
def test_a_block_maps_over_its_regions(size, one_by_one):
    mapped = LocalRegions(size, one_by_one).map(
        lambda x, scale: {"y": x * scale}, (0, None)
    )
    x = jnp.arange(2.0 * size).reshape(size, 2)
    np.testing.assert_array_equal(mapped(x, jnp.float32(3))["y"], 3 * x)


SMALL = 50_000


@pytest.mark.parametrize(
    ("how", "num_params", "one_by_one"),
    [
        ("auto", SMALL, False),
        ("batched", None, False),
        ("auto", 100 * SMALL, True),
        ("auto", None, True),
        ("in_turn", SMALL, True),
    ],
)
def test_small_models_of_regions_on_one_cpu_are_one_batch(how, num_params, one_by_one):
    mesh = make_mesh(4, devices=jax.devices()[:1])

    assert LocalRegions.of(mesh, 4, how, num_params) == LocalRegions(4, one_by_one)


@pytest.mark.parametrize("how", ["auto", "batched", "in_turn"])
def test_a_device_of_its_own_has_one_region(how):
    assert LocalRegions.of(make_mesh(4), 4, how, 1000).size == 1


def test_regions_of_several_devices_go_in_turn():
    two = LocalRegions.of(make_mesh(4, data=2, devices=jax.devices()[:4]), 4)
    assert two.one_by_one


# --- Steps whose number is an argument, against `lax.scan` ---


def step(state, xs):
    x, weight = xs
    state = jax.tree.map(lambda s: jnp.tanh(s * weight + x), state)
    return state, (state["a"].sum(), {"seen": x[0] > 0})


def numbers(num_steps):
    rng = np.random.default_rng(num_steps)
    x = rng.normal(size=(num_steps, 3)).astype(np.float32)
    return x, rng.normal(size=num_steps).astype(np.float32)


@pytest.mark.parametrize("num_steps", [1, 2, 9, 10, 11])
def test_the_first_steps_are_those_of_a_scan(num_steps):
    start = {"a": jnp.ones(3), "b": jnp.zeros(3)}
    xs = numbers(num_steps)
    state, outs = jax.jit(counted.scan, static_argnums=0)(
        step, start, counted.padded(xs, num_steps), np.int32(num_steps)
    )
    wanted, wanted_outs = jax.jit(counted.scan, static_argnums=0)(step, start, xs)

    assert_within_ulps(state, wanted)
    room = counted.padded_length(num_steps)
    for x, y in zip(jax.tree.leaves(outs), jax.tree.leaves(wanted_outs), strict=True):
        assert (x.shape, x.dtype) == ((room, *y.shape[1:]), y.dtype)
        assert_within_ulps(x[:num_steps], y)
        assert not x[num_steps:].any()


def test_batches_after_the_last_step_are_not_read():
    xs = jax.tree.map(
        lambda x: np.concatenate([x, np.full_like(x, np.nan)]), numbers(5)
    )
    state, (losses, _) = counted.scan(step, {"a": jnp.ones(3)}, xs, np.int32(5))
    assert np.isfinite(state["a"]).all()
    assert np.isfinite(losses).all()


def test_inputs_are_copied_only_where_there_is_no_room_and_they_are_small():
    xs = numbers(20)
    assert counted.padded(xs, 20) is xs
    large = jax.ShapeDtypeStruct((3, 1 << 20), np.float32)
    assert not counted.takes({"x": large, "y": numbers(3)})
    assert counted.takes(jax.ShapeDtypeStruct((10, 1 << 20), np.float32))
    assert counted.takes(numbers(3))


def test_scans_of_every_length_are_one_program():
    traces = []

    def loss_fn(params, batch, key):
        traces.append(1)
        return tiny.loss_fn(params, batch, key)

    method = methods.get("streaming_diloco", sync_interval=14, num_fragments=2)
    program = tiny.program_of(method, loss=loss_fn)
    _, outputs = tiny.finish(program, tiny.start(program), 30)
    lengths = {len(output.losses) for output in outputs}
    assert len(lengths) > 1
    assert all(output.losses.shape[1:] == (4,) for output in outputs)
    assert program._steps._cache_size() == 1
    assert len(traces) == 1
