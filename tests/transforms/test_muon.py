"""Muon on a transformer's tree: each layer by itself, Adam where it belongs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax.transforms.muon import matrix_axes, muon

LAYERS, WIDTH, MLP, VOCAB = 2, 4, 6, 11


def params(seed=0, is_scanned=True):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    blocks = {
        "attention": {"query": draw(LAYERS, WIDTH, WIDTH)},
        "mlp": {"up": draw(LAYERS, WIDTH, MLP), "down": draw(LAYERS, MLP, WIDTH)},
        "mlp_norm": {"scale": draw(LAYERS, WIDTH)},
    }
    if not is_scanned:
        cut = lambda i: jax.tree.map(lambda x: x[i], blocks)  # noqa: E731
        blocks = {i: cut(i) for i in range(LAYERS)}
    ends = {"embedding": draw(VOCAB, WIDTH), "head": draw(WIDTH, VOCAB)}
    return ends | {"blocks": blocks, "norm": {"scale": draw(WIDTH)}}


def run(optimizer, x, steps=3):
    """Return the last step and the state; gradients change with the step."""

    @jax.jit
    def advance(x, state, i):
        gradients = jax.tree.map(lambda p: jnp.cos(3 * p + i), x)
        step, state = optimizer.update(gradients, state, x)
        return step, state, optax.apply_updates(x, step)

    step, state = x, optimizer.init(x)
    for i in range(steps):
        step, state, x = advance(x, state, np.asarray(i, jax.tree.leaves(x)[0].dtype))
    return step, state


def newton_schulz(x):
    """Jordan's quintic iteration in NumPy, on matrices with fewer rows than columns."""
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T).T
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def test_three_steps_are_the_formula():
    """B <- 0.9 B + G; W <- W - lr (sqrt(out / in) UV' + wd W), a layer at a time.

    Adam's small number in the length of B is all that differs: 1e-8 of it.
    """
    with jax.enable_x64(True):
        x = jax.tree.map(lambda p: np.asarray(p, np.float64), params())
        optimizer = muon(0.1, weight_decay=0.2)
        state = optimizer.init(x)

        @jax.jit
        def advance(x, state, gradients):
            step, state = optimizer.update(gradients, state, x)
            return optax.apply_updates(x, step), state

        weights = {n: np.array(w) for n, w in x["blocks"]["mlp"].items()}
        buffers = {n: np.zeros_like(w) for n, w in weights.items()}
        for i in range(3):
            gradients = jax.tree.map(lambda p, i=i: np.cos(3 * p + i), x)
            x, state = jax.device_get(advance(x, state, gradients))
            for n, w in weights.items():
                buffers[n] = 0.9 * buffers[n] + np.cos(3 * w + i)
                size = np.sqrt(w.shape[2] / w.shape[1])
                polar = np.stack([newton_schulz(b) for b in buffers[n]])
                weights[n] = w - 0.1 * (size * polar + 0.2 * w)
                np.testing.assert_allclose(
                    x["blocks"]["mlp"][n], weights[n], rtol=0, atol=1e-6
                )


@pytest.mark.parametrize(("shape", "size"), [((8, 2), 0.5), ((2, 8), 2.0)])
def test_the_size_goes_by_the_shape_and_is_not_cut_at_one(shape, size):
    """A matrix of rank one with length 1 becomes one singular value, near 1."""
    gradient = {"blocks": {"0": {"w": jnp.ones(shape) / 4}}}
    optimizer = muon(1.0, weight_decay=0.0)
    step, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)
    one = newton_schulz(np.ones(shape) / 4)
    np.testing.assert_allclose(step["blocks"]["0"]["w"], -size * one, atol=1e-6)
    assert 0.6 < np.linalg.norm(one) < 1.2


def test_scanned_and_unscanned_blocks_move_alike():
    scanned, _ = run(muon(0.1), params())
    unscanned, _ = run(muon(0.1), params(is_scanned=False))
    for i, block in unscanned["blocks"].items():
        for a, b in zip(
            jax.tree.leaves(block), jax.tree.leaves(scanned["blocks"]), strict=True
        ):
            np.testing.assert_allclose(a, b[i], atol=1e-5)
    np.testing.assert_allclose(unscanned["head"], scanned["head"], atol=1e-6)


def test_the_rest_takes_adam():
    x = params()
    step, _ = run(muon(0.1, weight_decay=0.2, b1=0.8, b2=0.9), x)
    adam = optax.adamw(0.1, 0.8, 0.9, weight_decay=0.2)
    wanted, _ = run(adam, x)
    for pick in (
        lambda t: t["embedding"],
        lambda t: t["head"],
        lambda t: t["norm"]["scale"],
        lambda t: t["blocks"]["mlp_norm"]["scale"],
    ):
        np.testing.assert_allclose(pick(step), pick(wanted), atol=1e-6)
    up = (step["blocks"]["mlp"]["up"], wanted["blocks"]["mlp"]["up"])
    assert np.max(np.abs(up[0] - up[1])) > 0.01


def test_a_schedule_scales_every_leaf():
    schedule = optax.piecewise_constant_schedule(0.1, {2: 0.0})
    moving, _ = run(muon(schedule), params(), steps=2)
    still, _ = run(muon(schedule), params(), steps=3)
    assert all(np.all(x != 0) for x in jax.tree.leaves(moving))
    assert all(np.all(x == 0) for x in jax.tree.leaves(still))


def test_matrix_axes_of_lists_and_partial_trees():
    assert matrix_axes({"head": jnp.ones((3, 4))}) == {"head": None}
    axes = matrix_axes({"blocks": [{"up": jnp.ones((2, 3)), "norm": jnp.ones(2)}]})
    assert axes["blocks"][0]["norm"] is None
    assert axes["blocks"][0]["up"].output_axis == -1
