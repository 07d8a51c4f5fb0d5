"""LT-ADMM-CC: the sign of its z update, its rest, and that it gets there."""

import jax
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sharding.mesh import make_mesh
from cocodc_jax.train.run_steps import run

# f_i(x) = a_i (x - b_i)^2 / 2 of four regions: curvatures and minimisers all differ.
CURVATURES = np.array([0.5, 1.0, 2.0, 1.5])
MINIMISERS = np.array([4.0, -2.0, 1.0, 3.0])
LR, RHO, ROUNDS = 0.1, 0.5, 400
OPTIMUM = (CURVATURES * MINIMISERS).sum() / CURVATURES.sum()


def published(sign):
    """LT-ADMM on a ring, edge by edge, with 2 rho x_j added or taken off."""
    x, z = np.zeros(4), np.zeros((4, 4))
    edges = [(i, (i + by) % 4) for i in range(4) for by in (1, -1)]
    for _ in range(ROUNDS):
        for _ in range(3):
            pull = np.array([z[i, (i + 1) % 4] + z[i, i - 1] for i in range(4)])
            x = x - LR * (CURVATURES * (x - MINIMISERS) + 2 * RHO * x - pull)
        old = z.copy()
        for i, j in edges:
            z[i, j] = (old[i, j] - old[j, i] + sign * 2 * RHO * x[j]) / 2
    return x


def test_with_a_plus_it_comes_to_the_minimiser_of_the_sum():
    np.testing.assert_allclose(published(1), OPTIMUM, atol=1e-12)


def test_with_a_minus_it_never_comes_there():
    """Neighbours drive one another away; even the point of rest would be another."""
    assert np.abs(published(-1)).min() > 1e6
    elsewhere = (CURVATURES * MINIMISERS).sum() / (CURVATURES.sum() + 4 * RHO * 4)
    assert abs(elsewhere - OPTIMUM) > 0.5


@pytest.mark.parametrize(
    ("graph", "compress"), [("ring", "int8"), ("complete", "topk:0.5")]
)
def test_regions_come_to_the_exact_minimiser(graph, compress):
    """Also where half or a quarter of each message is all that is sent.

    Two numbers a region, so that top-k leaves one out.
    """

    def loss_fn(params, batch, key):
        return (batch[0] * (params["w"] - batch[1]) ** 2).sum() / 2, {}

    with jax.enable_x64(True):
        params = {"w": np.zeros(2)}
        method = methods.get(
            "lt_admm", sync_interval=3, admm_penalty=RHO, graph=graph, compress=compress
        )
        program = RegionProgram(
            loss_fn, optax.sgd(LR), method, params, 4,
            mesh=make_mesh(4, devices=jax.devices()[:1]),
        )  # fmt: skip
        state = program.init(params, jax.random.key(0))
        minimisers = np.stack([MINIMISERS, 2 - MINIMISERS], 1)
        curvatures = np.stack([CURVATURES, CURVATURES], 1)
        batch = np.stack([curvatures, minimisers], 1)
        for new, _ in run(program, state, iter([batch] * 3 * ROUNDS), 3 * ROUNDS):
            state = new
        local = np.asarray(state.region.params["w"])
        outer = np.asarray(program.outer_params(state)["w"])
    expected = np.array([OPTIMUM, 2 - OPTIMUM])
    # Scales of int8 are float32: what a region believes to have told and what the
    # others heard may differ by its rounding, as the compiler fuses both.
    atol = 1e-5 if compress == "int8" else 1e-9
    np.testing.assert_allclose(local, np.tile(expected, (4, 1)), atol=atol)
    np.testing.assert_allclose(outer, expected, atol=atol)
