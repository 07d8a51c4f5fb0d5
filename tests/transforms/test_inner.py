"""Inner optimizers: Muon, Adam of several time scales, and Distributed Lion."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax.transforms import lion
from cocodc_jax.transforms.compressor import message_bytes
from cocodc_jax.transforms.mt_adam import mt_adam, scale_by_mt_adam
from cocodc_jax.transforms.muon import matrix_axes, muon
from tests.numerics import assert_all_close
from tests.program.family_reference import Momenta

LAYERS = 2
WIDTH = 4
MLP = 6
VOCAB = 11
ONES = np.ones(2, np.float32)


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

    step = x
    state = optimizer.init(x)
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


def test_three_steps_of_muon_equal_the_formula():
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


def test_muon_moves_scanned_and_unscanned_blocks_equally():
    scanned, _ = run(muon(0.1), params())
    unscanned, _ = run(muon(0.1), params(is_scanned=False))
    for i, block in unscanned["blocks"].items():
        for a, b in zip(
            jax.tree.leaves(block), jax.tree.leaves(scanned["blocks"]), strict=True
        ):
            np.testing.assert_allclose(a, b[i], atol=1e-5)
    np.testing.assert_allclose(unscanned["head"], scanned["head"], atol=1e-6)


def test_muon_leaves_vectors_and_embeddings_to_adam():
    x = params()
    step, _ = run(muon(0.1, weight_decay=0.2, b1=0.8, b2=0.9), x)
    adam = optax.adamw(0.1, 0.8, 0.9, weight_decay=0.2)
    wanted, _ = run(adam, x)

    def rest(tree):
        return (
            tree["embedding"],
            tree["head"],
            tree["norm"]["scale"],
            tree["blocks"]["mlp_norm"]["scale"],
        )

    assert_all_close(rest(step), rest(wanted), atol=1e-6)

    up = step["blocks"]["mlp"]["up"]
    assert np.max(np.abs(up - wanted["blocks"]["mlp"]["up"])) > 0.01


def test_a_schedule_scales_every_leaf():
    schedule = optax.piecewise_constant_schedule(0.1, {2: 0.0})
    moving, _ = run(muon(schedule), params(), steps=2)
    still, _ = run(muon(schedule), params(), steps=3)
    assert all(np.all(x != 0) for x in jax.tree.leaves(moving))
    assert all(np.all(x == 0) for x in jax.tree.leaves(still))


def test_matrix_axes_are_found_in_lists_and_partial_trees():
    assert matrix_axes({"head": jnp.ones((3, 4))}) == {"head": None}
    axes = matrix_axes({"blocks": [{"up": jnp.ones((2, 3)), "norm": jnp.ones(2)}]})
    assert axes["blocks"][0]["norm"] is None
    assert axes["blocks"][0]["up"].output_axis == -1


# --- Adam of several time scales ---

B1S = (0.9, 0.99)
WEIGHTS = (0.6, 0.3)
B2 = 0.95
EPS = 1e-8
GRADIENTS = np.random.default_rng(0).normal(size=(9, 5))


def steps_of(transform, gradients=GRADIENTS):
    state = transform.init(jnp.zeros(5))
    update = jax.jit(transform.update)
    steps = []
    for gradient in gradients:
        step, state = update(jnp.asarray(gradient), state)
        steps.append(np.asarray(step))
    return np.stack(steps)


@pytest.mark.parametrize(
    ("b1s", "weights"), [(B1S, WEIGHTS), ((0.999,), (0.7,)), (B1S, (0.3, 0.7))]
)
def test_mt_adam_equals_its_formula(b1s, weights):
    with jax.enable_x64(True):
        actual = steps_of(scale_by_mt_adam(b1s, weights, B2, EPS))

    oracle = Momenta(1.0, b1s, weights, B2)
    expected = [-oracle.step(np.zeros(5), gradient) for gradient in GRADIENTS]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10)


def test_mt_adam_with_one_momentum_of_weight_one_is_adamw():
    params = {"w": jnp.arange(5.0)}
    gradient = {"w": jnp.asarray(GRADIENTS[0], jnp.float32)}
    optimizers = (mt_adam(0.1, (0.9,), (1.0,)), optax.adamw(0.1))
    ours, adamw = (
        optimizer.update(gradient, optimizer.init(params), params)[0]["w"]
        for optimizer in optimizers
    )
    np.testing.assert_allclose(ours, adamw, rtol=1e-5)


def test_moments_of_narrow_parameters_are_wide():
    """In bfloat16 0.999 of a momentum is rounded back to it: it would not turn."""
    params = jnp.zeros(3, jnp.bfloat16)
    optimizer = scale_by_mt_adam((0.999,), (1.0,))
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for i in range(600):
        gradient = jnp.full(3, 1.0 if i < 200 else -1.0, jnp.bfloat16)
        step, state = update(gradient, state, params)

    assert step.dtype == jnp.bfloat16
    expected = 1 - 2 * 0.999**400 + 0.999**600
    np.testing.assert_allclose(state.mu[0], -expected, rtol=1e-3)


# --- Distributed Lion ---


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_lion_sends_signs_of_small_numbers_and_plus_one_for_zeros(dtype):
    gradient = jnp.array([-1e-7, 1e-7, 0.0, -0.0], dtype)
    message, _ = lion.send(gradient, lion.init(gradient))
    direction = lion.combine(jax.tree.map(lambda x: x[None], message))
    assert direction.dtype == dtype
    assert direction.tolist() == [-1, 1, 1, 1]


def test_one_bit_a_value_exactly():
    params = {"w": jnp.ones((3, 8)), "b": [jnp.ones(9, jnp.bfloat16), None]}
    message, state = lion.send(params, lion.init(params))
    assert message_bytes(message) == 3 + 2 + 1  # The last says that it counts.
    assert state.momentum["b"][0].dtype == jnp.float32
    back = lion.sign_bits().decode(message.signs)
    assert jax.eval_shape(lambda: back) == jax.eval_shape(lambda: params)


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        (scale_by_mt_adam, (B1S, (0.5,)), r"weights=\(0.5,\) must be one for each of"),
        (scale_by_mt_adam, (B1S, (0.5, -0.1)), r"weights=.* none below 0"),
        (scale_by_mt_adam, (B1S, (0.5, np.nan)), r"weights=.*nan.* none below 0"),
        (scale_by_mt_adam, (B1S, (0.6, 0.5)), r"weights=\(0.6, 0.5\) must add up to 1"),
        (scale_by_mt_adam, ((1.0,), (0.5,)), "b1s=1.0 must be at least 0 and below 1"),
        (lion.send, (ONES, lion.init(ONES), 1.0), r"b1=1\.0 must be"),
        (lion.send, (ONES, lion.init(ONES), 0.9, -1), "b2=-1 must be"),
        (lion.combine, ((), "vote"), "rule='vote' is unknown; use one of"),
    ],
)
def test_wrong_arguments_are_named(call, options, message):
    with pytest.raises(ValueError, match=message):
        call(*options)
