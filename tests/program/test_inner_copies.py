"""Copies of the parameters move with merges: late, of parts, in whatever program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cocodc_jax as cc
from cocodc_jax.engine.mesh import make_mesh
from tests.core.test_optimizer import train
from tests.numerics import assert_all_close
from tests.program import tiny
from tests.slow import mostly_slow

FREE = optax.contrib.schedule_free_sgd(tiny.LEARNING_RATE)
NUM_STEPS = 12
METHOD = cc.methods.get(
    "streaming_diloco", sync_interval=6, num_fragments=2, delay_steps=2
)


def program_of(method, overlap="no", optimizer=FREE, **options):
    mesh = make_mesh(tiny.NUM_REGIONS, 1, devices=jax.devices()[: tiny.NUM_REGIONS])
    return tiny.program_of(
        method,
        mesh,
        optimizer=optimizer,
        transport=cc.Transport("program", overlap=overlap),
        **options,
    )


def trained(overlap="no", method=METHOD, num_steps=NUM_STEPS, **options):
    program = program_of(method, overlap, **options)
    state, _ = tiny.finish(program, tiny.start(program), num_steps)
    return program, tiny.host((state.region.params, state.region.opt_state))


@pytest.fixture(scope="module")
def by_programs():
    return trained()[1]


def test_a_fragment_that_arrives_late_moves_its_part_of_a_copy(by_programs):
    """As in a transform, in which the two are one program."""
    tx = cc.synchronized(FREE, METHOD, axis_name="region", user_inputs=tiny.USER_INPUTS)
    params, state = train(tx, METHOD, tiny.NUM_REGIONS, NUM_STEPS)
    by_transform = tiny.host((params, state.inner))
    assert_all_close(by_transform, by_programs, rtol=1e-4, atol=1e-5)


def test_copies_move_the_same_in_one_program_with_the_inner_steps(by_programs):
    program, by_windows = trained("yes")
    assert program._syncs._segments is not None
    assert_all_close(by_windows, by_programs, rtol=1e-5, atol=1e-6)


def test_a_merge_moves_a_copy_by_the_same_vector():
    """Fragments in flight are applied without a step in between."""
    program = program_of(METHOD)
    state = tiny.finish(program, tiny.start(program), 4)[0]
    assert state.sync.in_flight

    before = tiny.host((state.region.params, state.region.opt_state.z))
    state, dropped = program.land(state)
    assert not dropped

    after = tiny.host((state.region.params, state.region.opt_state.z))
    of_params, of_copy = (
        jax.tree.map(np.subtract, new, old)
        for new, old in zip(after, before, strict=True)
    )

    assert max(np.abs(x).max() for x in jax.tree.leaves(of_params)) > 1e-3
    assert_all_close(of_copy, of_params, rtol=1e-4, atol=1e-6)


def test_with_a_sync_at_every_step_the_means_are_those_of_data_parallel():
    """In this limit schedule-free regions are one run on the mean gradient.

    A region's own z has the sum of its own gradients, so that those of regions that
    learn different things differ, more with every step; their mean is the one of z.
    """
    targets = np.float32([[1, 1, 1], [-0.5, 0, 2]])
    curvature = np.float32([[1, 2, 3], [3, 1, 2]])

    def loss_fn(params, batch, key):
        target, scale = batch
        return jnp.sum(scale * (params["w"] - target) ** 2), {}

    params = {"w": jnp.zeros(3)}
    num_steps = 20
    method = cc.methods.get("diloco", sync_interval=1, outer_lr=1, outer_momentum=0)
    program = cc.RegionProgram(loss_fn, FREE, method, params, 2)
    state = program.init(params, jax.random.key(0))
    batch = targets, curvature
    for _ in range(num_steps):
        state, _ = program.advance(state, jax.tree.map(lambda x: x[None], batch))

    @jax.jit
    def step(params, inner):
        def loss(params):
            return jax.vmap(lambda *b: loss_fn(params, b, None)[0])(*batch).mean()

        updates, inner = FREE.update(jax.grad(loss)(params), inner, params)
        return optax.apply_updates(params, updates), inner

    wanted = params
    inner = FREE.init(params)
    for _ in range(num_steps):
        wanted, inner = step(wanted, inner)
    mean = jax.tree.map(
        lambda x: x.mean(0), tiny.host((state.region.params, state.region.opt_state.z))
    )
    assert_all_close(mean, tiny.host((wanted, inner.z)), rtol=1e-4, atol=1e-5)


def test_parameters_to_evaluate_are_the_mean_of_those_of_regions(by_programs):
    """x of docs/start is the mean over regions."""
    params, state = by_programs
    to_evaluate = jax.vmap(optax.contrib.schedule_free_eval_params)(state, params)
    of_means = optax.contrib.schedule_free_eval_params(
        *jax.tree.map(lambda x: x.mean(0), (state, params))
    )
    mean = jax.tree.map(lambda x: x.mean(0), to_evaluate)
    assert_all_close(tiny.host(mean), tiny.host(of_means), rtol=1e-4, atol=1e-5)


def ema_of_params(decay):
    """A user's optimizer: Optax's SGD, and an average of the parameters."""
    sgd = optax.sgd(tiny.LEARNING_RATE)

    def init(params):
        return {"average": params, "sgd": sgd.init(params)}

    def update(updates, state, params):
        updates, new = sgd.update(updates, state["sgd"], params)
        average = jax.tree.map(
            lambda a, p: decay * a + (1 - decay) * p, state["average"], params
        )
        return updates, {"average": average, "sgd": new}

    return optax.GradientTransformation(init, update)


def test_a_users_own_copy_is_moved_by_the_hook():
    def on_merge(state, old, new):
        average = jax.tree.map(lambda a, x, y: a + y - x, state["average"], old, new)
        return state | {"average": average}

    user_inputs = cc.UserInputs(on_merge=on_merge)
    options = {"optimizer": ema_of_params(0.9), "num_steps": 8}
    _, with_hook = trained(user_inputs=user_inputs, **options)
    left = cc.UserInputs(on_merge=lambda state, old, new: state)
    _, without = trained(user_inputs=left, **options)

    assert_all_close(with_hook[0], without[0], rtol=1e-6, atol=0)
    tx = cc.synchronized(
        ema_of_params(0.9), METHOD, axis_name="region", user_inputs=user_inputs
    )
    params, state = train(tx, METHOD, tiny.NUM_REGIONS, 8)

    assert_all_close(tiny.host((params, state.inner)), with_hook, rtol=1e-4, atol=1e-5)
    gap = np.abs(with_hook[1]["average"]["head"] - without[1]["average"]["head"]).max()
    assert gap > 1e-3


@pytest.mark.parametrize("overlap", mostly_slow(["no", "yes"], quick=["yes"]))
def test_a_copy_in_host_memory_moves_as_well(by_programs, overlap):
    program, ends = trained(overlap, optimizer_memory="host")
    where = program.shardings.region.opt_state.z["head"]
    assert where.memory_kind == "pinned_host"
    assert_all_close(ends, by_programs, rtol=1e-5, atol=1e-6)
