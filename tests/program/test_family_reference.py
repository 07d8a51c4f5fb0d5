"""Each method of the family against its own NumPy reference, several rounds of it.

In float64 to 1e-10 of the largest number of a tensor; where the wire has float32 (the
scale of a 4-bit message, by which the compiler may multiply before or after it
divides by 7) to 1e-6. Four regions run as blocks of
two on two devices, where nothing else is said.
"""

import dataclasses
import itertools
from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sharding.mesh import make_mesh
from cocodc_jax.sync.cutting import cut_by_patterns
from cocodc_jax.sync.regions import Regions
from cocodc_jax.transforms.mt_adam import mt_adam
from tests.program import family_reference as reference

LR, NUM_REGIONS, NUM_STEPS = 0.1, 4, 14
SHAPES = reference.SHAPES
SIZE = 44
OUTER = {"outer_lr": 0.4, "outer_momentum": 0.9}
SPEEDS = (1.0, 1.5, 1.0, 2.5)
EXACT_SPEEDS = [Fraction(s) for s in SPEEDS]
TOKENS = [3, 1, 2, 4]
CLIP = 0.6
ADMM = {"sync_interval": 3, "admm_penalty": 0.3}
RING = [[1, 3], [2, 0], [3, 1], [0, 2]]
COMPLETE = [[j for j in range(NUM_REGIONS) if j != i] for i in range(NUM_REGIONS)]

RNG = np.random.default_rng(0)
ROOT = RNG.normal(size=(SIZE, SIZE)) / 6
HESSIAN = ROOT @ ROOT.T + 0.3 * np.eye(SIZE)
PARAMS = {n: RNG.normal(size=s) for n, s in SHAPES.items()}
OPTIMA = RNG.normal(size=(NUM_REGIONS, SIZE))
TARGETS = OPTIMA + RNG.normal(size=(NUM_STEPS, NUM_REGIONS, SIZE)) / 4


def spec(num_regions=NUM_REGIONS):
    whole = reference.join(PARAMS.values())
    return reference.SyncSpec(HESSIAN, whole, TARGETS[:, :num_regions], LR)


def loss_fn(params, target, key):
    gap = jnp.concatenate([params[n].reshape(-1) for n in SHAPES]) - target
    return gap @ jnp.asarray(HESSIAN) @ gap / 2, {}


@dataclasses.dataclass(frozen=True)
class Case:
    """A method, and its twin, which gives the regions' and the outer parameters."""

    name: str
    options: dict
    twin: Callable
    num_regions: int = NUM_REGIONS
    num_devices: int = 2
    regions: Regions | None = None
    patterns: tuple | None = None
    tolerance: float = 1e-10
    optimizer: optax.GradientTransformation = optax.sgd(LR)


def mix(alpha):
    return lambda local, staged, outer: alpha * local + (1 - alpha) * outer


def twin_of_rounds(interval, outer_lr, momentum, compress, num_regions=NUM_REGIONS):
    return lambda: reference.synchronous(
        spec(num_regions), interval, outer_lr, momentum, compress
    )


def feedback(compress, decay=1.0):
    return lambda: reference.Feedback(compress, decay)


def co2_twin(is_measured):
    def twin():
        seen = []
        out = reference.co2(spec(), 2, 1.0, 0.6, CLIP, seen, is_measured)
        gaps, is_clipped = zip(*seen, strict=True)
        assert max(gaps) > 1.1 if is_measured else set(gaps) == {1}
        assert 1 < sum(is_clipped) < len(seen)
        return out

    return twin


def noloco_twin():
    who = reference.drawn_partners(7, NUM_REGIONS)
    assert len({tuple(who(t)) for t in range(2, 15, 2)}) == 3
    return reference.noloco(spec(), 2, 0.7, 0.5, 0.6, who)


def lion_twin(vote):
    def twin():
        *out, ties = reference.lion(spec(), 0.9, 0.99, vote)
        assert ties > 10
        return out

    return twin


def delayed_nesterov_twin(spread, compress=lambda: reference.plain):
    def twin():
        take = reference.delayed_nesterov(0.5, 0.8, 3, spread)
        *out, arrivals = reference.asynchronous(
            spec(), EXACT_SPEEDS, 3, True, take, compress
        )
        assert {m for _, m in arrivals} == {0, 1, 2, 3}
        return out

    return twin


def look_ahead_twin(*heloco):
    def twin():
        seen = []
        take, start = reference.look_ahead(0.3, 0.8, 0.9, heloco, seen)
        out = reference.asynchronous(spec(), EXACT_SPEEDS, 2, False, take, start=start)
        assert set(seen) == {"keep", "turn", "take off"}
        return out[:2]

    return twin


def decoupled_twin(average):
    return lambda: reference.fragments_in_turn(
        spec(), [["a", "c"], ["b"]], 4, 3, 0.4, 0.9, mix(0.3), EXACT_SPEEDS, TOKENS,
        counted=(0, 1, 3), average=average,
    )  # fmt: skip


def replayed(local, staged, outer):
    return outer + (local - staged)


def streaming_twin(delay, phase, merge):
    return lambda: reference.fragments_in_turn(
        spec(), [["a", "c"], ["b"]], 4, delay, 0.4, 0.9, merge, phase=phase
    )


def drawn_mask(density, seed, tick):
    """The documented draw, of fragment 0."""
    words = np.array([0, tick], np.uint32)
    key, out = jax.random.wrap_key_data(words, impl="threefry2x32"), []
    for n, name in enumerate(sorted(SHAPES)):
        size = int(np.prod(SHAPES[name]))
        own = jax.random.fold_in(key, 65537 * seed + n)
        order = np.argsort(jax.random.bits(own, (size,), np.uint32), stable=True)
        mask = np.zeros(size, bool)
        mask[order[: max(1, round(density * size))]] = True
        out.append(mask)
    return np.concatenate(out)


def loscar_twin():
    return reference.loscar(spec(), 4, 3, lambda t: drawn_mask(0.3, 5, t))


def des_loc_twin(b1s, weights):
    return lambda: reference.des_loc(
        spec(), 2, 2, 3, reference.Momenta(LR, b1s, weights, 0.9)
    )


def masked_by_region():
    """A maker of senders, one region's after the other's."""
    numbers = itertools.count()
    order = np.asarray(jax.random.permutation(jax.random.key(5), SIZE))
    core = reference.top_k(0.25)
    return lambda: reference.Masked(
        core, 0.4, next(numbers) % NUM_REGIONS, NUM_REGIONS, order
    )


def apart_twin():
    local = spec().round(spec().params, 0, NUM_STEPS)
    return local, local.mean(0)


SPARSE_STAT2 = (
    "error_feedback(chunked_top_k(k=3, chunk_side=3, values=stat2()), decay=0.95)"
)
IN_TURN = {"sync_interval": 4, "num_fragments": 2, **OUTER}
DECOUPLED = {
    "answer_steps": "1,3,9,0", "quorum": 2, "grace_steps": 2, "mixing_alpha": 0.3,
    **IN_TURN,
}  # fmt: skip
CASES = {
    "snoo": Case(
        "snoo", {"sync_interval": 4, **OUTER},
        twin_of_rounds(4, 0.4, 0.9, lambda: reference.plain, 1), 1, 1,
    ),
    "sparseloco": Case(
        "sparseloco",
        {
            "sync_interval": 2, "outer_lr": 0.8,
            "compress": SPARSE_STAT2,
        },
        lambda: reference.sparseloco(spec(), 2, 0.8, 3, 3, 0.95),
    ),
    "sparseloco, over all": Case(
        "sparseloco",
        {
            "sync_interval": 2, "outer_lr": 0.8, "sparse_mean": "all",
            "compress": SPARSE_STAT2,
        },
        lambda: reference.sparseloco(spec(), 2, 0.8, 3, 3, 0.95, over="all"),
    ),
    "qsparse": Case(
        "qsparse",
        {"sync_interval": 2, "outer_lr": 0.9, "compress": "ef+topk:0.25+int4"},
        twin_of_rounds(
            2, 0.9, 0.0, feedback(reference.top_k(0.25, reference.four_bit))
        ),
        tolerance=1e-6,
    ),
    "muloco": Case(
        "muloco", {"sync_interval": 2},
        twin_of_rounds(
            2, 0.9, 0.8, feedback(reference.matrices(reference.stat2), 0.9)
        ),
    ),
    "co2": Case(
        "co2", {"sync_interval": 2, "outer_momentum": 0.6, "momentum_clip": CLIP},
        co2_twin(False),
    ),
    "co2, a measured gap": Case(
        "co2",
        {
            "sync_interval": 2, "outer_momentum": 0.6, "momentum_clip": CLIP,
            "staleness_gap": "measured",
        },
        co2_twin(True),
    ),
    "eager": Case(
        "eager", {"sync_interval": 2, **OUTER},
        lambda: reference.eager(spec(), 2, 0.4, 0.9),
    ),
    "noloco, in a block": Case(
        "noloco", {"sync_interval": 2, "pair_pull": 0.6, "pair_seed": 7}, noloco_twin
    ),
    "noloco, a region a device": Case(
        "noloco", {"sync_interval": 2, "pair_pull": 0.6, "pair_seed": 7}, noloco_twin,
        num_devices=4,
    ),
    "diloco_demo": Case(
        "diloco_demo",
        {"sync_interval": 2, "compress": "dct_top_k(k=3, chunk_side=3)"},
        lambda: reference.diloco_demo(
            spec(), 2, 0.7, 0.9, reference.chunked(3, 3, is_cosine=True)
        ),
    ),
    "masked_core": Case(
        "masked_core",
        {
            "sync_interval": 2, "mask_density": 0.4, "mask_seed": 5,
            "compress": "topk:0.25", **OUTER,
        },
        twin_of_rounds(2, 0.4, 0.9, masked_by_region()),
    ),
    "des_loc": Case(
        "des_loc", {"sync_interval": 2, "sync_moments": "2,3"},
        des_loc_twin((0.8,), (1.0,)), optimizer=optax.adam(LR, 0.8, 0.9),
    ),
    "mt_dao": Case(
        "mt_dao", {"sync_interval": 2, "sync_moments": "2,3"},
        des_loc_twin((0.8, 0.99), (0.5, 0.3)),
        optimizer=mt_adam(LR, (0.8, 0.99), (0.5, 0.3), 0.9, weight_decay=0.0),
    ),
    "lt_admm, a ring, in a block": Case(
        "lt_admm", {**ADMM, "compress": "topk:0.25"},
        lambda: reference.lt_admm(spec(), 3, 0.3, RING, reference.top_k(0.25)),
    ),
    "lt_admm, a ring, a region a device": Case(
        "lt_admm", {**ADMM, "compress": "none"},
        lambda: reference.lt_admm(spec(), 3, 0.3, RING, reference.plain),
        num_devices=4,
    ),
    "lt_admm, complete": Case(
        "lt_admm", {**ADMM, "graph": "complete", "compress": "topk:0.25"},
        lambda: reference.lt_admm(spec(), 3, 0.3, COMPLETE, reference.top_k(0.25)),
    ),
    "demo": Case(
        "demo", {"momentum_decay": 0.9, "compress": "dct_top_k(k=3, chunk_side=4)"},
        lambda: reference.demo(spec(), 0.9, 3, 4),
    ),
    "lion, majority": Case("distributed_lion", {}, lion_twin("majority")),
    "lion, average": Case(
        "distributed_lion", {"lion_vote": "average"}, lion_twin("average")
    ),
    "dct_threshold": Case(
        "dct_threshold",
        {"compress": "error_feedback(threshold(density=0.2, every=3, slack=1.5))"},
        lambda: reference.compressed_gradients(spec(), feedback_of_threshold),
    ),
    "delayed_nesterov": Case(
        "delayed_nesterov",
        {
            "sync_interval": 3, "outer_lr": 0.5, "outer_momentum": 0.8,
            "arrivals_per_momentum": 3, "momentum_spread": 0.2,
        },
        delayed_nesterov_twin(0.2),
        regions=Regions(SPEEDS, (1,) * 4),
    ),
    "delayed_nesterov, compressed": Case(
        "delayed_nesterov",
        {
            "sync_interval": 3, "outer_lr": 0.5, "outer_momentum": 0.8,
            "arrivals_per_momentum": 3, "compress": "ef:0.9+topk:0.25",
        },
        delayed_nesterov_twin(0.0, feedback(reference.top_k(0.25), 0.9)),
        regions=Regions(SPEEDS, (1,) * 4),
    ),
    "heloco": Case(
        "heloco",
        {
            "sync_interval": 2,  "outer_lr": 0.3, "outer_momentum": 0.8,
            "keep_cosine": 0.6, "turn_rate": 0.7, "arrival_weight": 0.9,
            "confidence_scale": 2.0, "dynamic_steps": False,
        },
        look_ahead_twin(0.6, 0.5, 0.7, 2.0, 0.5),
        regions=Regions(SPEEDS, (1,) * 4),
    ),
    "decoupled_diloco": Case(
        "decoupled_diloco", DECOUPLED, decoupled_twin(reference.radial_directional),
        regions=Regions(SPEEDS, tuple(TOKENS)),
        patterns=("a|c", "b"),
    ),
    "decoupled_diloco, plain means": Case(
        "decoupled_diloco", DECOUPLED | {"averaging": "mean"},
        decoupled_twin(reference.mean_by),
        regions=Regions(SPEEDS, tuple(TOKENS)),
        patterns=("a|c", "b"),
    ),
    "streaming, a phase": Case(
        "streaming_diloco",
        {**IN_TURN, "delay_steps": 3, "mixing_alpha": 0.3, "phase_steps": 1},
        streaming_twin(3, 1, mix(0.3)), patterns=("a|c", "b"),
    ),
    "streaming, a delay of H": Case(
        "streaming_diloco", {**IN_TURN, "delay_steps": 4, "mixing_alpha": 0.3},
        streaming_twin(4, 0, mix(0.3)), patterns=("a|c", "b"),
    ),
    "streaming, replayed": Case(
        "streaming_diloco", {**IN_TURN, "delay_steps": 3, "merge_rule": "replay"},
        streaming_twin(3, 0, replayed), patterns=("a|c", "b"),
    ),
    "loscar": Case(
        "loscar",
        {"sync_interval": 4, "delay_steps": 3, "mask_density": 0.3, "mask_seed": 5},
        loscar_twin,
    ),
    "apart": Case("apart", {}, apart_twin),
}  # fmt: skip


def feedback_of_threshold():
    return reference.Feedback(reference.Threshold(0.2, 3, 1.5))


def scan_steps(case):
    """Two steps a scan, or one where events are not all at even steps.

    Every length of a scan is a program of its own.
    """
    given = [case.options.get(n, 0) for n in ("sync_interval", "delay_steps")]
    is_odd = any(n % 2 for n in (*given, case.options.get("phase_steps", 0)))
    return 1 if is_odd or case.regions else 2


def train(case):
    """The regions' parameters and the outer ones, as the reference has them."""
    program = RegionProgram(
        loss_fn,
        case.optimizer,
        methods.get(case.name, **case.options),
        PARAMS,
        case.regions or case.num_regions,
        mesh=make_mesh(case.num_regions, devices=jax.devices()[: case.num_devices]),
        fragments=case.patterns and cut_by_patterns(PARAMS, case.patterns),
    )
    state = program.init(PARAMS, jax.random.key(0))
    length = scan_steps(case)
    for step in range(0, NUM_STEPS, length):
        targets = TARGETS[step : step + length, : case.num_regions]
        state, _ = program.advance(state, targets)
    local = jax.device_get(state.region.params)
    outer = jax.device_get(program.outer_params(state))
    assert {x.dtype for x in (*local.values(), *outer.values())} == {np.dtype(float)}
    each = [[local[n][m] for n in SHAPES] for m in range(case.num_regions)]
    return list(map(reference.join, each)), reference.join(outer[n] for n in SHAPES)


def assert_close(actual, expected, tolerance, what):
    tensors = zip(*map(reference.split, (actual, expected)), strict=True)
    for name, (found, x) in zip(SHAPES, tensors, strict=True):
        np.testing.assert_allclose(
            found, x, rtol=0, atol=tolerance * np.abs(x).max(), err_msg=f"{what} {name}"
        )


@pytest.mark.parametrize("name", CASES)
def test_each_method_is_its_formula(name):
    case = CASES[name]
    expected_local, expected_outer = case.twin()
    with jax.enable_x64(True):
        local, outer = train(case)
    for m, (actual, expected) in enumerate(zip(local, expected_local, strict=True)):
        assert_close(actual, expected, case.tolerance, f"region {m}")
    assert_close(outer, expected_outer, case.tolerance, "outer")
