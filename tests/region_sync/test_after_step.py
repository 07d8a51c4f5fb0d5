"""A line after a plain loop's step gives the numbers of the region program."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cocodc_jax as cc
from cocodc_jax.methods import Method
from tests.numerics import assert_all_close
from tests.region_sync import regression as plain

NUM_STEPS = 16
OVERLAPPED = {"sync_interval": 6, "num_fragments": 2, "delay_steps": 2}
CASES = {
    "diloco": ("diloco", {"sync_interval": 5}),
    "streaming": ("streaming_diloco", OVERLAPPED),
    "cocodc": ("cocodc", OVERLAPPED),
    "one bit": ("streaming_diloco", OVERLAPPED | {"compress": "ef+sign"}),
    "noloco": ("noloco", {"sync_interval": 4}),
}


@functools.cache
def reference(case):
    """Return the region program's parameters, outer parameters and bytes."""
    name, options = CASES[case]
    method = cc.methods.get(name, **options)
    program, state = plain.train_by_program(method, plain.OPTIMIZER, NUM_STEPS)
    arrays = state.region.params, program.outer_params(state)
    return jax.tree.map(np.asarray, arrays), state.bytes_sent


def assert_like_the_program(case, sync, params, state):
    (local, outer), num_bytes = reference(case)
    assert_all_close(params, local, rtol=1e-5, atol=1e-6)
    assert_all_close(sync.outer_params(state, params), outer, rtol=1e-5, atol=1e-6)
    assert state.bytes_sent == num_bytes


@pytest.mark.parametrize("case", CASES)
def test_after_step_on_one_device_trains_what_the_program_does(case):
    name, options = CASES[case]
    params = plain.stacked(plain.make_params())
    sync = cc.RegionSync(cc.methods.get(name, **options), params, plain.NUM_REGIONS)
    params, _, state = plain.train(sync, params, NUM_STEPS)
    assert_like_the_program(case, sync, params, state)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_after_step_keeps_the_shardings_of_the_trainers_mesh(axis_type):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("fsdp", "pods"), axis_types=(axis_type,) * 2)
    specs = {"blocks": {"w": P("pods", None, "fsdp")}, "head": P("pods", "fsdp")}
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params = jax.device_put(plain.stacked(plain.make_params()), shardings)

    name, options = CASES["streaming"]
    sync = cc.RegionSync(cc.methods.get(name, **options), params, plain.NUM_REGIONS)
    of_regions = NamedSharding(mesh, P("pods"))
    step = jax.jit(jax.vmap(plain.one_step, spmd_axis_name="pods"))
    init = jax.jit(jax.vmap(plain.OPTIMIZER.init, spmd_axis_name="pods"))

    def step_fn(params, opt_state, batch):
        return step(params, opt_state, jax.device_put(batch, of_regions))

    with jax.set_mesh(mesh):
        params, _, state = plain.train(
            sync, params, NUM_STEPS, step_fn=step_fn, opt_state=init(params)
        )
        assert params["head"].sharding.is_equivalent_to(shardings["head"], 3)
        outer = sync.outer_params(state, params)

    (local, outer_there), _ = reference("streaming")
    assert_all_close(params, local, rtol=1e-5, atol=1e-6)
    assert_all_close(outer, outer_there, rtol=1e-5, atol=1e-6)


def test_the_scan_of_a_trainer_may_take_several_steps_at_once():
    name, options = CASES["streaming"]
    params = plain.stacked(plain.make_params())
    sync = cc.RegionSync(cc.methods.get(name, **options), params, plain.NUM_REGIONS)
    state = sync.init(params)
    opt_state = jax.vmap(plain.OPTIMIZER.init)(params)

    while state.step < NUM_STEPS:
        num_steps = min(sync.steps_to_event(state), NUM_STEPS - state.step)
        for i in range(num_steps):
            batch = plain.batch_of(state.step + i)
            params, opt_state = plain.step_of_all(params, opt_state, batch)
        params, state = sync.after_step(params, state, num_steps=num_steps)

    assert_like_the_program("streaming", sync, params, state)


def small_sync(method="streaming_diloco", options=OVERLAPPED, **arguments):
    params = plain.stacked({"a": jnp.ones(4), "b": jnp.ones(4)})
    method = cc.methods.get(method, **options)
    return cc.RegionSync(method, params, plain.NUM_REGIONS, **arguments), params


def test_a_step_without_an_event_returns_the_tree_itself():
    sync, params = small_sync()
    state = sync.init(params)
    after, state = sync.after_step(params, state)
    assert after is params
    assert (state.step, sync.steps_to_event(state)) == (1, 2)


@pytest.mark.parametrize("donate", [True, False])
def test_a_merge_donates_the_old_tree_unless_donate_is_false(donate):
    options = {"sync_interval": 2, "num_fragments": 1, "delay_steps": 1}
    sync, params = small_sync("streaming_diloco", options, donate=donate)
    state = sync.init(params)
    while not state.applied:
        old = params
        params, state = sync.after_step(params, state)
    assert old["a"].is_deleted() == donate


def test_steps_past_an_event_are_refused():
    sync, params = small_sync()
    with pytest.raises(ValueError, match="num_steps=4 leads past the next event.* 3 "):
        sync.after_step(params, sync.init(params), num_steps=4)


def test_a_checkpoint_of_the_trainers_own_goes_on_bit_for_bit(tmp_path):
    name, options = CASES["one bit"]
    method = cc.methods.get(name, **options)
    params = plain.stacked(plain.make_params())
    sync = cc.RegionSync(method, params, plain.NUM_REGIONS)

    middle = 7  # A fragment is in flight.
    params, opt_state, state = plain.train(sync, params, middle)
    assert state.sync.num_in_flight

    arrays, note = sync.checkpoint(state)
    saved = {"params": params, "opt_state": opt_state, "sync": arrays}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", saved)

    expected, _, _ = plain.train(
        sync, jax.tree.map(jnp.copy, params), NUM_STEPS, state, opt_state=opt_state
    )

    again = cc.RegionSync(method, params, plain.NUM_REGIONS)
    shapes = jax.eval_shape(lambda: (saved["params"], saved["opt_state"]))
    abstract = {
        "params": shapes[0],
        "opt_state": shapes[1],
        "sync": again.abstract(note),
    }
    with ocp.StandardCheckpointer() as checkpointer:
        there = checkpointer.restore(tmp_path / "saved", abstract)

    state = again.restore(there["sync"], note)
    assert state.step == middle
    params, _, _ = plain.train(
        again, there["params"], NUM_STEPS, state, opt_state=there["opt_state"]
    )
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_a_note_of_another_method_is_refused():
    sync, params = small_sync()
    _, note = sync.checkpoint(sync.init(params))
    other, _ = small_sync("diloco", {"sync_interval": 2})
    with pytest.raises(
        ValueError, match="of method='streaming_diloco', but .*'diloco'"
    ):
        other.abstract(note)


def test_landing_merges_the_fragments_in_flight():
    sync, params = small_sync("streaming_diloco", OVERLAPPED | {"mixing_alpha": 0.0})
    state = sync.init(params)

    params, state = sync.after_step(params, state, num_steps=3)  # A start.
    params = jax.tree.map(lambda x: x - jnp.array([[1.0], [3.0]]), params)
    assert state.sync.num_in_flight == 1

    params, state = sync.land(params, state)
    assert state.sync.num_in_flight == 0
    # The message was sent before the progress, which replacing drops.
    started = [leaf for leaf in jax.tree.leaves(params) if (leaf == 1).all()]
    assert len(started) == 1


def test_mean_params_is_the_mean_of_the_regions():
    sync, params = small_sync()
    params["a"] = jnp.stack([jnp.zeros(4), jnp.ones(4)])
    mean = sync.mean_params(params, sync.init(params))
    np.testing.assert_array_equal(mean["a"], np.full(4, 0.5))
    assert not params["a"].is_deleted()


def test_copies_of_the_weights_in_the_trainers_optimizer_move_with_a_merge():
    method = cc.methods.get("diloco", sync_interval=3)
    optimizer = optax.contrib.schedule_free_sgd(0.02)
    _, expected = plain.train_by_program(method, optimizer, 7)

    def one_step(params, opt_state, batch):
        grads = jax.grad(lambda p: plain.loss_fn(p, batch, None)[0])(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = plain.stacked(plain.make_params())
    sync = cc.RegionSync(method, params, plain.NUM_REGIONS, donate=False)
    state = sync.init(params)
    opt_state = jax.vmap(optimizer.init)(params)
    step = jax.jit(jax.vmap(one_step))

    for i in range(7):
        old, opt_state = step(params, opt_state, plain.batch_of(i))
        params, state = sync.after_step(old, state)
        if state.applied:
            opt_state = cc.merge_opt_state(opt_state, old, params)

    assert_all_close(opt_state.z, expected.region.opt_state.z, rtol=1e-5, atol=1e-6)


def test_a_merge_gets_the_trainers_batch_and_moments():
    params = plain.make_params()
    # It takes the gradient of the last batch, and Adam's second moment.
    method = cc.methods.get("cocodc", curvature="hessian_vector", **OVERLAPPED)
    adam = optax.adam(0.01, eps=1e-3)
    inputs = cc.UserInputs(0.01, cc.adam_second_moment(0.999))
    _, expected = plain.train_by_program(method, adam, NUM_STEPS, inputs)

    def one_step(params, opt_state, batch):
        grads = jax.grad(lambda p: plain.loss_fn(p, batch, None)[0])(params)
        updates, opt_state = adam.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = plain.stacked(params)
    sync = cc.RegionSync(
        method,
        params,
        plain.NUM_REGIONS,
        user_inputs=inputs,
        loss_fn=plain.loss_fn,
    )
    state = sync.init(params)
    opt_state = jax.vmap(adam.init)(params)
    step = jax.jit(jax.vmap(one_step))

    for i in range(NUM_STEPS):
        batch = plain.batch_of(i)
        params, opt_state = step(params, opt_state, batch)
        params, state = sync.after_step(params, state, batch=batch, opt_state=opt_state)

    assert_all_close(params, expected.region.params, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (cc.methods.get("data_parallel"), "exchanges messages at every step"),
        (cc.methods.get("lt_admm"), "corrects every gradient"),
        (cc.methods.get("diloco", exclude_above=3.0), "restore regions"),
        (cc.methods.get("cocodc", delay_steps="auto"), "follows measured times"),
        (Method(name="alone"), "exchange nothing"),
    ],
)
def test_methods_that_need_more_than_parameters_are_refused(method, message):
    params = {"w": jnp.ones((2, 4))}
    with pytest.raises(
        ValueError, match=f"cannot be used with RegionSync: .*{re.escape(message)}"
    ):
        cc.RegionSync(method, params, 2)


def hessian_vector():
    """A merge that takes gradients of the last batch, and Adam's second moment."""
    method = cc.methods.get("cocodc", curvature="hessian_vector", **OVERLAPPED)
    inputs = cc.UserInputs(
        learning_rate=0.02, second_moment=cc.adam_second_moment(0.999)
    )
    return method, inputs


def test_a_merge_that_takes_gradients_needs_the_loss():
    params = {"a": jnp.ones((2, 4)), "b": jnp.ones((2, 4))}
    method, inputs = hessian_vector()
    with pytest.raises(ValueError, match="pass loss_fn="):
        cc.RegionSync(method, params, 2, user_inputs=inputs)


@pytest.mark.parametrize("missing", ["opt_state", "batch"])
def test_after_step_names_a_missing_argument_and_donates_nothing(missing):
    params = {"a": jnp.ones((2, 4)), "b": jnp.ones((2, 4))}
    method, inputs = hessian_vector()

    def loss_fn(params, batch, key):
        return params["a"].sum(), {}

    sync = cc.RegionSync(method, params, 2, user_inputs=inputs, loss_fn=loss_fn)
    arguments = {
        "batch": jnp.ones((2, 1)),
        "opt_state": jax.vmap(optax.adam(0.1).init)(params),
    }
    del arguments[missing]

    with pytest.raises(ValueError, match=rf"pass after_step\(\.\.\., {missing}="):
        sync.after_step(params, sync.init(params), **arguments)
    assert not any(x.is_deleted() for x in params.values())
