"""The ladder: each method collapses to a simpler one at a limit."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.sync.regions import Regions
from cocodc_jax.transforms.mt_adam import mt_adam
from tests.numerics import assert_within_ulps
from tests.program import quadratic
from tests.program.quadratic import LR, OUTER, PARAMS, TARGETS, case, join, trained
from tests.slow import mostly_slow

PARALLEL = case("data_parallel")
DILOCO = case("diloco", sync_interval=4, **OUTER)
AVERAGING = case("diloco", sync_interval=4, outer_lr=1.0, outer_momentum=0.0)
FRAGMENTS = {"sync_interval": 4, "num_fragments": 2, **OUTER}
STREAMING = case("streaming_diloco", delay_steps=1, **FRAGMENTS)
DECOUPLED = {**FRAGMENTS, "fragment_strategy": "strided"}
LOSCAR = {"sync_interval": 4, "delay_steps": 3}
ALONE = {"sync_interval": 4, **OUTER}
SPARSE = {"sync_interval": 4, "compress": "ef:0.9+topk:1"}
SPARSER = {"sync_interval": 4, "compress": "ef:0.9+topk:0.3+stat2"}
ASYNC = {"sync_interval": 3, "outer_lr": 0.3}
RING = case("lt_admm", sync_interval=2, admm_penalty=0.5, graph="ring")
UNEQUAL = Regions((1.0, 1.5, 1.0, 2.0), (1,) * 4)

# A method, a simpler one that it must equal, and the number of regions.
LIMITS = {
    # --- One region: nothing is stale ---
    "snoo": (case("snoo", **ALONE), DILOCO, 1),
    "gpa that averages nothing": (
        case("gpa", eval_interpolation=0.0), case("apart"), 1
    ),
    "eager": (case("eager", **ALONE), DILOCO, 1),
    "diloco_demo": (case("diloco_demo", compress="none", **ALONE), DILOCO, 1),
    "delayed_nesterov": (
        case("delayed_nesterov", arrivals_per_momentum=1, **ALONE), DILOCO, 1
    ),
    "lengths and directions": (
        case("decoupled_diloco", delay_steps=1, **DECOUPLED), STREAMING, 1
    ),
    "senders, alone": (
        case("sparseloco", sparse_mean="senders", **SPARSER),
        case("sparseloco", sparse_mean="all", **SPARSER), 1,
    ),
    # --- One at a time ---
    "heloco that keeps what comes": (
        case("heloco", keep_cosine=-1.0, outer_momentum=0.8, **ASYNC),
        case("mla", outer_momentum=0.8, **ASYNC), UNEQUAL,
    ),
    "look-ahead without momentum": (
        case("mla", outer_momentum=0.0, **ASYNC),
        case("delayed_nesterov", arrivals_per_momentum=1, outer_momentum=0.0, **ASYNC),
        UNEQUAL,
    ),
    # --- No compression, or everything sent by other means ---
    "sparseloco, nothing left out": (
        case("sparseloco", sync_interval=4, outer_lr=1.0, compress="none"), AVERAGING, 4
    ),
    "senders of everything": (
        case("sparseloco", sparse_mean="senders", **SPARSE),
        case("sparseloco", sparse_mean="all", **SPARSE), 4,
    ),
    "diloco, compressed with nothing": (
        case("diloco", compress="none", **ALONE), DILOCO, 4
    ),
    "gradients, compressed with nothing": (
        case("data_parallel", compress="none"), PARALLEL, 4
    ),
    "gradients, all values": (
        case("data_parallel", compress="threshold(1.0, every=1)"), PARALLEL, 4
    ),
    "gradients, all coefficients": (
        case("data_parallel", compress="ef:0.9+dct:16"), PARALLEL, 4
    ),
    # --- No delay ---
    "one fragment, no delay, replaced": (
        case("streaming_diloco", sync_interval=4, num_fragments=1, delay_steps=0,
           mixing_alpha=0.0, **OUTER), DILOCO, 4,
    ),
    "cocodc, one fragment, no delay": (
        case("cocodc", sync_interval=4, num_fragments=1, delay_steps=0,
           syncs_per_interval=1, **OUTER), DILOCO, 4,
    ),
    "diloco every step": (
        case("diloco", sync_interval=1, outer_lr=1.0, outer_momentum=0.0), PARALLEL, 4
    ),
    "decoupled, nobody asked": (
        case("decoupled_diloco", averaging="mean", delay_steps=1, **DECOUPLED),
        STREAMING, 4,
    ),
    "decoupled, nobody late": (
        case("decoupled_diloco", averaging="mean", answer_steps="1,0,1,1", quorum=4,
           **DECOUPLED), STREAMING, 4,
    ),
    "loscar of every coordinate": (
        case("loscar", mask_density=1.0, **LOSCAR),
        case("streaming_diloco", merge_rule="replay", num_fragments=1, outer_lr=1.0,
           outer_momentum=0.0, **LOSCAR), 4,
    ),
    "sparse averages of everything, at once": (
        case("async_sparta", sync_interval=4, mask_density=1.0, is_delayed=False),
        AVERAGING, 4,
    ),
    "the replay without delay": (
        case("streaming_diloco", merge_rule="replay", delay_steps=0, **FRAGMENTS),
        case("streaming_diloco", mixing_alpha=0.0, delay_steps=0, **FRAGMENTS), 4,
    ),
    "moments that are never averaged": (
        case("des_loc", sync_interval=4, sync_moments="0,0"), AVERAGING, 4
    ),
    # --- Everyone ---
    "a ring of three is complete": (
        RING, case("lt_admm", sync_interval=2, admm_penalty=0.5, graph="complete"), 3,
    ),
    "equal regions weigh the same": (
        case("diloco", region_weights="tokens", **ALONE), DILOCO, 4
    ),
}  # fmt: skip


# One of each kind; the others are slow, next to one of the same limit.
QUICK = (
    "gpa that averages nothing",
    "eager",
    "lengths and directions",
    "heloco that keeps what comes",
    "sparseloco, nothing left out",
    "gradients, all values",
    "one fragment, no delay, replaced",
    "diloco every step",
    "decoupled, nobody asked",
    "a ring of three is complete",
    "equal regions weigh the same",
)


@pytest.mark.parametrize("limit", mostly_slow(LIMITS, quick=QUICK))
def test_at_its_limit_a_method_is_a_simpler_one(limit):
    method, simpler, regions = LIMITS[limit]
    assert_within_ulps(trained(method, regions), trained(simpler, regions))


def train(method, targets=TARGETS, **options):
    return quadratic.run(quadratic.make(method, **options), targets)


def test_with_one_region_a_method_is_its_optimizer():
    """No gradient is exactly zero: Lion does not move by zero, one bit always moves."""
    lion = optax.lion(LR, 0.9, 0.99, weight_decay=0.0)
    parallel = train(methods.get("data_parallel"), regions=1, optimizer=lion)
    assert_within_ulps(trained(case("distributed_lion"), 1), parallel)
    assert_within_ulps(trained(case("lt_admm"), 1)[0], trained(case("apart"), 1)[0])


def test_gpa_with_equal_interpolations_is_nesterov():
    """Of the inner steps, times 1 - mu; and `snoo` with an outer step at each."""
    mu = 0.8
    averaged = methods.get("gpa", eval_interpolation=mu, train_interpolation=mu)
    local, _ = train(averaged, regions=1)

    nesterov = optax.sgd(LR * (1 - mu), mu, nesterov=True)
    wanted, _ = train(methods.get("apart"), regions=1, optimizer=nesterov)
    assert_within_ulps(local, wanted)

    outer = case("snoo", sync_interval=1, outer_lr=1 - mu, outer_momentum=mu)
    assert_within_ulps(local, trained(outer, 1)[0])


def test_before_its_first_sync_diloco_trains_regions_apart():
    local, _ = trained(case("diloco", sync_interval=13))
    apart, _ = trained(case("apart"))
    assert_within_ulps(local, apart)


def test_demo_of_everything_is_the_sign_of_the_mean_gradient():
    _, outer = trained(case("demo", momentum_decay=0.0, compress="dct:16"))
    x = join(PARAMS).astype(float)
    for targets in TARGETS:
        x = x - LR * np.sign(quadratic.HESSIAN @ (x - targets.mean(0)))
    assert_within_ulps(join(outer), x)


SLOPES = np.broadcast_to(TARGETS[:1], TARGETS.shape)


def test_co2_without_momentum_is_averaging_one_round_late():
    """Each region's gradient is constant; the first of three rounds applies nothing."""
    method = methods.get("co2", sync_interval=4, outer_momentum=0.0, momentum_clip=1e9)
    _, outer = train(method, SLOPES, loss=quadratic.slope_fn)
    moved = 2 * 4 * LR * TARGETS[0].mean(0)
    assert_within_ulps(join(outer), join(PARAMS) - moved)


def test_a_region_of_twice_the_batch_counts_twice():
    """Of one constant gradient a region, averaged once over 12 steps."""
    method = methods.get(
        "diloco",
        sync_interval=12,
        outer_lr=1.0,
        outer_momentum=0.0,
        region_weights="tokens",
    )
    regions = Regions((1.0, 2.0, 1.0, 1.0), (2, 2, 1, 1))
    _, outer = train(method, SLOPES, loss=quadratic.slope_fn, regions=regions)

    # Steps 12, 6, 12, 12; sequences 24, 12, 12, 12.
    moved = LR * np.average(
        TARGETS[0] * [[12], [6], [12], [12]], axis=0, weights=[24, 12, 12, 12]
    )
    assert_within_ulps(join(outer), join(PARAMS) - moved)


@pytest.mark.parametrize("name", ["des_loc", "mt_dao"])
def test_averaged_moments_of_equal_regions_are_those_of_one(name):
    """Averaging equal values changes nothing; nor does a slow momentum of weight 0."""
    same = np.repeat(TARGETS[:, :1], 4, axis=1)
    inner = {
        "des_loc": optax.adamw(LR, 0.9, 0.99),
        "mt_dao": mt_adam(LR, (0.9, 0.999), (1.0, 0.0), 0.99),
    }
    method = methods.get(name, sync_interval=2, sync_moments="1,2")
    _, outer = train(method, same, optimizer=inner[name])
    alone, _ = train(methods.get("apart"), regions=1, optimizer=inner["des_loc"])
    assert_within_ulps(outer, jax.tree.map(lambda x: x[0], alone), 100)


def test_noloco_with_two_regions_averages_over_both():
    noloco = methods.get("noloco", sync_interval=4)
    everyone = dataclasses.replace(noloco.sync.outer, group="all")
    expected = train(noloco.with_sync(outer=everyone), regions=2)
    assert_within_ulps(train(noloco, regions=2), expected)
    # Two regions that start equal and get the same mean stay equal.
    local, _ = expected
    assert max(np.ptp(x, axis=0).max() for x in local.values()) < 1e-6
