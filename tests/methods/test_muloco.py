"""MuLoCo: two rounds by hand, what is sent of norms, and its inner optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cocodc_jax import methods
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.train.run_steps import run


def test_two_rounds_by_hand():
    """Of a matrix of one row and a norm; both regions alike, eta 0.9, mu 0.8.

        e     -4    0    0    6    8      mean 2, sigma sqrt(24): bins end at -9.0, -1.7
        q     -4    0    0    7    7      and 5.7
        m = q;  theta = -0.9 (q + 0.8 m) = -1.62 q
        e     -4    0    0  5.1  8.9      0.9 of (0, 0, 0, -1, 1) and the same again
        q     -4  1.7  1.7  1.7  8.9      sigma 5.03: the upper bin begins at 5.8
        m   -7.2  1.7  1.7  7.3 14.5      0.8 (-4, 0, 0, 7, 7) + q
        theta <- theta - 0.9 (q + 0.8 m)

    The norm is sent whole: q = 2, then m = 3.6: -0.9 (3.6 + 4.88).
    """
    gradient = {"w": np.float32([[-4, 0, 0, 6, 8]]), "norm": np.float32([2])}
    params = jax.tree.map(jnp.zeros_like, gradient)
    method = methods.get("muloco", sync_interval=1)

    def loss_fn(p, batch, key):
        return batch[0] * sum(jnp.sum(p[n] * gradient[n]) for n in p), {}

    program = RegionProgram(loss_fn, optax.sgd(1.0), method, params, 2)
    state = program.init(params, jax.random.key(0))
    for after, _ in run(program, state, iter([np.ones((2, 1), np.float32)] * 2), 2):
        state = after
    outer = program.outer_params(state)
    expected = [[15.264, -2.754, -2.754, -18.126, -29.79]]
    np.testing.assert_allclose(outer["w"], expected, rtol=1e-5)
    np.testing.assert_allclose(outer["norm"], [-0.9 * (2 + 1.6 + 2 + 2.88)], rtol=1e-6)
    # Five codes and a table; a float32.
    assert state.bytes_sent == 2 * (2 + 16 + 4)


def test_its_parts():
    method = methods.get("muloco")
    assert method.inner.optimizer == "muon"
    assert method.sync.message.by.name == "error_feedback(matrices(stat2))"
    assert method.schedule.sync_interval == 30
