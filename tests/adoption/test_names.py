"""Names of users' leaves: marks decide, and guesses by name are reported."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cocodc_jax as cc
from cocodc_jax import models
from cocodc_jax.sync.averages import RadialDirectional
from cocodc_jax.sync.cutting import cut
from cocodc_jax.transforms import layers, muon
from cocodc_jax.transforms.compressor import identity, matrices, message_bytes
from cocodc_jax.transforms.curvature import normalized_outer_product
from cocodc_jax.transforms.layers import is_stack
from cocodc_jax.transforms.low_rank import low_rank

PARAMS = {"experts": {"tokens": np.zeros(3, np.float32)}, "w": np.zeros(2, np.float32)}
NOTHING = cc.UserInputs()
IS_COUNT = cc.UserInputs(token_counts=models.experts.is_token_count)


def loss_fn(params, batch, key=None):
    leaves = jax.tree.leaves(params)
    return sum(jnp.square(x - batch.mean()).sum() for x in leaves) / 2, {}


METHOD = cc.methods.get("diloco", sync_interval=4, outer_lr=1.0, outer_momentum=0.0)
ONES = np.ones((12, 2, 1), np.float32)


def trained_by_program(user_inputs=NOTHING):
    program = cc.RegionProgram(
        loss_fn, optax.sgd(0.5), METHOD, PARAMS, 2, user_inputs=user_inputs
    )
    state = program.init(PARAMS, jax.random.key(0))
    *_, (state, _) = cc.run_steps(program, state, iter(ONES), num_steps=12)
    return jax.tree.map(lambda x: x[0], state.region.params)


def trained_by_transform(user_inputs=NOTHING):
    tx = cc.synchronized(
        optax.sgd(0.5), METHOD, axis_name="region", user_inputs=user_inputs
    )

    def step(carry, batch):
        params, state = carry
        grads = jax.grad(lambda x: loss_fn(x, batch)[0])(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def run(batches):
        params = jax.tree.map(jnp.asarray, PARAMS)
        return jax.lax.scan(step, (params, tx.init(params)), batches)[0][0]

    runs = jax.vmap(run, axis_name="region")(ONES.swapaxes(0, 1))
    return jax.tree.map(lambda x: x[0], runs)


FORMS = {"program": trained_by_program, "transform": trained_by_transform}


@pytest.mark.parametrize("form", FORMS)
def test_a_leaf_called_like_a_count_is_trained(form):
    params = FORMS[form]()
    np.testing.assert_allclose(params["experts"]["tokens"], 1, rtol=1e-3)
    np.testing.assert_allclose(params["w"], 1, rtol=1e-3)


@pytest.mark.parametrize("form", FORMS)
def test_a_leaf_marked_as_a_count_is_reset(form):
    params = FORMS[form](IS_COUNT)
    assert params["experts"]["tokens"].tolist() == [0, 0, 0]
    np.testing.assert_allclose(params["w"], 1, rtol=1e-3)


@pytest.mark.parametrize(
    ("params", "method", "marks", "message"),
    [
        (PARAMS, METHOD, lambda path: False, "token_counts=.* marks none of the leave"),
        (PARAMS, METHOD, {"w": True}, "token_counts=.* must be a function of a leaf's"),
        (
            {"moe": {"experts": {"up": np.ones((2, 3)), "tokens": np.zeros(2)}}},
            METHOD.expert_weighted("tokens"),
            None,
            "reads the counts 'moe/experts/tokens', which are not marked",
        ),
    ],
)
def test_token_counts_that_match_no_leaf_are_refused(params, method, marks, message):
    inputs = cc.UserInputs(token_counts=marks)
    params = jax.tree.map(np.float32, params)
    with pytest.raises(ValueError, match=message):
        cc.RegionProgram(loss_fn, optax.sgd(1), method, params, 2, user_inputs=inputs)
    tx = cc.synchronized(optax.sgd(1), method, axis_name="region", user_inputs=inputs)
    with pytest.raises(ValueError, match=message):
        tx.init(params)


def test_layers_with_a_name_before_their_number_are_no_stack():
    names = "DecoderLayer_0", "DecoderLayer_1"
    params = {"blocks": {name: {"w": jnp.ones((4, 4))} for name in names}}
    assert not is_stack("blocks/DecoderLayer_0/w")

    parts = [cut(params, 2).take(params, k) for k in range(2)]
    assert [list(part) for part in parts] == [[f"blocks/{n}/w"] for n in names]
    assert all(x.shape == (4, 4) for part in parts for x in part.values())

    # One tensor, of rank 1: a stack's layers would be four vectors.
    part = {"blocks/DecoderLayer_0/w": jnp.outer(jnp.arange(4.0), jnp.ones(4))}
    compressor = low_rank(1)
    message, _ = compressor.encode(part, compressor.init(part))
    assert message_bytes(message) == 4 * (4 + 4)


def test_a_guess_by_name_is_logged_once(caplog):
    tree = {"layers": {"w": jnp.ones((3, 5))}}
    layers._say_of_stack.cache_clear()
    for _ in range(2):
        guessed, _ = matrices(identity()).encode(tree, ())
    assert not guessed.matrices  # Three vectors.

    (warning,) = caplog.messages
    assert "the leaves below 'layers' are taken for layers" in warning


def test_has_layers_overrides_the_guess_of_a_compressor():
    tree = {"layers": {"w": jnp.ones((3, 5))}}
    compressor = matrices(identity(), has_layers=lambda path: False)
    message, _ = compressor.encode(tree, ())
    assert list(message.matrices) == ["layers/w"]


def test_has_layers_overrides_the_guess_of_an_average():
    average = RadialDirectional(embedding="nothing", has_layers=lambda path: False)
    sent = average.before({"layers/embed": jnp.ones((4, 4))}, None)
    assert sent["layers/embed"]["length"].item() == 4


def test_has_layers_overrides_the_guess_of_a_curvature():
    chosen = normalized_outer_product(scope="layer", has_layers=lambda path: False)
    x = jnp.arange(6.0).reshape(2, 3)
    product = chosen.product({"layers": {"w": x}}, {"layers": {"w": x}})
    expected = normalized_outer_product().product({"w": x}, {"w": x})
    np.testing.assert_array_equal(product["layers"]["w"], expected["w"])


def test_muon_warns_if_it_finds_no_matrix(caplog):
    muon._say_all_is_adams.cache_clear()
    params = {"layers": {"0": {"w": jnp.ones((3, 4))}}}

    muon.muon(0.1).init(params)
    muon.muon(0.1).init(params)

    (warning,) = caplog.messages
    assert "muon finds no matrix below blocks='blocks'" in warning

    caplog.clear()
    muon.muon(0.1, blocks="layers").init(params)
    assert not caplog.messages
