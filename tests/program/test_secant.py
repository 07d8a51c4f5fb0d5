"""The secant weight in the region program, against NumPy written from the formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sharding.mesh import make_mesh
from cocodc_jax.train.run_steps import run
from tests.program.tiny import saved_and_restored

LR, OUTER_LR, MOMENTUM, STRENGTH = 0.05, 0.4, 0.9, 0.8
INTERVAL, DELAY, STEPS = 8, 5, 29
RNG = np.random.default_rng(0)
ROOT = RNG.normal(size=(5, 5))
HESSIAN = ROOT @ ROOT.T / 5 + 0.3 * np.eye(5)
START = {"a": RNG.normal(size=3), "b": RNG.normal(size=2)}
TARGETS = RNG.normal(size=(STEPS, 2, 5))


def loss_fn(params, target, key):
    gap = jnp.concatenate([params["a"], params["b"]]) - target
    return gap @ jnp.asarray(HESSIAN, gap.dtype) @ gap / 2, {}


def make_program():
    method = methods.get(
        "cocodc", sync_interval=INTERVAL, num_fragments=1, delay_steps=DELAY,
        syncs_per_interval=1, curvature="secant", compensation_strength=STRENGTH,
        outer_lr=OUTER_LR, outer_momentum=MOMENTUM,
    )  # fmt: skip
    return RegionProgram(loss_fn, optax.sgd(LR), method, START, 2, mesh=make_mesh(2))


def by_hand():
    """Two regions, one fragment: every eight steps, merged five later."""
    cut = {"a": slice(0, 3), "b": slice(3, 5)}
    outer = np.concatenate([START["a"], START["b"]])
    local, m = np.stack([outer, outer]), np.zeros(5)
    ratios = []
    for t in range(1, STEPS + 1):
        local = local - LR * (local - TARGETS[t - 1]) @ HESSIAN
        since = t % INTERVAL
        if since == 0:
            staged = local.copy()
        elif since == DELAY // 2 and t > INTERVAL:
            midway = local.copy()
        elif since == DELAY and t > INTERVAL:
            delta = (outer - staged).mean(0)
            m = MOMENTUM * m + delta
            outer = outer - OUTER_LR * (delta + MOMENTUM * m)
            for r in range(2):
                g = (staged[r] - local[r]) / DELAY
                first = (staged[r] - midway[r]) / 2
                second = (midway[r] - local[r]) / 3
                step, far = midway[r] - staged[r], outer - staged[r]
                correction = np.zeros(5)
                for part in cut.values():
                    # Isotropic: B = I / tau.
                    predicted = step[part] / DELAY
                    change = (second - first)[part]
                    w = np.clip(change @ predicted / (predicted @ predicted), 0, 1)
                    correction[part] = STRENGTH * w * far[part] / DELAY
                ratios.append(np.linalg.norm(correction) / np.linalg.norm(g))
                local[r] = outer - DELAY * (g + correction)
    return local, outer, ratios


def test_the_region_program_follows_the_formulas():
    with jax.enable_x64(True):
        program = make_program()
        state = program.init(START, jax.random.key(0))
        ratios = []
        for new, output in run(program, state, iter(TARGETS), STEPS):
            state = new
            for sync in output.syncs:
                ratios += np.asarray(sync.metrics["correction_ratio"]).tolist()
        local, outer, expected = by_hand()
        assert len(expected) == 6
        assert max(expected) > 0.01  # The weight is not clipped away.
        ours = np.concatenate(
            [np.asarray(state.region.params[n]) for n in ("a", "b")], axis=1
        )
        np.testing.assert_allclose(ours, local, rtol=1e-11)
        joined = program.outer_params(state)
        np.testing.assert_allclose(
            np.concatenate([joined["a"], joined["b"]]), outer, rtol=1e-11
        )
        np.testing.assert_allclose(ratios, expected, rtol=1e-6)  # Float32 metrics.


@pytest.mark.parametrize("cut", [9, 11])
def test_a_run_goes_on_from_before_and_after_midway(tmp_path, cut):
    """Started at 8, midway at 10, merged at 13."""
    params = jax.tree.map(lambda x: x.astype(np.float32), START)
    targets = TARGETS.astype(np.float32)
    program = make_program()

    def finish(state, last):
        for new, _ in run(
            program, state, iter(targets[state.step :]), last - state.step
        ):
            state = new
        return jax.tree.map(np.asarray, (state.region, state.sync.outer)), state

    whole, _ = finish(program.init(params, jax.random.key(0)), 15)
    _, state = finish(program.init(params, jax.random.key(0)), cut)
    assert ("midway" in state.sync.in_flight[0, 8].kept) == (cut > 10)
    _, restored = saved_and_restored(program, state, tmp_path)
    again, _ = finish(restored, 15)
    jax.tree.map(np.testing.assert_array_equal, again, whole)
