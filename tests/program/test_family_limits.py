"""The ladder of the family: each method collapses to a simpler one at a limit.

To a few roundings of float32: two methods are two programs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sharding.mesh import make_mesh
from cocodc_jax.sync.regions import Regions
from cocodc_jax.transforms.mt_adam import mt_adam
from tests.numerics import assert_within_ulps

LR, NUM_STEPS = 0.1, 12
SHAPES = {"a": (2, 2), "b": (3,), "c": (2,)}
RNG = np.random.default_rng(0)
ROOT = RNG.normal(size=(9, 9)) / 3
HESSIAN = ROOT @ ROOT.T + 0.3 * np.eye(9)
PARAMS = {n: RNG.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}
TARGETS = RNG.normal(size=(4, 9)) + RNG.normal(size=(NUM_STEPS, 4, 9)) / 4
TARGETS = TARGETS.astype(np.float32)
OUTER = {"outer_lr": 0.4, "outer_momentum": 0.9}


def join(params):
    return jnp.concatenate([params[n].reshape(-1) for n in SHAPES])


def square(params, target, key):
    gap = join(params) - target
    return gap @ jnp.asarray(HESSIAN, gap.dtype) @ gap / 2, {}


def slope(params, target, key):
    """The same gradient, `target`, wherever the parameters are."""
    return join(params) @ target, {}


def train(method, num_regions=4, optimizer=None, loss=square, targets=TARGETS, **more):
    """The regions' parameters and the outer ones, after all the steps."""
    program = RegionProgram(
        loss,
        optax.sgd(LR) if optimizer is None else optimizer,
        method,
        PARAMS,
        more.pop("regions", num_regions),
        mesh=make_mesh(num_regions),
        **more,
    )
    state = program.init(PARAMS, jax.random.key(0))
    for step in range(len(targets)):  # One length of a scan is compiled, whatever H.
        state, _ = program.advance(state, targets[step : step + 1, :num_regions])
    return jax.device_get((state.region.params, program.outer_params(state)))


@functools.cache
def trained(name, num_regions=4, **options):
    return train(methods.get(name, **options), num_regions)


def diloco(num_regions=4, **options):
    return trained("diloco", num_regions, sync_interval=4, **(OUTER | options))


def test_the_comparison_can_fail():
    with pytest.raises(AssertionError):
        assert_within_ulps(diloco(), diloco(outer_lr=1.0, outer_momentum=0.0))


# --- One region ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("snoo", {}),
        ("eager", {}),
        ("diloco_demo", {"compress": "none"}),
        ("delayed_nesterov", {"arrivals_per_momentum": 1}),
    ],
)
def test_of_one_region_it_is_diloco(name, options):
    """Nesterov's step by its own pseudo-gradient: nothing is stale, or left out."""
    method = methods.get(name, sync_interval=4, **OUTER, **options)
    assert_within_ulps(train(method, 1), diloco(1))


UNEQUAL = Regions((1.0, 1.5, 1.0, 2.0), (1,) * 4)


def test_heloco_that_keeps_what_comes_is_look_ahead():
    options = {"sync_interval": 3, "outer_lr": 0.3, "outer_momentum": 0.8}
    method = methods.get("heloco", keep_cosine=-1.0, **options)
    assert_within_ulps(
        train(method, regions=UNEQUAL),
        train(methods.get("mla", **options), regions=UNEQUAL),
    )


def test_look_ahead_without_momentum_is_plain_asynchronous_sgd():
    options = {"sync_interval": 3, "outer_lr": 0.3, "outer_momentum": 0.0}
    plain = methods.get("delayed_nesterov", arrivals_per_momentum=1, **options)
    assert_within_ulps(
        train(methods.get("mla", **options), regions=UNEQUAL),
        train(plain, regions=UNEQUAL),
    )


def test_lion_of_one_region_is_lion():
    """No gradient is exactly zero, which Lion does not move by and one bit cannot."""
    sent = train(methods.get("distributed_lion"), 1)
    lion = optax.lion(LR, 0.9, 0.99, weight_decay=0.0)
    assert_within_ulps(sent, train(methods.get("data_parallel"), 1, lion))


def test_admm_of_one_region_is_training():
    assert_within_ulps(trained("lt_admm", 1)[0], trained("apart", 1)[0])


# --- No compression -----------------------------------------------------------


@pytest.mark.parametrize("name", ["sparseloco", "qsparse"])
def test_uncompressed_local_training_is_averaging(name):
    method = methods.get(name, sync_interval=4, outer_lr=1.0, compress="none")
    expected = diloco(outer_lr=1.0, outer_momentum=0.0)
    assert_within_ulps(train(method), expected)
    # All are equal after a sync, so also: their mean is what they came to.
    local, outer = expected
    assert_within_ulps(local, jax.tree.map(lambda x: np.stack([x] * 4), outer))


def test_senders_of_everything_are_all():
    """Of every entry from every region, and of one region alone."""
    options = {"sync_interval": 4, "compress": "ef:0.9+topk:1"}
    senders, everyone = (
        trained("sparseloco", sparse_mean=mean, **options)
        for mean in ("senders", "all")
    )
    assert_within_ulps(senders, everyone)
    options["compress"] = "ef:0.9+topk:0.3+stat2"
    senders, everyone = (
        trained("sparseloco", 1, sparse_mean=mean, **options)
        for mean in ("senders", "all")
    )
    assert_within_ulps(senders, everyone)


def test_uncompressed_muloco_is_diloco():
    method = methods.get("muloco", sync_interval=4, compress="none", **OUTER)
    assert_within_ulps(train(method), diloco())


def test_masks_of_everything_are_plain_averaging():
    """Whatever the core: what it leaves is all sent."""
    method = methods.get("masked_core", sync_interval=4, mask_density=1.0, rank=1)
    assert_within_ulps(train(method), diloco(outer_lr=1.0, outer_momentum=0.0))


def test_plain_averaging_by_hand():
    x = np.concatenate([PARAMS[n].ravel() for n in SHAPES]).astype(float)
    for t in range(0, NUM_STEPS, 4):
        each = [x] * 4
        for targets in TARGETS[t : t + 4]:
            each = [
                y - LR * HESSIAN @ (y - u) for y, u in zip(each, targets, strict=True)
            ]
        x = np.mean(each, axis=0)
    _, outer = diloco(outer_lr=1.0, outer_momentum=0.0)
    assert_within_ulps(np.concatenate([outer[n].ravel() for n in SHAPES]), x)


def test_compressed_with_nothing_is_the_method():
    assert_within_ulps(diloco(compress="none"), diloco())


@pytest.mark.parametrize(
    "compress", ["none", "threshold(1.0, every=1)", "ef:0.9+dct:16"]
)
def test_gradients_compressed_with_nothing_are_data_parallel(compress):
    """Also where everything is sent by other means: all values, all coefficients."""
    sent = trained("data_parallel", compress=compress)
    assert_within_ulps(sent, trained("data_parallel"))


def test_demo_of_everything_is_the_sign_of_the_mean_gradient():
    method = methods.get("demo", momentum_decay=0.0, compress="dct:16")
    _, outer = train(method)
    x = np.concatenate([PARAMS[n].ravel() for n in SHAPES]).astype(float)
    for targets in TARGETS:
        x = x - LR * np.sign(HESSIAN @ (x - targets.mean(0)))
    assert_within_ulps(np.concatenate([outer[n].ravel() for n in SHAPES]), x)


# --- No delay, nobody late ----------------------------------------------------


def test_nobody_late_decoupled_is_streaming():
    options = {"sync_interval": 4, "num_fragments": 2, **OUTER}
    expected = trained("streaming_diloco", delay_steps=1, **options)
    options |= {"averaging": "mean", "fragment_strategy": "strided"}
    decoupled = trained("decoupled_diloco", delay_steps=1, **options)
    assert_within_ulps(decoupled, expected)
    answers = {"answer_steps": "1,0,1,1", "quorum": 4}
    assert_within_ulps(trained("decoupled_diloco", **answers, **options), expected)


def test_lengths_and_directions_of_one_region_are_its_own():
    options = {"sync_interval": 4, "num_fragments": 2, "delay_steps": 1, **OUTER}
    method = methods.get("decoupled_diloco", fragment_strategy="strided", **options)
    expected = train(methods.get("streaming_diloco", **options), 1)
    assert_within_ulps(train(method, 1), expected)


def test_loscar_of_every_coordinate_is_plain_averaging_replayed():
    """The mask of all is a permutation there and back."""
    options = {"sync_interval": 4, "delay_steps": 3}
    plain = {"num_fragments": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    expected = trained("streaming_diloco", merge_rule="replay", **plain, **options)
    assert_within_ulps(trained("loscar", mask_density=1.0, **options), expected)


def test_the_replay_without_delay_is_diloco_by_fragments():
    options = {"sync_interval": 4, "num_fragments": 2, "delay_steps": 0, **OUTER}
    expected = trained("streaming_diloco", mixing_alpha=0.0, **options)
    assert_within_ulps(
        trained("streaming_diloco", merge_rule="replay", **options), expected
    )


def test_apart_is_diloco_before_its_first_sync():
    local, mean = trained("apart")
    expected, _ = trained("diloco", sync_interval=NUM_STEPS + 1)
    assert_within_ulps(local, expected)
    assert_within_ulps(mean, jax.tree.map(lambda x: x.mean(0), expected))


def test_co2_without_momentum_is_averaging_one_round_late():
    """Of one constant gradient a region; the first of three rounds applies nothing."""
    slopes = np.broadcast_to(TARGETS[:1], TARGETS.shape)
    method = methods.get("co2", sync_interval=4, outer_momentum=0.0, momentum_clip=1e9)
    _, outer = train(method, loss=slope, targets=slopes)
    moved = 2 * 4 * LR * TARGETS[0].mean(0)
    start = np.concatenate([PARAMS[n].ravel() for n in SHAPES])
    assert_within_ulps(
        np.concatenate([outer[n].ravel() for n in SHAPES]), start - moved
    )


def test_moments_that_are_never_averaged_are_plain_averaging():
    method = methods.get("des_loc", sync_interval=4, sync_moments="0,0")
    assert_within_ulps(train(method), diloco(outer_lr=1.0, outer_momentum=0.0))


@pytest.mark.parametrize("name", ["des_loc", "mt_dao"])
def test_moments_of_regions_that_see_the_same_are_one_region_s(name):
    """Averaging what is alike changes nothing; a slow momentum of weight 0 neither."""
    same = np.repeat(TARGETS[:, :1], 4, axis=1)
    inner = {
        "des_loc": optax.adamw(LR, 0.9, 0.99),
        "mt_dao": mt_adam(LR, (0.9, 0.999), (1.0, 0.0), 0.99),
    }
    method = methods.get(name, sync_interval=2, sync_moments="1,2")
    local, outer = train(method, optimizer=inner[name], targets=same)
    alone, _ = train(methods.get("apart"), 1, inner["des_loc"])
    assert_within_ulps(outer, jax.tree.map(lambda x: x[0], alone), 100)


# --- Two that are everyone ----------------------------------------------------


def test_a_pair_that_is_everyone_needs_no_pairs():
    noloco = methods.get("noloco", sync_interval=4)
    everyone = dataclasses.replace(noloco.sync.outer, group="all")
    expected = train(noloco.with_sync(outer=everyone), 2)
    assert_within_ulps(train(noloco, 2), expected)
    # Two that begin alike and get the same mean stay alike.
    local, _ = expected
    assert max(np.ptp(x, axis=0).max() for x in local.values()) < 1e-6


def test_a_ring_of_three_is_complete():
    ring, complete = (
        trained("lt_admm", 3, sync_interval=2, admm_penalty=0.5, graph=graph)
        for graph in ("ring", "complete")
    )
    assert_within_ulps(ring, complete)
    apart, _ = trained("apart", 3)
    with pytest.raises(AssertionError):
        assert_within_ulps(ring[0], apart, 1e5)


# --- How much regions count ---------------------------------------------------


def test_alike_regions_weigh_alike():
    assert_within_ulps(diloco(region_weights="tokens"), diloco())


def test_a_region_of_twice_the_batch_counts_twice():
    """Of one constant gradient a region, averaged once over 12 steps."""
    slopes = np.broadcast_to(TARGETS[:1], TARGETS.shape)
    method = methods.get(
        "diloco", sync_interval=12, outer_lr=1.0, outer_momentum=0.0,
        region_weights="tokens",
    )  # fmt: skip
    regions = Regions((1.0, 2.0, 1.0, 1.0), (2, 2, 1, 1))
    _, outer = train(method, loss=slope, targets=slopes, regions=regions)
    # Steps 12, 6, 12, 12; sequences 24, 12, 12, 12.
    moved = LR * np.average(
        TARGETS[0] * [[12], [6], [12], [12]], axis=0, weights=[24, 12, 12, 12]
    )
    start = np.concatenate([PARAMS[n].ravel() for n in SHAPES])
    assert_within_ulps(
        np.concatenate([outer[n].ravel() for n in SHAPES]), start - moved
    )
