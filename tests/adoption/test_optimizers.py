"""Optimizers and losses of other people's inside the program, against plain Optax."""

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
    """What Optax makes of the mean over these regions."""

    @jax.jit
    def step(params, state, batch):
        def loss(params):
            losses = [loss_fn(params, batch[i], None)[0] for i in regions]
            return sum(losses) / len(losses)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, optimizer.init(PARAMS)
    for batch in BATCHES:
        params, state = step(params, state, batch)
    return params["w"]


def run(optimizer, method, loss=loss_fn, data=1, specs=None):
    program = cc.RegionProgram(
        loss, optimizer, method, PARAMS, 2, mesh=cc.make_mesh(2, data=data),
        param_specs=specs,
    )  # fmt: skip
    state = program.init(PARAMS, jax.random.key(0))
    state, output = program.advance(state, BATCHES)
    return np.asarray(state.region.params["w"]), output


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("data", "specs"), [(1, None), (2, SPECS)], ids=["whole", "divided"]
)
def test_regions_do_what_optax_does(name, data, specs):
    found, _ = run(OPTIMIZERS[name], "apart", data=data, specs=specs)
    wanted = [alone(OPTIMIZERS[name], [i]) for i in range(2)]
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("name", ["multi_steps", "reduce_on_plateau"])
def test_regions_that_exchange_every_step_go_by_the_mean_loss(name, data):
    """Each by its own would take them apart."""
    found, _ = run(OPTIMIZERS[name], "data_parallel", data=data)
    np.testing.assert_array_equal(found[0], found[1])
    wanted = alone(OPTIMIZERS[name], [0, 1])
    np.testing.assert_allclose(found[0], wanted, rtol=2e-5)


@pytest.mark.parametrize("data", [1, 2])
def test_a_loss_that_was_not_written_for_shard_map(data):
    """A scan that begins with plain zeros, a choice with a plain constant."""

    def loss(params, batch, key):
        total, _ = jax.lax.scan(
            lambda sum_, x: (sum_ + x @ params["w"], None), jnp.zeros(2), batch
        )
        loss = jnp.mean(total**2)
        return jax.lax.cond(loss > 1e6, lambda: jnp.zeros(()), lambda: loss), {}

    found, _ = run(optax.sgd(0.01), "apart", loss, data)
    assert np.isfinite(found).all()
    assert not np.array_equal(found[0], found[1])


def test_numbers_of_pythons_are_aux():
    def loss(params, batch, key):
        return loss_fn(params, batch, key)[0], {"acc": 0.5, "num": 3, "is_odd": True}

    _, output = run(optax.sgd(0.01), "diloco", loss)
    found = {k: np.asarray(v) for k, v in output.aux.items()}
    assert {k: v.shape for k, v in found.items()} == dict.fromkeys(found, (4, 2))
    assert (found["acc"] == 0.5).all()
    assert (found["num"] == 3).all()
    assert found["is_odd"].all()


def test_a_loss_that_is_wrong_says_so_itself():
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
def test_no_fragment_leaves_in_the_middle_of_an_accumulation(
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


def test_where_accumulation_is_a_schedule_nothing_is_known_before():
    optimizer = optax.MultiSteps(
        optax.adam(0.1), lambda step: jnp.where(step > 9, 4, 2)
    )
    run(optimizer, cc.methods.get("diloco", sync_interval=5))
