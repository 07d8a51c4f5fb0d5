"""The region program against the NumPy reference: three full cycles of each method.

Four regions run as blocks of two on two devices, or each on its own. Tolerances are
relative to the largest number of each tensor: 1e-5 in float32, 1e-12 in float64.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.engine.mesh import make_mesh
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sync.needs import UserInputs
from cocodc_jax.transforms.compensation import adam_second_moment
from tests.numerics import assert_within
from tests.program import family_reference, reference
from tests.program.tiny import follow
from tests.slow import mostly_slow

NUM_REGIONS = 4
LR = 0.05
# Adam's eps is large so that a gradient near zero, of which float32 knows few digits,
# does not become a whole step.
ADAM = {"b1": 0.9, "b2": 0.95, "eps": 1e-3, "weight_decay": 0.1}
OUTER = {"outer_lr": 0.4, "outer_momentum": 0.9}
TOLERANCE = {np.float32: 1e-5, np.float64: 1e-12}


@dataclasses.dataclass
class Problem:
    """One problem, as JAX sees it and as the reference does.

    `groups` are the fragments by hand: names in the order of the method's fragments,
    strided, for 1, 2 and 3 of them. `names` maps a tree to the reference's tensors.
    """

    loss_fn: object
    params: dict
    oracle: reference.Quadratic
    num_devices: int
    batches: list
    groups: dict
    names: object


def quadratic(seed, names, params, groups, num_devices):
    """Of tensors with these shapes, which it couples."""
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda shape: rng.normal(size=shape).astype(np.float32),
        params,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    shapes = {name: x.shape for name, x in names(params).items()}
    size = sum(map(math.prod, shapes.values()))
    root = rng.normal(size=(size, size)) / 3
    hessian = (root @ root.T + 0.3 * np.eye(size)).astype(np.float32)
    optimum = rng.normal(size=(NUM_REGIONS, size))  # Different in every region.

    def batch():
        target = optimum + rng.normal(size=(NUM_REGIONS, size)) / 4
        weight = rng.uniform(0.5, 1.5, size=NUM_REGIONS)
        return target.astype(np.float32), weight.astype(np.float32)

    def loss_fn(params, batch, key):
        target, weight = batch
        gap = jnp.concatenate(list(names(params).values())) - target
        return weight * (gap @ jnp.asarray(hessian, gap.dtype) @ gap) / 2, {}

    oracle = reference.Quadratic(shapes, hessian.astype(float))
    batches = [batch() for _ in range(60)]
    return Problem(loss_fn, params, oracle, num_devices, batches, groups, names)


def of_stacked(tree):
    blocks = {f"block{i}": tree["blocks"]["w"][i] for i in range(3)}
    return {"embed": tree["embed"]["w"], **blocks, "head": tree["head"]["w"]}


PROBLEMS = {
    "plain": quadratic(
        0,
        lambda tree: tree,
        {"a": (4,), "b": (3,), "c": (2,)},
        {1: [["a", "b", "c"]], 2: [["a", "c"], ["b"]], 3: [["a"], ["b"], ["c"]]},
        2,
    ),
    # Three stacked blocks; units embed, 0, 1, 2, head go to fragments in turn.
    "stacked": quadratic(
        1,
        of_stacked,
        {"blocks": {"w": (3, 2)}, "embed": {"w": (3,)}, "head": {"w": (2,)}},
        {
            1: [["embed", "block0", "block1", "block2", "head"]],
            2: [["embed", "block1", "head"], ["block0", "block2"]],
            3: [["embed", "block2"], ["block0", "head"], ["block1"]],
        },
        4,
    ),
}


def cast(tree, dtype):
    return jax.tree.map(lambda x: np.asarray(x, dtype), tree)


def run_program(problem, method, inner, num_steps, dtype):
    """The package's run: the last state, all syncs, and the program."""
    params = cast(problem.params, dtype)
    program = RegionProgram(
        problem.loss_fn,
        optax.sgd(LR) if inner == "sgd" else optax.adamw(LR, **ADAM),
        method,
        params,
        NUM_REGIONS,
        mesh=make_mesh(NUM_REGIONS, devices=jax.devices()[: problem.num_devices]),
        user_inputs=UserInputs(LR, adam_second_moment(ADAM["b2"])),
    )

    state = program.init(params, jax.random.key(0))
    batches = problem.batches
    state, outputs = follow(program, state, cast(batches, dtype), num_steps)

    return program, state, [sync for output in outputs for sync in output.syncs]


def run_reference(problem, method, inner, num_steps, dtype):
    def of_region(batch, m):
        return jax.tree.map(lambda x: x[m].astype(np.float64), batch)

    adam = family_reference.Momenta(
        LR, (ADAM["b1"],), (1.0,), ADAM["b2"], ADAM["eps"], ADAM["weight_decay"]
    )
    batches = problem.batches[:num_steps]
    return reference.Run(
        problem.oracle,
        method,
        reference.Sgd(LR) if inner == "sgd" else adam,
        problem.oracle.join(problem.names(problem.params)).astype(np.float64),
        [[of_region(b, m) for m in range(NUM_REGIONS)] for b in batches],
        np.dtype(dtype).itemsize,
    )


def assert_agree(problem, pair, dtype):
    def assert_close(tree, expected):
        """Compare a model with the reference's, tensor by tensor."""
        wanted = problem.oracle.split(expected)
        assert_within(problem.names(tree), wanted, TOLERANCE[dtype])

    has_outer = pair.name != "data_parallel"
    method = methods.get(pair.name, **pair.options, **(OUTER if has_outer else {}))
    fragments = problem.groups[pair.num_fragments]
    expected = reference.Method(fragments, outer_lr=0.4, momentum=0.9, **pair.twin)
    arguments = (pair.inner, pair.num_steps, dtype)
    with jax.enable_x64(dtype is np.float64):
        program, state, syncs = run_program(problem, method, *arguments)
        ours = run_reference(problem, expected, *arguments)
        # A choice between two equal scores would be left to rounding.
        assert ours.closest > 1e-3

        merged = [(s.fragment_id, s.start_step, s.apply_step) for s in syncs]
        assert merged == ours.syncs
        assert state.bytes_sent == ours.num_bytes > 0

        regions = jax.device_get(state.region.params)
        assert jax.tree.leaves(regions)[0].dtype == dtype

        for m, local in enumerate(ours.local):
            of_region = jax.tree.map(lambda x, m=m: x[m], regions)
            assert_close(of_region, local)
        if expected.interval == 0:
            return
        memory = state.sync.schedule
        outer = state.sync.outer

        assert [f[:2] for f in ours.in_flight] == [x.sync_id for x in memory.in_flight]
        params = jax.device_get(program.outer_params(state))
        assert_close(params, ours.outer)

        traces = [optax.tree_utils.tree_get(s, "trace") for s in outer.opt_states]
        momentum = jax.device_get(program.fragments.join(traces))
        assert_close(momentum, ours.nesterov.m)

        # Reported in float32 whatever the parameters.
        norms = [float(s.norm) for s in syncs]
        np.testing.assert_allclose(norms, ours.norms, rtol=1e-5)

        if expected.merge == "compensate":
            ratios = [s.metrics["correction_ratio"] for s in syncs]
            np.testing.assert_allclose(ratios, ours.ratios, rtol=1e-4, atol=1e-9)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A method under test, its twin's fields, and three cycles' steps."""

    name: str
    options: dict
    twin: dict
    num_fragments: int
    inner: str = "adamw"
    num_steps: int = 39


SHORT = {
    "sync_interval": 13,
    "num_fragments": 2,
    "delay_steps": 3,
    "syncs_per_interval": 4,
}
COMPENSATED = {"interval": 13, "slot": 3, "tau": 3, "merge": "compensate"}


def compensated(name, product, score, inner="adamw", strength=0.5, **options):
    """By `product` of the reference; options are the method's."""
    twin = {"score": score, "curvature": product, "strength": strength}
    return Pair(name, SHORT | options, COMPENSATED | twin, 2, inner)


def cocodc(curvature, product, score, inner="adamw", **options):
    options |= {"transmission_score": score, "compensation_strength": 0.5}
    return compensated("cocodc", product, score, inner, curvature=curvature, **options)


METHODS = {
    "data_parallel": Pair(
        "data_parallel", {}, {"reduce_gradients": True}, 1, num_steps=18
    ),
    "diloco": Pair(
        "diloco", {"sync_interval": 5}, {"interval": 5, "slot": 5}, 1, num_steps=15
    ),
    # A delay longer than a slot: two fragments are in flight at once.
    "streaming_diloco": Pair(
        "streaming_diloco",
        {"sync_interval": 9, "num_fragments": 3, "delay_steps": 6, "mixing_alpha": 0.3},
        {"interval": 9, "slot": 3, "tau": 6, "merge": "mix", "alpha": 0.3},
        3,
        num_steps=27,
    ),
    "cocodc": cocodc("outer_product", reference.outer_product, "pseudo_gradient"),
    "cocodc_paper text": compensated(
        "cocodc_paper", reference.outer_product, "pseudo_gradient", rule="text"
    ),
    "cocodc_paper code": compensated(
        "cocodc_paper", reference.as_coded, "drift", strength=1.0, rule="code"
    ),
}
CURVATURES = {
    "none": cocodc("none", reference.no_curvature, "round_robin", "sgd"),
    "isotropic": cocodc("isotropic", reference.isotropic(3), "drift"),
    "outer_product of gradients": cocodc(
        "outer_product",
        reference.outer_product_of_gradients,
        "pseudo_gradient",
        "sgd",
        curvature_units="gradient",
    ),
    "normalized": cocodc("normalized_outer_product", reference.normalized, "aged"),
    "secant": cocodc("secant", reference.secant, "drift", "sgd"),
    "adam_second_moment": cocodc(
        "adam_second_moment", reference.adam_second_moment, "gain"
    ),
    "hessian_vector": cocodc(
        "hessian_vector",
        reference.hessian_vector_sgd,
        "rms",
        "sgd",
        curvature_units="parameter",
    ),
    "hessian_vector, adam": cocodc(
        "hessian_vector", reference.hessian_vector_adam, "disagreement"
    ),
}


WAYS = list(itertools.product(METHODS, PROBLEMS, TOLERANCE))
# Each method in float64, once in float32, and each problem.
QUICK = [
    ("data_parallel", "plain", np.float64),
    ("diloco", "stacked", np.float64),
    ("streaming_diloco", "stacked", np.float64),
    ("streaming_diloco", "plain", np.float32),
    ("cocodc", "plain", np.float64),
    ("cocodc", "stacked", np.float64),
    ("cocodc_paper text", "plain", np.float64),
    ("cocodc_paper code", "stacked", np.float64),
]


@pytest.mark.parametrize(("name", "problem", "dtype"), mostly_slow(WAYS, quick=QUICK))
def test_each_method_equals_its_formula(name, problem, dtype):
    assert_agree(PROBLEMS[problem], METHODS[name], dtype)


# Of the two Hessians one, of products of gradients one.
QUICK_CURVATURES = (
    "isotropic",
    "outer_product of gradients",
    "secant",
    "adam_second_moment",
    "hessian_vector, adam",
)


@pytest.mark.parametrize("name", mostly_slow(CURVATURES, quick=QUICK_CURVATURES))
def test_each_curvature_equals_its_formula(name):
    problem = dataclasses.replace(PROBLEMS["plain"], num_devices=NUM_REGIONS)
    assert_agree(problem, CURVATURES[name], np.float64)
