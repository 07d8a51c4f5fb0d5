import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax import models
from cocodc_jax.engine.mesh import make_mesh
from cocodc_jax.expert_leaves import TOKEN_UNIT
from cocodc_jax.models import dispatch as dispatching
from cocodc_jax.models import experts
from cocodc_jax.models.config import TransformerConfig
from cocodc_jax.models.transformer import bind
from tests.models import oracle
from tests.numerics import assert_all_close
from tests.program.mixture import drawn_params
from tests.slow import mostly_slow

_DENSE = TransformerConfig(
    vocab_size=32, num_layers=2, width=16, mlp_width=24, num_heads=2, num_kv_heads=2
)
_MOE = dataclasses.replace(_DENSE, num_experts=4, expert_width=12)
_KEY = jax.random.key(0)


def _tokens(batch=4, length=9, seed=0):
    drawn = np.random.default_rng(seed).integers(0, 32, (batch, length))
    return drawn.astype(np.int32)


def _weights(rng, num_experts, width, inside):
    shapes = ((num_experts, width, inside),) * 2 + ((num_experts, inside, width),)
    return tuple(rng.normal(size=shape) for shape in shapes)


def _mixed(x, router, weights, per_token, dispatch):
    choice = experts.choose(x, router, per_token)
    return dispatching.mix(x, choice.ids, choice.weights, weights, dispatch)


@pytest.mark.parametrize("dispatch", ["ragged", "blocks"])
@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), [(37, 5, 2), (3, 8, 1)])
def test_a_mixture_is_a_loop_over_its_experts(dispatch, num_tokens, num_experts, k):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_tokens, 6))
    router = rng.normal(size=(6, num_experts))
    # One expert that all like, so that groups are very unequal, and some are empty.
    router[:, 0] *= 5
    weights = _weights(rng, num_experts, 6, 7)

    with jax.enable_x64(True):
        mixed = jax.jit(functools.partial(_mixed, per_token=k, dispatch=dispatch))(
            x, router, weights
        )

    np.testing.assert_allclose(mixed, oracle.mixture(x, router, weights, k), atol=1e-12)


@pytest.mark.parametrize("dispatch", ["ragged", "blocks"])
def test_gradients_of_a_mixture_are_those_of_all_experts_masked(dispatch):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(21, 6))
    router = rng.normal(size=(6, 4))
    weights = _weights(rng, 4, 6, 5)
    like = rng.normal(size=x.shape)

    def masked(x, router, weights):
        probs = jax.nn.softmax(x @ router)
        floor = jnp.sort(probs)[:, -2, None]
        probs = jnp.where(probs >= floor, probs, 0)
        probs /= probs.sum(-1, keepdims=True)
        gate, up, down = weights
        hidden = jax.nn.silu(jnp.einsum("td,edf->tef", x, gate))
        hidden *= jnp.einsum("td,edf->tef", x, up)
        return jnp.einsum("te,tef,efd->td", probs, hidden, down)

    def loss(fn):
        return lambda *args: (fn(*args) * like).sum()

    with jax.enable_x64(True):
        mixed = functools.partial(_mixed, per_token=2, dispatch=dispatch)
        grads = jax.jit(jax.grad(loss(mixed), (0, 1, 2)))(x, router, weights)
        wanted = jax.jit(jax.grad(loss(masked), (0, 1, 2)))(x, router, weights)
        assert jax.tree.leaves(grads)[0].dtype == np.float64
        assert_all_close(grads, wanted, atol=1e-12)


def test_the_kernel_of_tpus_sums_each_group():
    """Interpreted: what gradients of weights are made of there, an empty group too."""
    rng = np.random.default_rng(0)
    sizes = np.array([10, 0, 30, 24], np.int32)
    rows = rng.normal(size=(64, 8))
    grad = rng.normal(size=(64, 12))
    products = dispatching.tgmm(
        jnp.float32(rows.T),
        jnp.float32(grad),
        sizes,
        preferred_element_type=jnp.float32,
        tiling=(64, 512, 512),
        interpret=True,
    )

    ends = np.cumsum(sizes)
    wanted = [
        rows[e - n : e].T @ grad[e - n : e] for e, n in zip(ends, sizes, strict=True)
    ]

    np.testing.assert_allclose(products, wanted, atol=1e-5)


def _loss_and_grad(config, tokens, params=None):
    loss = jax.value_and_grad(models.make_loss_fn(config), has_aux=True)
    return jax.jit(loss)(params or drawn_params(config), tokens, _KEY)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"remat": "full"}, marks=pytest.mark.slow),
        {"shared_experts": 2, "moe_every": 2},
    ],
)
def test_scanned_and_unscanned_layers_are_one_model(changed):
    scanned = dataclasses.replace(_MOE, **changed)
    plain = dataclasses.replace(scanned, scan_layers=False)
    every = scanned.moe_every

    def layer_of(blocks, layer):
        block = blocks[f"layer_{layer % every}"] if every > 1 else blocks
        return jax.tree.map(lambda x: x[layer // every], block)

    params = drawn_params(scanned)
    layers = {i: layer_of(params["blocks"], i) for i in range(_MOE.num_layers)}

    (loss, aux), grads = _loss_and_grad(scanned, _tokens())
    apart = params | {"blocks": layers}
    (other_loss, other_aux), others = _loss_and_grad(plain, _tokens(), apart)

    np.testing.assert_allclose(loss, other_loss, rtol=1e-6)
    np.testing.assert_allclose(aux["expert_load"], other_aux["expert_load"], rtol=1e-6)
    for layer in layers:
        grad = layer_of(grads["blocks"], layer)
        other = others["blocks"][layer]
        assert_all_close(grad, other, rtol=1e-3, atol=1e-6)
        assert ("moe" in other) == scanned.has_experts(layer)


def test_a_model_without_experts_is_the_dense_one_bit_for_bit():
    shapes = jax.tree.map(jnp.shape, drawn_params(_DENSE))
    assert "moe" not in shapes["blocks"]

    text = jax.make_jaxpr(models.make_loss_fn(_DENSE))(
        drawn_params(_DENSE), _tokens(), _KEY
    )

    other = dataclasses.replace(_DENSE, balance_loss=0.5, experts_per_token=1)
    same = jax.make_jaxpr(models.make_loss_fn(other))(
        drawn_params(_DENSE), _tokens(), _KEY
    )

    assert str(text) == str(same)


def test_router_losses_equal_the_formulas_of_their_papers():
    config = dataclasses.replace(
        _MOE, num_layers=1, balance_loss=0.3, scan_layers=False
    )
    rng = np.random.default_rng(3)
    x = rng.normal(size=(11, 16)).astype(np.float32)
    router = rng.normal(size=(16, 4)).astype(np.float32)
    params = drawn_params(config)
    params["blocks"][0]["moe"]["router"] = router

    _, routed = bind(config, params).blocks[0].moe(jnp.asarray(x[None]))

    logits = x.astype(float) @ router
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    best = np.argsort(-probs, -1)[:, :2]
    share = np.bincount(best.reshape(-1), minlength=4) / 22
    np.testing.assert_allclose(routed.balance, 4 * (share * probs.mean(0)).sum(), 1e-5)

    z = (np.log(np.exp(logits).sum(-1)) ** 2).mean()
    np.testing.assert_allclose(routed.z, z, rtol=1e-5)

    entropy = -(probs * np.log(probs)).sum(-1).mean()
    np.testing.assert_allclose(routed.entropy, entropy, rtol=1e-5)

    np.testing.assert_allclose(routed.load, 2 * share, rtol=1e-6)


def test_router_losses_change_gradients_and_not_the_loss():
    one = dataclasses.replace(_MOE, num_layers=1, scan_layers=False)
    heavy = dataclasses.replace(one, balance_loss=1.0, router_z_loss=1.0)
    light = dataclasses.replace(one, balance_loss=0.0, router_z_loss=0.0)

    (loss, _), grads = _loss_and_grad(heavy, _tokens())
    (same, _), others = _loss_and_grad(light, _tokens())
    assert loss == same

    routers = [x["blocks"][0]["moe"]["router"] for x in (grads, others)]
    assert np.abs(routers[0] - routers[1]).max() > 1e-3


def test_counts_add_up_the_batches_that_experts_were_given():
    optimizer = experts.counting(optax.adamw(1e-2, weight_decay=0.5))
    params = drawn_params(_MOE)
    steps = 3
    state = optimizer.init(params)
    total = np.zeros((2, 4))

    @jax.jit
    def step(params, state, tokens):
        gradient = jax.grad(models.make_loss_fn(_MOE), has_aux=True)
        grads, aux = gradient(params, tokens, _KEY)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, aux["expert_load"]

    for seed in range(steps):
        params, state, load = step(params, state, _tokens(seed=seed))
        total += load

    counts = params["blocks"]["moe"]["experts"]["tokens"] / TOKEN_UNIT
    np.testing.assert_allclose(counts, total, rtol=1e-6)
    np.testing.assert_allclose(counts.sum(-1), 2 * steps, rtol=1e-6)

    # The optimizer saw no counts: their moments are zero.
    moments = [
        x
        for path, x in jax.tree_util.tree_leaves_with_path(state)
        if path[-1] == jax.tree_util.DictKey("tokens")
    ]
    assert moments
    assert not any(np.any(x) for x in moments)


_CROWDED = dataclasses.replace(_MOE, shared_experts=1, balance_loss=0.5)
_SHARES = {
    "data, model": {"data": 2, "model": 2},
    "data, model, sequence": {"data": 2, "model": 2, "sequence": 2},
    "data, model, expert": {"data": 2, "model": 2, "expert": 2},
    "expert, sequence": {"data": 1, "model": 1, "expert": 4, "sequence": 2},
}


def _crowded_params():
    """Draw parameters by which all tokens want the same two experts: rounds follow."""
    params = jax.tree.map(np.copy, drawn_params(_CROWDED))
    params["embedding"][:, 0] = 4  # A feature that all tokens have.
    router = params["blocks"]["moe"]["router"]
    router *= 0.1
    router[:, 0] = [1, 0.9, 0, 0]
    return params


@pytest.fixture(scope="module")
def on_one_device():
    """Loss, its auxiliary values, and gradients of the crowded mixture."""
    return _loss_and_grad(_CROWDED, _tokens(16, 17), _crowded_params())


@pytest.mark.parametrize(
    ("dispatch", "shares"),
    mostly_slow(
        itertools.product(["ragged", "blocks"], _SHARES),
        quick=[
            ("ragged", "data, model, expert"),
            ("blocks", "expert, sequence"),
        ],
    ),
)
def test_devices_that_share_a_region_compute_the_same(dispatch, shares, on_one_device):
    (loss, aux), grads = on_one_device

    config = dataclasses.replace(_CROWDED, expert_dispatch=dispatch)
    axes = _SHARES[shares]
    mesh = make_mesh(1, devices=jax.devices()[: math.prod(axes.values())], **axes)
    names = {name: name for name in ("sequence", "expert") if name in axes}
    divided = models.make_divided_loss_fn(config, models.Layout(**names))

    with jax.set_mesh(mesh):
        divided_grad = jax.jit(jax.value_and_grad(divided, has_aux=True))
        (other, other_aux), others = divided_grad(
            _crowded_params(), _tokens(16, 17), _KEY
        )

    np.testing.assert_allclose(loss, other, rtol=1e-5)
    np.testing.assert_array_equal(aux["expert_load"], [[1, 1, 0, 0]] * 2)
    assert_all_close(aux, other_aux, rtol=1e-5)
    assert_all_close(grads, others, rtol=2e-3, atol=1e-6)


def test_tokens_cross_to_their_experts_and_back_and_experts_are_not_gathered():
    config = dataclasses.replace(_MOE, num_layers=1, scan_layers=False)
    mesh = make_mesh(1, data=2, devices=jax.devices()[:4], expert=2)
    divided = models.make_divided_loss_fn(config, models.Layout(expert="expert"))
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(jax.grad(divided, has_aux=True))(
            drawn_params(config), _tokens(), _KEY
        )

    text = str(jaxpr)

    # Rows, their experts, and back; the cotangents of rows; a round takes all.
    crossed = re.findall(r":(\w+\[[\d,]+\]) = all_to_all\[", text)
    room = dispatching.rows_of_a_round(1 * 8 * 2, 2)
    rows = f"f32[{2 * room},16]"
    ids = f"i32[{2 * room}]"
    assert sorted(crossed) == [rows] * 4 + [ids]

    # Two experts of each device, replicated over data.
    gathered = re.findall(r":(\w+\[[\d,]+\]) = all_gather\[\s*all_gather_dim", text)
    assert gathered.count("f32[2,16,12]") == 2
    assert not any(shape.startswith("f32[4,") for shape in gathered)


def test_only_the_experts_of_a_token_are_counted_as_work():
    dense = dataclasses.replace(_DENSE, mlp_width=24)
    same = dataclasses.replace(_MOE, experts_per_token=2, expert_width=12)
    adapted = dataclasses.replace(same, lora_rank=2, lora_targets="query")

    trained, frozen = (models.flops_per_token(x, 8) for x in (same, adapted))

    assert 0.6 < frozen / trained < 1

    extra = trained - models.flops_per_token(dense, 8)
    # A router's matrix, and the counts.
    assert extra == 6 * 2 * (16 * 4 + 4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_experts": 1}, "num_experts=1 must be at least 2, or 0"),
        ({"num_experts": 0}, "expert_width=12 has no meaning with num_experts=0"),
        ({"experts_per_token": 5}, "experts_per_token=5 .* at most num_experts=4"),
        ({"expert_width": 0}, "expert_width=0 is not a size.*= 12"),
        ({"shared_experts": -1}, "shared_experts=-1 must be at least 0"),
        ({"moe_every": 3}, r"moe_every=3 does not divide num_layers=2; use one of \[1"),
        ({"balance_loss": -1.0}, "balance_loss=-1.0 must be at least 0"),
        ({"lora_rank": 2}, "lora_targets=.* has down, and experts have no adapters"),
    ],
)
def test_mixtures_that_make_no_model_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(_MOE, **changed)


def test_a_pipeline_of_experts_is_refused():
    with pytest.raises(ValueError, match="num_experts=4 is not possible in a pipeline"):
        models.make_pipelined_loss_fn(_MOE, 2, 2)


def test_half_precision_stays_near_the_full_one():
    tokens = _tokens()
    half = dataclasses.replace(_MOE, compute_dtype="bfloat16")
    logits = jax.jit(functools.partial(models.apply, _MOE))(drawn_params(_MOE), tokens)
    other = jax.jit(functools.partial(models.apply, half))(drawn_params(_MOE), tokens)
    # Eight bits, and a token may change its second expert.
    assert np.abs(logits - other).mean() < 0.02
