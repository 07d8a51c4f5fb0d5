"""State of a model that is not trained: averaged or kept, saved, seen by merges."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cocodc_jax as cc
from cocodc_jax.train.evaluate import make_evaluate
from tests.numerics import assert_within_ulps
from tests.program.tiny import assert_same, follow, saved_and_restored

INIT = {"mean": jnp.zeros(2), "count": jnp.zeros((), jnp.int32)}
PARAMS = {"w": jnp.ones(2)}
KEY = jax.random.key(0)
BATCHES = np.random.default_rng(0).normal(size=(8, 4, 3, 2)).astype(np.float32)


def loss_fn(params, state, batch, key):
    """A running mean that the loss sees."""
    mean = (state["mean"] + batch.mean(0)) / 2
    loss = jnp.mean((params["w"] - mean) ** 2)
    return loss, ({"mean": mean[0]}, {"mean": mean, "count": state["count"] + 1})


def make(method, average=True, loss=loss_fn, init=INIT, **options):
    options = {"regions": 4, "model_state": cc.ModelState(init, average)} | options
    return cc.RegionProgram(loss, optax.sgd(0.1), method, PARAMS, **options)


def start(program):
    return program.init(PARAMS, KEY)


def finish(program, state, num_steps, batches=BATCHES):
    state, outputs = follow(program, state, batches[state.step :], num_steps)
    return state, outputs[-1]


def running_means(averaged_at, num_steps=6):
    """As by hand: the mean of each region, and of all at some steps."""
    mean = np.zeros((4, 2))
    for step in range(1, num_steps + 1):
        mean = (mean + BATCHES[step - 1].mean(1)) / 2
        if step in averaged_at:
            mean = np.broadcast_to(mean.mean(0), mean.shape)
    return mean


STREAMING = cc.methods.get(
    "streaming_diloco", sync_interval=3, num_fragments=1, delay_steps=2
)


@pytest.mark.parametrize(
    ("method", "average", "averaged_at"),
    [
        pytest.param(
            cc.methods.get("diloco", sync_interval=4),
            True,
            {4},
            marks=pytest.mark.slow,
        ),
        (STREAMING, True, {5}),  # At the merge, not at the start.
        (cc.methods.get("data_parallel"), True, {1, 2, 3, 4, 5, 6}),
        (cc.methods.get("data_parallel"), False, set()),
        (cc.methods.get("noloco", sync_interval=3), False, set()),
        (cc.methods.get("apart"), True, set()),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_a_model_state_is_averaged_when_parameters_are(method, average, averaged_at):
    program = make(method, average)
    plain = cc.RegionProgram(
        lambda p, b, key: (jnp.sum(p["w"] ** 2), {}), optax.sgd(0.1), method, PARAMS, 4
    )
    state, output = finish(program, start(program), 6)
    without, _ = finish(plain, start(plain), 6)
    expected = running_means(averaged_at)
    model_state = state.region.model_state

    np.testing.assert_allclose(model_state["mean"], expected, rtol=1e-5, atol=1e-6)
    assert model_state["count"].tolist() == [6] * 4
    assert model_state["mean"].sharding.spec == P("region")

    one = program.mean_model_state(state)
    np.testing.assert_allclose(one["mean"], expected.mean(0), rtol=1e-5, atol=1e-6)
    assert one["count"] == 6
    assert set(output.aux) == {"mean"}
    # Two float32 numbers each time; no bytes without a model state.
    assert state.bytes_sent - without.bytes_sent == 8 * len(averaged_at)


def test_a_state_that_is_not_finite_is_left_out_where_a_message_would_be():
    """Region 1 reads NaN while a sync is in flight, whose message was still finite."""
    method = STREAMING.guarded(10.0, None)
    program = make(method)
    plain = make(STREAMING)

    batches = BATCHES.copy()
    batches[3, 1] = np.nan

    ends = []
    for run, read in ((program, batches), (program, BATCHES), (plain, BATCHES)):
        ends.append(finish(run, start(run), 5, read)[0])

    bad, good, without = (np.asarray(x.region.model_state["mean"]) for x in ends)
    means = running_means(set(), 5)
    expected = np.stack([means[[0, 2, 3]].mean(0)] * 4)

    np.testing.assert_allclose(bad, expected, rtol=1e-5, atol=1e-6)
    assert ends[0].region.model_state["count"].tolist() == [5] * 4
    # Where all of them are finite nothing changes but a number more that crosses,
    # besides that of the message.
    assert_within_ulps(good, without)
    assert ends[1].bytes_sent - ends[2].bytes_sent == 4 + 4


def test_if_no_state_is_finite_each_region_keeps_its_own():
    def endless(params, state, batch, key):
        low = jnp.minimum(state["low"], batch.min() + 9)
        return jnp.sum(params["w"] ** 2), ({}, {"low": low, "never": state["never"]})

    init = {"low": jnp.full((), jnp.inf), "never": jnp.full((), jnp.inf)}
    program = make(STREAMING.guarded(10.0, None), loss=endless, init=init)
    state, _ = finish(program, start(program), 5)
    low = BATCHES[:5].min((0, 2, 3)) + 9
    np.testing.assert_allclose(state.region.model_state["low"], low, rtol=1e-6)
    assert np.isinf(state.region.model_state["never"]).all()


def test_a_region_that_has_no_step_to_do_keeps_its_own():
    regions = cc.Regions((1.0, 2.0), (1, 1))
    program = make(cc.methods.get("diloco", sync_interval=9), regions=regions)
    state, _ = program.advance(start(program), BATCHES[:4, :2])
    assert state.region.model_state["count"].tolist() == [4, 2]


@pytest.mark.parametrize("curvature", ["hessian_vector", "gauss_newton"])
def test_merges_see_the_state_of_the_region(curvature):
    """A state that is a constant is the same as that constant in the loss."""
    method = cc.methods.get(
        "cocodc", sync_interval=4, num_fragments=1, delay_steps=2, curvature=curvature
    )

    def model(params, state, batch):
        return jnp.tanh(state["scale"] * params["w"][None] * batch)

    def of_outputs(outputs, batch):
        return jnp.mean((outputs - 0.5) ** 2)

    def stateful(params, state, batch, key):
        return of_outputs(model(params, state, batch), batch), ({}, state)

    scale = {"scale": jnp.full((), 1.5)}

    def trained(loss, model_fn, model_state):
        moment = cc.adam_second_moment(0.999)
        program = cc.RegionProgram(
            loss,
            optax.adam(0.1),
            method,
            PARAMS,
            4,
            model_state=model_state,
            user_inputs=cc.UserInputs(0.1, moment, (model_fn, of_outputs)),
        )
        state, output = finish(program, start(program), 6)
        assert (output.syncs[0].metrics["correction_ratio"] > 0).all()
        return state.region.params["w"]

    of_state = trained(stateful, model, cc.ModelState(scale))
    of_constant = trained(
        lambda p, b, key: (stateful(p, scale, b, key)[0], {}),
        lambda p, b: model(p, scale, b),
        None,
    )
    np.testing.assert_allclose(of_state, of_constant, rtol=1e-6)


def test_a_model_state_is_restored_bit_for_bit(tmp_path):
    program = make(STREAMING)
    state, _ = finish(program, start(program), 4)
    assert state.sync.in_flight
    state, restored = saved_and_restored(program, state, tmp_path)
    assert_same(*(finish(program, s, 4)[0].region for s in (state, restored)))


def test_an_evaluation_gets_the_model_state():
    program = make(cc.methods.get("diloco", sync_interval=4))
    state, _ = finish(program, start(program), 4)

    evaluate = make_evaluate(
        lambda p, s, batch, key: (jnp.sum(s["mean"] * batch), {}),
        program.mesh,
        np.ones((4, 2), np.float32),
    )

    loss = evaluate(program.mean_params(state), program.mean_model_state(state))
    expected = running_means({4}, 4)[0].sum()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_a_model_state_is_replicated_inside_a_region():
    mesh = cc.make_mesh(2, data=2, devices=jax.devices()[:4])
    program = make(cc.methods.get("data_parallel"), mesh=mesh)
    batches = np.concatenate([BATCHES, BATCHES[:, :, :1]], 2)  # Even over `data`.
    state, _ = program.advance(start(program), batches[:2])
    mean = np.zeros(2)
    for batch in batches[:2]:
        mean = (mean + batch.mean((0, 1))) / 2
    model_state = state.region.model_state["mean"]

    np.testing.assert_allclose(model_state, np.stack([mean] * 4), rtol=1e-5)
    assert model_state.sharding == NamedSharding(mesh, P("region"))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda s: {}, r"must return \(loss, \(aux, new_model_state\)\), but the sec"),
        (lambda s: (s, {}), r"leaf 'count' is None, but was int32\[\]"),
        (
            lambda s: ({}, s | {"mean": jnp.zeros(3)}),
            r"leaf 'mean' is float32\[3\], but was float32\[2\]",
        ),
    ],
)
def test_invalid_results_of_a_loss_are_refused(returned, message):
    program = make(
        cc.methods.get("diloco"), loss=lambda p, s, b, k: (p["w"].sum(), returned(s))
    )
    with pytest.raises(ValueError, match=message):
        finish(program, start(program), 1)


@pytest.mark.parametrize(
    ("name", "how"), [("noloco", "with neighbours alone"), ("mla", "one by one")]
)
def test_methods_without_an_average_of_regions_are_refused(name, how):
    with pytest.raises(ValueError, match=f"method='{name}' exchange {how}; use"):
        make(cc.methods.get(name))


@pytest.mark.parametrize(
    ("leaf", "message"),
    [(0.5, "'x' of type float, which is no arr"), (KEY, "a PRNG key")],
)
def test_invalid_leaves_of_a_model_state_are_refused(leaf, message):
    with pytest.raises(ValueError, match=message):
        cc.ModelState({"x": leaf})
