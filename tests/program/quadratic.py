"""A quadratic in four regions, trained step by step, on which limits are compared.

Two methods are two programs, which are equal to a few roundings of float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cocodc_jax import methods
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sync.cutting import cut_by_patterns
from cocodc_jax.sync.needs import UserInputs
from tests.program.tiny import follow

LR = 0.1
NUM_REGIONS = 4
NUM_STEPS = 12
SHAPES = {"a": (2, 2), "b": (3,), "c": (2,)}
RNG = np.random.default_rng(0)
ROOT = RNG.normal(size=(9, 9)) / 3
HESSIAN = ROOT @ ROOT.T + 0.3 * np.eye(9)
PARAMS = {n: RNG.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}
# One target for each step and region, around an optimum of the region.
TARGETS = RNG.normal(size=(NUM_REGIONS, 9)) + RNG.normal(size=(NUM_STEPS, 4, 9)) / 4
TARGETS = TARGETS.astype(np.float32)
OUTER = {"outer_lr": 0.4, "outer_momentum": 0.9}


def gap_fn(params, target):
    return jnp.concatenate([params[n].reshape(-1) for n in SHAPES]) - target


def square_fn(gap, target):
    del target
    return gap @ jnp.asarray(HESSIAN, gap.dtype) @ gap / 2


def loss_fn(params, target, key):
    return square_fn(gap_fn(params, target), target), {}


def slope_fn(params, target, key):
    """The same gradient, `target`, wherever the parameters are."""
    return gap_fn(params, 0 * target) @ target, {}


def make(method, regions=NUM_REGIONS, optimizer=None, loss=loss_fn, patterns=None):
    return RegionProgram(
        loss,
        optimizer or optax.sgd(LR),
        method,
        PARAMS,
        regions,
        fragments=patterns and cut_by_patterns(PARAMS, patterns),
        user_inputs=UserInputs(LR, outputs=(gap_fn, square_fn)),
    )


def run(program, targets=TARGETS, stops=()):
    """Trains over `targets`, and gives `(local, outer)` at each stop and at the end."""
    state = program.init(PARAMS, jax.random.key(0))
    seen = []
    targets = targets[:, : program.num_regions]
    for stop in (*stops, len(targets)):
        state, _ = follow(program, state, targets[state.step :], stop - state.step)
        seen.append(jax.device_get((state.region.params, program.outer_params(state))))
    return seen if stops else seen[-1]


def case(name, **options):
    """Return the key by which `trained` finds a method and its arguments."""
    return name, tuple(options.items())


@functools.cache
def trained(key, regions=NUM_REGIONS):
    """Train a method, once for all callers."""
    name, options = key
    return run(make(methods.get(name, **dict(options)), regions))


def join(params):
    return np.concatenate([params[n].ravel() for n in SHAPES])
