"""Mixtures of experts in a sync: how they are cut, averaged and ranked."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cocodc_jax as cc
from cocodc_jax import methods, models
from cocodc_jax.core.sync import gap
from cocodc_jax.expert_leaves import TOKEN_UNIT, expert_axis
from cocodc_jax.sync.cutting import cut
from cocodc_jax.sync.expert_mean import ExpertMean
from cocodc_jax.sync.schedules import adaptive
from cocodc_jax.transforms.quantize import int4
from tests.numerics import assert_all_close, assert_within_ulps
from tests.program import mixture
from tests.program.mixture import MODEL, USER_INPUTS, drawn_params
from tests.program.tiny import follow

_MODEL = dataclasses.replace(MODEL, scan_layers=False)
_KEY = jax.random.key(0)


def _params(scan_layers):
    return drawn_params(MODEL if scan_layers else _MODEL)


@pytest.fixture(params=[(True, 4), pytest.param((False, 5), marks=pytest.mark.slow)])
def params_and_fragments(request):
    scan_layers, num_fragments = request.param
    params = _params(scan_layers)
    return params, cut(params, num_fragments, "experts")


def _parts(params, fragments, lead=0):
    num_fragments = len(fragments.slices)
    return [fragments.take(params, k, lead=lead) for k in range(num_fragments)]


def test_experts_are_cut_into_ranges_and_the_rest_is_dense(params_and_fragments):
    parts = _parts(*params_and_fragments)

    held = [{expert_axis(path) is not None for path in part} for part in parts]
    num_dense = held.index({True})
    assert held == [{False}] * num_dense + [{True}] * (len(parts) - num_dense)
    assert any("router" in path for part in parts[:num_dense] for path in part)


def test_every_number_is_in_one_fragment_and_counted_in_bytes(params_and_fragments):
    params, fragments = params_and_fragments
    parts = _parts(params, fragments)

    sizes = [sum(x.size for x in part.values()) for part in parts]
    assert sum(sizes) == sum(x.size for x in jax.tree.leaves(params))
    assert fragments.num_bytes == tuple(4 * size for size in sizes)
    jax.tree.map(np.testing.assert_array_equal, fragments.join(parts), params)


@pytest.mark.parametrize("shares_experts", [False, True])
def test_putting_every_fragment_replaces_the_whole_model(
    params_and_fragments, shares_experts
):
    params, fragments = params_and_fragments
    fragments = dataclasses.replace(fragments, shares_experts=shares_experts)

    changed = params
    for k, part in enumerate(_parts(params, fragments)):
        changed = fragments.put(changed, k, jax.tree.map(jnp.negative, part))

    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, -y), changed, params)


def test_fragments_are_taken_of_all_regions(params_and_fragments):
    params, fragments = params_and_fragments
    regions = jax.tree.map(lambda x: jnp.stack([x, x + 1]), params)

    of_regions = _parts(regions, fragments, lead=1)

    second = [{path: x[1] for path, x in part.items()} for part in of_regions]
    assert_all_close(second, jax.tree.map(lambda x: x + 1, _parts(params, fragments)))


@pytest.mark.parametrize("scan_layers", [True, False])
def test_routers_are_a_fragment(scan_layers):
    params = _params(scan_layers)
    fragments = cut(params, 2, "routers")
    rest, routers = (fragments.take(params, k) for k in range(2))
    assert sum(x.size for x in routers.values()) == 2 * 8 * 4  # Layers, D, E.
    assert all(path.endswith("moe/router") for path in routers)
    assert not any("router" in path for path in rest)
    total = sum(x.size for x in jax.tree.leaves(params))
    assert sum(fragments.num_params) == total


def _trained(num_steps, **options):
    """Parameters of both regions of a tiny mixture, and the outer ones."""
    method = methods.get("diloco", sync_interval=4, **options)
    program = cc.RegionProgram(
        mixture.loss_fn,
        mixture.OPTIMIZER,
        method,
        mixture.make_params(),
        2,
        mesh=cc.make_mesh(2),
    )
    state, _ = mixture.finish(program, mixture.start(program), num_steps)

    return jax.device_get((state.region.params, program.outer_params(state)))


def test_routers_that_sync_with_everything_are_diloco():
    assert_within_ulps(_trained(8, router_interval=4), _trained(8))


def test_routers_sync_at_their_own_interval():
    """At 2 of 4, before anything else has; without a warning of uneven fragments."""
    local, _ = _trained(2, router_interval=2)
    are_equal = jax.tree.map(lambda x: bool((x[0] == x[1]).all()), local)
    moe = are_equal["blocks"]["moe"]
    assert moe.pop("router")
    assert not moe["experts"]["up"]
    assert not are_equal["embedding"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cut({"w": jnp.zeros(2)}, 2, "routers"), "parameters have no router"),
        (lambda: cut(_params(True), 3, "routers"), "num_fragments=3 .* use 2"),
        (lambda: methods.get("diloco", router_interval=0),
         "router_interval=0 must be at least 1"),
        (lambda: cut({"w": jnp.ones(3)}, 2, "experts"), "needs a model with experts"),
        (lambda: cut(_params(True), 1, "experts"), "num_fragments=1 .* use 2 to"),
        (lambda: cut(_params(True), 99, "experts"), "and 4 experts; use 2 to 8"),
        (lambda: methods.get("apart", expert_weights="tokens"),
         "expert_weights='tokens' has no meaning for method='apart': it takes no"),
        (lambda: methods.get("noloco", expert_weights="tokens"),
         "ExpertMean makes one pseudo-gradient of all"),
        (lambda: methods.get("sparseloco", expert_weights="tokens"),
         "do not have every entry, nor every count"),
        (lambda: methods.get("loscar", expert_weights="tokens"),
         "its mean is not of pseudo-gradients"),
        (lambda: methods.get("dilocox", sum_factors=True, expert_weights="tokens"),
         "what it keeps would be of updates times tokens"),
        (lambda: methods.get("diloco", expert_weights="tokens").compressed(int4()),
         "its mean is by tokens already; compress first"),
    ],
)  # fmt: skip
def test_options_of_experts_are_refused_without_experts(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def _drawn(num_regions, shape=(2, 3)):
    """Pseudo-gradients of regions with counts; no region trained expert [0, 1]."""
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 5, (num_regions, *shape)).astype(float)
    counts[:, 0, 1] = 0
    counts[0, 1, 2] = 3
    counts[1:, 1, 2] = 0
    weights = rng.normal(size=(num_regions, *shape, 4, 5))
    other = rng.normal(size=(num_regions, 7))

    parts = [
        {
            "blocks/moe/experts/tokens": jnp.array(-TOKEN_UNIT * c, jnp.float32),
            "blocks/moe/experts/up": jnp.array(w, jnp.float32),
            "blocks/moe/router": jnp.array(o, jnp.float32),
        }
        for c, w, o in zip(counts, weights, other, strict=True)
    ]

    return parts, counts, weights, other


def test_experts_are_weighed_by_their_tokens():
    parts, counts, weights, other = _drawn(3)
    of_regions = np.array([0.5, 0.3, 0.2])
    average = ExpertMean()
    sent = [average.before(part, None) for part in parts]
    mean = jax.tree.map(
        lambda *xs: sum(w * x for w, x in zip(of_regions, xs, strict=True)), *sent
    )
    experts_mean = average.after(mean, parts[0], None)

    share = of_regions[:, None, None] * counts
    total = share.sum(0)
    wanted = np.einsum("mle,mledf->ledf", share, weights)
    wanted = wanted / np.where(total, total, 1)[..., None, None]

    tokens = experts_mean.pop("blocks/moe/experts/tokens")
    np.testing.assert_allclose(tokens, -TOKEN_UNIT * total, rtol=1e-6)
    expected = {
        "blocks/moe/router": of_regions @ other,
        "blocks/moe/experts/up": wanted,
    }
    assert_all_close(experts_mean, expected, rtol=1e-5, atol=1e-6)
    assert not wanted[0, 1].any()  # No region trained it.
    np.testing.assert_allclose(wanted[1, 2], weights[0, 1, 2])  # One region did.


def test_a_compressed_message_has_exact_counts():
    parts, *_ = _drawn(2)
    method = methods.get("diloco", compress="ef+int4", expert_weights="tokens")
    message = method.sync.message
    plain = methods.get("diloco", compress="ef+int4").sync.message
    path = "blocks/moe/experts/tokens"
    without = {name: x for name, x in parts[0].items() if name != path}
    assert message.num_bytes(parts[0], 2) == plain.num_bytes(without, 2) + 4 * 6

    memory = message.init(parts[0])
    sent, memory = message.by.encode(message.average.before(parts[0], None), memory)

    assert path not in memory.residual

    arrived = message.by.decode(sent)
    np.testing.assert_array_equal(arrived[path], parts[0][path])

    # The rest is of the update, whatever the number of tokens.
    name = "blocks/moe/experts/up"
    counts = -parts[0][path][..., None, None] / TOKEN_UNIT
    left = counts * (parts[0][name] - memory.residual[name])
    np.testing.assert_allclose(arrived[name], left, rtol=1e-4, atol=1e-5)


def _tokens(num_steps):
    """One token a region: all positions of a region are the same to a router."""
    tokens = np.full((num_steps, 2, 2, 7), 3)
    tokens[:, 1] = 8
    return tokens.astype(np.int32)


def _program(method):
    return cc.RegionProgram(
        models.make_loss_fn(_MODEL),
        models.experts.counting(optax.adamw(1e-2, weight_decay=0.5)),
        method,
        _params(False),
        2,
        user_inputs=USER_INPUTS,
    )


def _advanced(program, num_steps):
    state = program.init(_params(False), _KEY)
    return follow(program, state, _tokens(num_steps), num_steps)[0]


def test_a_run_takes_the_means_of_regions_by_tokens():
    alone = _advanced(_program(methods.get("apart")), 3).region.params
    method = methods.get(
        "diloco",
        sync_interval=3,
        outer_lr=1.0,
        outer_momentum=0.0,
        expert_weights="tokens",
    )
    program = _program(method)
    state = _advanced(program, 3)

    for layer in range(2):
        experts = alone["blocks"][layer]["moe"]["experts"]
        counts = np.asarray(experts["tokens"], float)
        assert (counts == 0).any(0).any()  # An expert that a region did not use.
        np.testing.assert_allclose(counts.sum(1), 2 * 3 * TOKEN_UNIT, rtol=1e-6)

        old = _params(False)["blocks"][layer]["moe"]["experts"]
        new = state.region.params["blocks"][layer]["moe"]["experts"]

        for name in ("gate", "up", "down"):
            change = np.asarray(experts[name], float) - np.asarray(old[name])
            total = np.where(counts.sum(0) > 0, counts.sum(0), 1)
            wanted = np.asarray(old[name]) + np.einsum(
                "me,mexy->exy", counts / total, change
            )
            np.testing.assert_allclose(new[name][0], wanted, atol=1e-6)
            np.testing.assert_array_equal(new[name][0], new[name][1])
        assert not np.any(new["tokens"])
    # Everything is in the message, counts among it.
    assert state.bytes_sent == 4 * sum(x.size for x in jax.tree.leaves(_params(False)))


def test_a_mix_keeps_the_share_of_counts_that_it_keeps_of_progress():
    method = methods.get(
        "streaming_diloco",
        sync_interval=2,
        num_fragments=2,
        delay_steps=0,
        mixing_alpha=0.25,
        fragment_strategy="experts",
    )

    state = _advanced(_program(method), 2)

    counts = state.region.params["blocks"][0]["moe"]["experts"]["tokens"]
    # Merged after one step; two experts a token, before and after.
    np.testing.assert_allclose(counts.sum(1) / TOKEN_UNIT, 0.25 * 2 + 2, rtol=1e-6)


def test_tokens_behind_a_gap_are_counted_over_regions():
    part = {
        "blocks/0/moe/experts/tokens": jnp.zeros(2),
        "blocks/0/moe/experts/up": jnp.zeros((2, 3, 1)),
    }
    local = {name: jnp.stack([x, x]) for name, x in part.items()}
    counts = TOKEN_UNIT * jnp.array([[1.0, 3.0], [5.0, 7.0]])
    local["blocks/0/moe/experts/tokens"] = counts
    is_count = USER_INPUTS.token_counts
    assert gap("tokens", part, local, 2, is_count) == 4.0
    assert gap("tokens", part, local, 2) == -1.0  # No leaf is one by its name.

    dense = {"norm": jnp.zeros(3)}
    assert gap("tokens", dense, {"norm": jnp.zeros((1, 3))}, 2, is_count) == -0.5


def test_the_load_score_prefers_fragments_that_more_tokens_used():
    schedule = adaptive(16, 4, 0, 8, "load")
    age = np.array([6, 6, 4, 2])
    state = dataclasses.replace(
        schedule.init(),
        last_start=tuple(10 - age),
        norm=(1.0,) * 4,
        observed_interval=(8,) * 4,
    )

    # Fragment 0 is dense; of the others the counted tokens stand in for the age.
    tokens = {"tokens": [-1.0, 1.5, 7.0, 0.1]}
    scores = schedule.scores(np, state, (4,) * 4, 10, tokens.__getitem__)
    np.testing.assert_allclose(scores, 1 / 2 * np.array([6, 1.5, 7, 0.1]) / 8)
    assert schedule.needs == {"tokens", "norm"}


def test_a_run_by_load_serves_every_fragment_within_an_interval():
    method = methods.get(
        "cocodc",
        sync_interval=6,
        num_fragments=3,
        delay_steps=1,
        syncs_per_interval=6,
        transmission_score="load",
        fragment_strategy="experts",
        expert_weights="tokens",
    )

    state = _advanced(_program(method), 14)

    assert min(state.sync.schedule.last_start) >= 14 - 6
    assert state.region.params["norm"]["scale"].shape == (2, 8)


def test_experts_in_a_fragment_without_their_counts_are_named():
    part = {"moe/experts/up": jnp.ones((2, 3))}
    why = "needs 'moe/experts/tokens' in the fragment of 'moe/experts/up'"
    with pytest.raises(ValueError, match=why):
        ExpertMean().before(part, None)
