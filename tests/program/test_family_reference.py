"""Each method of the family against a NumPy reference, over several rounds.

In float64 to 1e-10 of the largest number of a tensor; where the wire has float32 (the
scale of a 4-bit message, by which the compiler may multiply before or after it
divides by 7) to 1e-6. Four regions run as blocks of two on two devices, unless a case
has others.
"""

import dataclasses
import functools
from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.engine.mesh import make_mesh
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sync.cutting import cut_by_patterns
from cocodc_jax.sync.regions import Regions
from cocodc_jax.transforms.mt_adam import mt_adam
from tests.program import family_reference as ref
from tests.program.family_reference import SHAPES, SIZE, split
from tests.program.tiny import follow
from tests.slow import mostly_slow

LR = 0.1
NUM_REGIONS = 4
NUM_STEPS = 14
OUTER = {"outer_lr": 0.4, "outer_momentum": 0.9}
SPEEDS = (1.0, 1.5, 1.0, 2.5)
EXACT_SPEEDS = [Fraction(s) for s in SPEEDS]
TOKENS = [3, 1, 2, 4]
RING = [[1, 3], [2, 0], [3, 1], [0, 2]]
COMPLETE = [[j for j in range(NUM_REGIONS) if j != i] for i in range(NUM_REGIONS)]

RNG = np.random.default_rng(0)
ROOT = RNG.normal(size=(SIZE, SIZE)) / 6
HESSIAN = ROOT @ ROOT.T + 0.3 * np.eye(SIZE)
PARAMS = {n: RNG.normal(size=s) for n, s in SHAPES.items()}
OPTIMA = RNG.normal(size=(NUM_REGIONS, SIZE))
TARGETS = OPTIMA + RNG.normal(size=(NUM_STEPS, NUM_REGIONS, SIZE)) / 4


def problem(num_regions=NUM_REGIONS):
    params = ref.join(PARAMS.values())
    return ref.Problem(HESSIAN, params, TARGETS[:, :num_regions], LR)


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


def twin(fn, *args, num_regions=NUM_REGIONS, **options):
    """`fn` of the reference."""
    return lambda: fn(problem(num_regions), *args, **options)


def feedback(compress, decay=1.0):
    return lambda: ref.Feedback(compress, decay)


def feedback_of_threshold():
    return ref.Feedback(ref.Threshold(0.2, 3, 1.5))


def noloco_twin():
    who = ref.drawn_partners(7, NUM_REGIONS)
    assert len({tuple(who(t)) for t in range(2, 15, 2)}) == 3
    return ref.noloco(problem(), 2, 0.7, 0.5, 0.6, who)


def periodic_twin():
    is_b = ref.join([np.full(SHAPES[n], n == "b") for n in SHAPES])
    return ref.periodic(problem(), 0.4, 0.9, [(~is_b, 6), (is_b, 4)])


def delayed_nesterov_twin(spread, compress=lambda: ref.plain):
    def run():
        take = ref.delayed_nesterov(0.5, 0.8, 3, spread)
        return ref.asynchronous(problem(), EXACT_SPEEDS, 3, True, take, compress)

    return run


def heloco_twin():
    seen = set()
    numbers = (0.6, 0.5, 0.7, 2.0, 0.5)
    take, start = ref.look_ahead(0.3, 0.8, 0.9, numbers, seen)
    out = ref.asynchronous(problem(), EXACT_SPEEDS, 2, False, take, start=start)
    assert seen == {"keep", "turn", "take off"}
    return out


def mix(alpha):
    return lambda local, staged, outer: alpha * local + (1 - alpha) * outer


def replayed(local, staged, outer):
    return outer + (local - staged)


def in_turn(delay, merge, *unequal, **options):
    return twin(
        ref.fragments_in_turn,
        [["a", "c"], ["b"]],
        4,
        delay,
        0.4,
        0.9,
        merge,
        *unequal,
        **options,
    )


def drawn_mask(tick, density=0.3, seed=5):
    """The documented draw, of fragment 0."""
    words = np.array([0, tick], np.uint32)
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    out = []
    for n, size in enumerate(ref.SIZES):
        leaf_key = jax.random.fold_in(key, 65537 * seed + n)
        order = np.argsort(jax.random.bits(leaf_key, (size,), np.uint32), stable=True)
        out.append(np.isin(np.arange(size), order[: max(1, round(density * size))]))
    return ref.join(out)


def subset(turn, density=0.4, seed=5):
    """The documented subset of a turn, as a mask."""
    out = []

    for n, size in enumerate(ref.SIZES):
        num_subsets = min(int(np.ceil(1 / density)), size)
        leaf_key = jax.random.fold_in(jax.random.key(seed), n)
        leaf_key = jax.random.fold_in(leaf_key, turn // num_subsets)

        order = np.argsort(jax.random.bits(leaf_key, (size,), np.uint32), stable=True)
        drawn = order[turn % num_subsets :: num_subsets]
        out.append(np.isin(np.arange(size), drawn))

    return ref.join(out)


def sparta_twin(decay, is_delayed):
    return lambda: ref.async_sparta(problem(), 2, subset, decay, is_delayed)


def des_loc_twin(b1s, weights):
    return lambda: ref.des_loc(problem(), 2, 2, 3, ref.Momenta(LR, b1s, weights, 0.9))


def apart_twin():
    local = problem().round(problem().copies(), 0, NUM_STEPS)
    return local, local.mean(0)


EACH_2 = {"sync_interval": 2}
SPARSE = EACH_2 | {
    "outer_lr": 0.8,
    "compress": "error_feedback(chunked_top_k(k=3, chunk_side=3, values=stat2()), "
    "decay=0.95)",
}
CO2 = EACH_2 | {"outer_momentum": 0.6, "momentum_clip": 0.6}
NOLOCO = EACH_2 | {"pair_pull": 0.6, "pair_seed": 7}
EACH_3 = {"sync_interval": 3}
ASYNC_SPARTA = EACH_2 | {"mask_density": 0.4, "mask_seed": 5, "progress_decay": 0.7}
ADMM = EACH_3 | {"admm_penalty": 0.3}
DELAYED = EACH_3 | {"outer_lr": 0.5, "outer_momentum": 0.8, "arrivals_per_momentum": 3}
IN_TURN = {"sync_interval": 4, "num_fragments": 2, **OUTER}
MIXED = IN_TURN | {"mixing_alpha": 0.3}
DECOUPLED = MIXED | {"answer_steps": "1,3,9,0", "quorum": 2, "grace_steps": 2}
TOP = ref.top_k(0.25)
TOP_K = {"compress": "topk:0.25"}
UNEQUAL = Regions(SPEEDS, (1,) * 4)
CUT = ("a|c", "b")
decoupled_twin = functools.partial(
    in_turn, 3, mix(0.3), EXACT_SPEEDS, TOKENS, counted=(0, 1, 3)
)
CASES = {
    "snoo": Case(
        "snoo", {"sync_interval": 4, **OUTER},
        twin(ref.synchronous, 4, 0.4, 0.9, lambda: ref.plain, num_regions=1), 1, 1,
    ),
    "diloco, a part at its own period": Case(
        "diloco", {"sync_interval": 6, "router_interval": 4, **OUTER}, periodic_twin,
        patterns=("a|c", "b"),
    ),
    "gpa": Case(
        "gpa", {"eval_interpolation": 0.8, "train_interpolation": 0.6},
        twin(ref.gpa, 0.8, 0.6, num_regions=1), 1, 1,
    ),
    "sparseloco": Case("sparseloco", SPARSE, twin(ref.sparseloco, 2, 0.8, 3, 3, 0.95)),
    "sparseloco, over all": Case(
        "sparseloco", SPARSE | {"sparse_mean": "all"},
        twin(ref.sparseloco, 2, 0.8, 3, 3, 0.95, over="all"),
    ),
    "qsparse": Case(
        "qsparse", EACH_2 | {"outer_lr": 0.9, "compress": "ef+topk:0.25+int4"},
        twin(ref.synchronous, 2, 0.9, 0.0, feedback(ref.top_k(0.25, ref.four_bit))),
        tolerance=1e-6,
    ),
    "muloco": Case(
        "muloco", EACH_2,
        twin(ref.synchronous, 2, 0.9, 0.8, feedback(ref.matrices(ref.stat2), 0.9)),
    ),
    "multi_ring": Case(
        "multi_ring", {"sync_interval": 4},
        twin(ref.synchronous, 4, 1.0, 0.0, lambda: ref.plain),
    ),
    "multi_ring, odd": Case(
        "multi_ring", {"sync_interval": 4},
        twin(ref.synchronous, 4, 1.0, 0.0, lambda: ref.plain, num_regions=3), 3, 3,
    ),
    "co2": Case("co2", CO2, twin(ref.co2, 2, 1.0, 0.6, 0.6, is_measured=False)),
    "co2, a measured gap": Case(
        "co2", CO2 | {"staleness_gap": "measured"},
        twin(ref.co2, 2, 1.0, 0.6, 0.6, is_measured=True),
    ),
    "eager": Case("eager", EACH_2 | OUTER, twin(ref.eager, 2, 0.4, 0.9)),
    "noloco, in a block": Case("noloco", NOLOCO, noloco_twin),
    "noloco, a region a device": Case("noloco", NOLOCO, noloco_twin, num_devices=4),
    "diloco_demo": Case(
        "diloco_demo", EACH_2 | {"compress": "dct_top_k(k=3, chunk_side=3)"},
        twin(ref.diloco_demo, 2, 0.7, 0.9, ref.chunked(3, 3, is_cosine=True)),
    ),
    "des_loc": Case(
        "des_loc", EACH_2 | {"sync_moments": "2,3"}, des_loc_twin((0.8,), (1.0,)),
        optimizer=optax.adam(LR, 0.8, 0.9),
    ),
    "mt_dao": Case(
        "mt_dao", EACH_2 | {"sync_moments": "2,3"},
        des_loc_twin((0.8, 0.99), (0.5, 0.3)),
        optimizer=mt_adam(LR, (0.8, 0.99), (0.5, 0.3), 0.9, weight_decay=0.0),
    ),
    "lt_admm, a ring, in a block": Case(
        "lt_admm", ADMM | TOP_K, twin(ref.lt_admm, 3, 0.3, RING, TOP)
    ),
    "lt_admm, a ring, a region a device": Case(
        "lt_admm", ADMM | {"compress": "none"},
        twin(ref.lt_admm, 3, 0.3, RING, ref.plain), num_devices=4,
    ),
    "lt_admm, complete": Case(
        "lt_admm", ADMM | TOP_K | {"graph": "complete"},
        twin(ref.lt_admm, 3, 0.3, COMPLETE, TOP),
    ),
    "demo": Case(
        "demo", {"momentum_decay": 0.9, "compress": "dct_top_k(k=3, chunk_side=4)"},
        twin(ref.demo, 0.9, 3, 4),
    ),
    "lion, majority": Case(
        "distributed_lion", {}, twin(ref.lion, 0.9, 0.99, "majority")
    ),
    "lion, average": Case(
        "distributed_lion", {"lion_vote": "average"},
        twin(ref.lion, 0.9, 0.99, "average"),
    ),
    "dct_threshold": Case(
        "dct_threshold",
        {"compress": "error_feedback(threshold(density=0.2, every=3, slack=1.5))"},
        twin(ref.compressed_gradients, feedback_of_threshold),
    ),
    "delayed_nesterov": Case(
        "delayed_nesterov", DELAYED | {"momentum_spread": 0.2},
        delayed_nesterov_twin(0.2), regions=UNEQUAL,
    ),
    "delayed_nesterov, compressed": Case(
        "delayed_nesterov", DELAYED | {"compress": "ef:0.9+topk:0.25"},
        delayed_nesterov_twin(0.0, feedback(TOP, 0.9)), regions=UNEQUAL,
    ),
    "heloco": Case(
        "heloco",
        EACH_2 | {
            "outer_lr": 0.3, "outer_momentum": 0.8, "keep_cosine": 0.6,
            "turn_rate": 0.7, "arrival_weight": 0.9, "confidence_scale": 2.0,
            "dynamic_steps": False,
        },
        heloco_twin, regions=UNEQUAL,
    ),
    "decoupled_diloco": Case(
        "decoupled_diloco", DECOUPLED, decoupled_twin(average=ref.radial_directional),
        regions=Regions(SPEEDS, tuple(TOKENS)), patterns=CUT,
    ),
    "decoupled_diloco, plain means": Case(
        "decoupled_diloco", DECOUPLED | {"averaging": "mean"}, decoupled_twin(),
        regions=Regions(SPEEDS, tuple(TOKENS)), patterns=CUT,
    ),
    "streaming, a phase": Case(
        "streaming_diloco", MIXED | {"delay_steps": 3, "phase_steps": 1},
        in_turn(3, mix(0.3), phase=1), patterns=CUT,
    ),
    "streaming, a delay of H": Case(
        "streaming_diloco", MIXED | {"delay_steps": 4}, in_turn(4, mix(0.3)),
        patterns=CUT,
    ),
    "streaming, replayed": Case(
        "streaming_diloco", IN_TURN | {"delay_steps": 3, "merge_rule": "replay"},
        in_turn(3, replayed), patterns=CUT,
    ),
    "loscar": Case(
        "loscar",
        {"sync_interval": 4, "delay_steps": 3, "mask_density": 0.3, "mask_seed": 5},
        twin(ref.loscar, 4, 3, drawn_mask),
    ),
    "async_sparta": Case(
        "async_sparta", ASYNC_SPARTA, sparta_twin(0.7, is_delayed=True)
    ),
    "async_sparta, a replay": Case(
        "async_sparta", ASYNC_SPARTA | {"progress_decay": 0.0},
        sparta_twin(0.0, is_delayed=True),
    ),
    "async_sparta, at once": Case(
        "async_sparta", ASYNC_SPARTA | {"is_delayed": False},
        sparta_twin(0.7, is_delayed=False),
    ),
    "apart": Case("apart", {}, apart_twin),
}  # fmt: skip


def train(case):
    """The regions' parameters, and the outer ones."""
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
    targets = TARGETS[:, : case.num_regions]
    state, _ = follow(program, state, targets, NUM_STEPS)

    return jax.device_get((state.region.params, program.outer_params(state)))


# One form of each kind of method; others are slow, or in other batteries.
QUICK = (
    "snoo",
    "diloco, a part at its own period",
    "sparseloco",
    "muloco",
    "multi_ring, odd",
    "co2, a measured gap",
    "eager",
    "noloco, a region a device",
    "mt_dao",
    "lt_admm, a ring, in a block",
    "demo",
    "lion, majority",
    "delayed_nesterov, compressed",
    "heloco",
    "decoupled_diloco",
    "streaming, a phase",
    "loscar",
)


@pytest.mark.parametrize("name", mostly_slow(CASES, quick=QUICK))
def test_each_method_equals_its_formula(name):
    case = CASES[name]
    with jax.enable_x64(True):
        ends = train(case)

    for actual, wanted in zip(ends, case.twin(), strict=True):
        for n, x in zip(SHAPES, split(wanted), strict=True):
            assert (actual[n].dtype, actual[n].shape) == (np.float64, x.shape)
            axes = tuple(range(-len(SHAPES[n]), 0))  # Of each region alone.
            largest = np.abs(x).max(axes, keepdims=True)
            assert (np.abs(actual[n] - x) <= case.tolerance * largest).all(), n
