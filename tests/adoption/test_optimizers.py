"""Optimizers and losses of other people's inside the program, against plain Optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cocodc_jax as cc

NUM_STEPS = 4
PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 1.0], [0.3, 0.2]])}
BATCHES = np.random.default_rng(0).normal(size=(NUM_STEPS, 2, 4, 3)).astype(np.float32)
SPECS = {"w": jax.sharding.PartitionSpec(None, "data")}

PLATEAU = optax.chain(
    optax.sgd(0.05), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)
)
OPTIMIZERS = {
    # As NanoDO always wraps; by itself, and as a transformation.
    "multi_steps": optax.MultiSteps(optax.adam(0.1), 2),
    "multi_steps_in_chain": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.MultiSteps(optax.sgd(0.1, 0.9), 2).gradient_transformation(),
    ),
    "multi_steps_of_value": optax.MultiSteps(PLATEAU, 2),
    "reduce_on_plateau": PLATEAU,
}


def loss_fn(params, batch, key):
    """Grows once the step is too long, so that a plateau is one."""
    return jnp.mean((batch @ params["w"]) ** 2) - jnp.sum(params["w"]), {}


def alone(optimizer, regions):
    """Train by Optax alone on the mean loss over these regions."""

    @jax.jit
    def step(params, state, batch):
        def loss(params):
            losses = [loss_fn(params, batch[i], None)[0] for i in regions]
            return sum(losses) / len(losses)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    params = PARAMS
    state = optimizer.init(PARAMS)
    for batch in BATCHES:
        params, state = step(params, state, batch)
    return params["w"]


def run(optimizer, method, loss=loss_fn, data=1, specs=None):
    program = cc.RegionProgram(
        loss,
        optimizer,
        method,
        PARAMS,
        2,
        mesh=cc.make_mesh(2, data=data),
        param_specs=specs,
    )
    state = program.init(PARAMS, jax.random.key(0))
    state, output = program.advance(state, BATCHES)
    return np.asarray(state.region.params["w"]), output


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("data", "specs"),
    [pytest.param(1, None, marks=pytest.mark.slow), (2, SPECS)],
    ids=["whole", "divided"],
)
def test_each_region_trains_as_optax_alone(name, data, specs):
    weights, _ = run(OPTIMIZERS[name], "apart", data=data, specs=specs)
    wanted = [alone(OPTIMIZERS[name], [i]) for i in range(2)]
    np.testing.assert_allclose(weights, wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("name", ["multi_steps", "reduce_on_plateau"])
def test_regions_that_exchange_every_step_train_on_the_mean_loss(name, data):
    """With the loss of each region the regions would differ."""
    weights, _ = run(OPTIMIZERS[name], "data_parallel", data=data)
    np.testing.assert_array_equal(weights[0], weights[1])
    wanted = alone(OPTIMIZERS[name], [0, 1])
    np.testing.assert_allclose(weights[0], wanted, rtol=2e-5)


@pytest.mark.parametrize("data", [1, 2])
def test_a_loss_that_was_not_written_for_shard_map_trains(data):
    """A scan that begins with plain zeros, a choice with a plain constant."""

    def loss(params, batch, key):
        total, _ = jax.lax.scan(
            lambda sum_, x: (sum_ + x @ params["w"], None), jnp.zeros(2), batch
        )
        loss = jnp.mean(total**2)
        return jax.lax.cond(loss > 1e6, lambda: jnp.zeros(()), lambda: loss), {}

    weights, _ = run(optax.sgd(0.01), "apart", loss, data)
    assert np.isfinite(weights).all()
    assert not np.array_equal(weights[0], weights[1])


def test_aux_may_hold_python_numbers():
    def loss(params, batch, key):
        return loss_fn(params, batch, key)[0], {"acc": 0.5, "num": 3, "is_odd": True}

    _, output = run(optax.sgd(0.01), "diloco", loss)
    aux = {k: np.asarray(v) for k, v in output.aux.items()}
    assert {k: v.shape for k, v in aux.items()} == dict.fromkeys(aux, (4, 2))
    assert (aux["acc"] == 0.5).all()
    assert (aux["num"] == 3).all()
    assert aux["is_odd"].all()


def test_an_error_of_the_loss_is_raised_unchanged():
    def loss(params, batch, key):
        return jnp.mean(batch @ params["nothing"]), {}

    with pytest.raises(KeyError, match="nothing"):
        run(optax.sgd(0.1), "apart", loss)


@pytest.mark.parametrize("is_object", [True, False])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(sync_interval=30),
            "sync_interval=30 is not a multiple of the 4 .* use 28",
        ),
        (dict(sync_interval=16), "delay_steps=5 is not a multiple of the 4 .* 4 or 8"),
        (dict(sync_interval=12, delay_steps=4, syncs_per_interval=6), "slot_steps=2 "),
        (dict(sync_interval=16, delay_steps="auto"), "needs events at multiples of"),
        (dict(sync_interval=16, delay_steps=4, curvature="secant"), "a multiple of 8,"),
        (dict(sync_interval=16, delay_steps=4), None),
    ],
)
def test_a_schedule_that_starts_inside_of_an_accumulation_is_refused(
    options, message, is_object
):
    optimizer = optax.MultiSteps(optax.adam(0.1), 4)
    optimizer = optimizer if is_object else optimizer.gradient_transformation()
    method = cc.methods.get("cocodc", num_fragments=1, **options)
    if message is None:
        run(optimizer, method)
        return
    with pytest.raises(ValueError, match=message):
        run(optimizer, method)


def test_a_scheduled_accumulation_warns_that_the_interval_counts_calls():
    optimizer = optax.MultiSteps(
        optax.adam(0.1), lambda step: jnp.where(step > 9, 4, 2)
    )
    with pytest.warns(UserWarning, match="sync_interval=5 counts calls of the optim"):
        run(optimizer, cc.methods.get("diloco", sync_interval=5))


FOUR = optax.MultiSteps(optax.adam(0.1), 4).gradient_transformation()
WRAPPED = {
    "chain": optax.chain(optax.clip(1.0), FOUR),
    "masked": optax.masked(FOUR, {"w": True}),
    "multi_transform": optax.multi_transform({"all": FOUR}, {"w": "all"}),
    "inject_hyperparams": optax.inject_hyperparams(
        lambda rate: optax.MultiSteps(optax.adam(rate), 4).gradient_transformation()
    )(0.1),
    "with_extra_args_support": optax.with_extra_args_support(FOUR),
    "apply_every": optax.chain(optax.apply_every(4), optax.sgd(0.1)),
    "sam": optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), sync_period=4),
}


def make(form, optimizer, method, user_inputs=None):
    """A program, or the first state of a transform."""
    user_inputs = user_inputs or cc.UserInputs()
    if form == "program":
        return cc.RegionProgram(
            loss_fn, optimizer, method, PARAMS, 2, user_inputs=user_inputs
        )
    tx = cc.synchronized(optimizer, method, axis_name="region", user_inputs=user_inputs)
    return tx.init(PARAMS)


@pytest.mark.parametrize("form", ["program", "synchronized"])
@pytest.mark.parametrize("name", WRAPPED)
def test_an_accumulation_is_seen_in_a_wrapper(name, form):
    who = {"sam": "optax.contrib.sam", "apply_every": "optax.apply_every"}
    message = (
        f"sync_interval=6 is .* 4 steps of an update by {who.get(name, 'optax.M')}"
    )
    with pytest.raises(ValueError, match=message):
        make(form, WRAPPED[name], cc.methods.get("diloco", sync_interval=6))
    make(form, WRAPPED[name], cc.methods.get("diloco", sync_interval=8))


@pytest.mark.parametrize("form", ["program", "synchronized"])
def test_an_optimizer_that_skips_calls_warns_that_the_interval_counts_calls(form):
    optimizer = optax.apply_if_finite(FOUR, 3)
    message = "of which optax.MultiSteps makes an update after a number that is not kn"
    with pytest.warns(UserWarning, match=message):
        make(form, optimizer, cc.methods.get("diloco", sync_interval=8))
    make(form, optimizer, cc.methods.get("data_parallel"))


# --- Extra arguments ---


def with_value(name):
    """An optimizer of a user, which names one extra argument and takes no other."""

    def of_value(updates, state, params=None, *, value):
        return jax.tree.map(lambda g: -0.1 * value * g, updates), state

    def of_curvature(updates, state, params=None, *, curvature):
        return updates, state

    update = {"value": of_value, "curvature": of_curvature}[name]
    return optax.GradientTransformationExtraArgs(lambda params: (), update)


@pytest.mark.parametrize("plain", [True, False])
def test_an_optimizer_gets_the_extra_arguments_that_it_names(plain):
    optimizer = with_value("value")
    if plain:  # Optax would pass nothing.
        optimizer = optax.GradientTransformation(*optimizer)
    weights, _ = run(optimizer, "apart")
    wanted = [alone(with_value("value"), [i]) for i in range(2)]
    np.testing.assert_allclose(weights, wanted, rtol=2e-5, atol=1e-6)


def test_an_optimizer_without_extra_arguments_gets_none_in_a_chain():
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2)
    chained, _ = run(optax.chain(optax.clip(10.0), sam), "apart")
    direct, _ = run(sam, "apart")
    np.testing.assert_allclose(chained, direct, rtol=1e-6)


def test_an_extra_argument_that_is_missing_is_named():
    message = r"the inner optimizer needs curvature: pass it .*RegionProgram passes va"
    with pytest.raises(ValueError, match=message):
        run(with_value("curvature"), "apart")
    tx = cc.synchronized(with_value("curvature"), "diloco", axis_name="region")

    def step(params, state, **extra):
        return tx.update(params, state, params, batch=None, **extra)

    of_all = functools.partial(jax.vmap, axis_name="region", axis_size=2)
    with pytest.raises(ValueError, match="the inner optimizer needs curvature"):
        of_all(step, (None, None))(PARAMS, tx.init(PARAMS))
    of_all(functools.partial(step, curvature=1.0), (None, None))(
        PARAMS, tx.init(PARAMS)
    )


# --- Random state ---


def noise_of(method, regions=2):
    """Updates of an optimizer that adds noise to zero gradients, `[R, 3, 2]`."""
    optimizer = optax.noisy_sgd(1.0, key=3)
    flat = lambda params, batch, key: (0.0 * jnp.sum(params["w"]), {})  # noqa: E731
    program = cc.RegionProgram(flat, optimizer, method, PARAMS, regions)
    state = program.init(PARAMS, jax.random.key(0))
    state, _ = program.advance(state, BATCHES[:1, :regions])
    return np.asarray(state.region.params["w"]) - np.asarray(PARAMS["w"])


def test_regions_draw_noise_of_their_own():
    one, two = noise_of("apart")
    assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 0.9
    assert not np.isclose(one, two).any()

    # One region draws what Optax draws, and so does the first of several.
    optimizer = optax.noisy_sgd(1.0, key=3)
    zero = jax.tree.map(jnp.zeros_like, PARAMS)
    wanted, _ = optimizer.update(zero, optimizer.init(PARAMS), PARAMS)
    for noise in (one, noise_of("apart", 1)[0]):
        np.testing.assert_allclose(noise, wanted["w"], rtol=1e-5)


def test_regions_that_exchange_every_step_draw_the_same():
    one, two = noise_of("data_parallel")
    np.testing.assert_array_equal(one, two)


def test_a_transforms_keys_differ_from_the_first_update_on():
    tx = cc.synchronized(
        optax.contrib.sophia(0.1, update_interval=1), "diloco", axis_name="region"
    )

    def step(params, state, batch):
        loss = lambda params: loss_fn(params, batch, None)[0]  # noqa: E731
        updates, state = tx.update(jax.grad(loss)(params), state, params, obj_fn=loss)
        return optax.apply_updates(params, updates), state

    axes = (0, cc.sync_axes("diloco"))
    step = jax.jit(jax.vmap(step, (*axes, 0), axes, axis_name="region"))
    first = jax.vmap(lambda x: x, None, axes, axis_size=2)((PARAMS, tx.init(PARAMS)))
    state = step(*first, BATCHES[0])[1]
    keys = [np.asarray(state.inner[0].hessian_fn_state.key)]

    # A restored state keeps its keys: the next ones follow from them alone.
    later = step(first[0], state, BATCHES[1])[1]
    keys.append(np.asarray(later.inner[0].hessian_fn_state.key))
    wanted = [jax.random.split(jax.random.PRNGKey(0))[0]]
    key = jax.random.fold_in(jax.random.PRNGKey(0), 1)
    wanted.append(jax.random.split(key)[0])

    np.testing.assert_array_equal(keys[0], wanted)
    np.testing.assert_array_equal(keys[1], [jax.random.split(x)[0] for x in wanted])
