"""Outer optimizers against loops in NumPy, and their limits that optax knows."""

from inspect import unwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax.transforms import co2, outer, snoo


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def arrivals():
    return np.random.default_rng(0).normal(size=(9, 4))


def run(optimizer, gradients, x, extras=None):
    """Return the parameters after every update."""
    optimizer = optax.with_extra_args_support(optimizer)
    x, path = jnp.asarray(x), []
    state = optimizer.init(x)
    update = jax.jit(lambda g, s, p, e: optimizer.update(g, s, p, **e))
    for i, g in enumerate(gradients):
        step, state = update(g, state, x, extras(i, x) if extras else {})
        x = optax.apply_updates(x, step)
        path.append(np.asarray(x))
    return np.array(path), state


@pytest.mark.parametrize(("n", "c"), [(1, 0.0), (3, 0.0), (3, 1 / 3), (4, 0.1)])
def test_delayed_nesterov(arrivals, n, c):
    lr, b = 0.3, 0.8
    actual, _ = run(outer.delayed_nesterov(lr, b, n, c), arrivals, np.ones(4))
    theta, m, total = np.ones(4), np.zeros(4), np.zeros(4)
    for t, g in enumerate(arrivals):
        total = total + g
        if (t + 1) % n == 0:
            m = b * m + total / n
            theta = theta - lr * ((1 - c * n + c) * b * m + g / n)
            total = np.zeros(4)
        else:
            theta = theta - lr * (c * b * m + g / n)
        np.testing.assert_allclose(actual[t], theta, rtol=1e-12)


def test_delayed_nesterov_of_one_is_nesterov(arrivals):
    actual, _ = run(outer.delayed_nesterov(0.3, 0.9, 1), arrivals, np.ones(4))
    wanted, _ = run(optax.sgd(0.3, 0.9, nesterov=True), arrivals, np.ones(4))
    np.testing.assert_allclose(actual, wanted, rtol=1e-12)


def test_group_of_one_is_a_heavy_ball(arrivals):
    alone = lambda i, x: {"group_mean_params": x}  # noqa: E731
    actual, _ = run(outer.group_heavy_ball(0.7, 0.5), arrivals, np.ones(4), alone)
    wanted, _ = run(optax.sgd(0.7, momentum=0.5), arrivals, np.ones(4))
    np.testing.assert_allclose(actual, wanted, rtol=1e-12)


def test_clipped_momentum_clips_what_it_keeps(arrivals):
    optimizer = co2.scale_by_clipped_momentum(0.9, 0.5)
    actual, state = run(optimizer, arrivals, np.zeros(4))
    x, m = np.zeros(4), np.zeros(4)
    for t, g in enumerate(arrivals):
        m = np.clip(0.9 * m + g, -0.5, 0.5)
        x = x + m
        np.testing.assert_allclose(actual[t], x, rtol=1e-12)
    assert np.max(np.abs(state.momentum)) == 0.5
    free, _ = run(co2.scale_by_clipped_momentum(0.9, np.inf), arrivals, np.zeros(4))
    wanted, _ = run(optax.trace(0.9), arrivals, np.zeros(4))
    np.testing.assert_allclose(free, wanted, rtol=1e-12)


def test_staleness_gap_of_parameters_that_stand_still_is_one():
    transform = co2.scale_by_staleness_gap()
    zero = jnp.zeros(2)
    g, state = transform.update(zero + 3, transform.init(zero), zero, stale_params=zero)
    np.testing.assert_array_equal(g, [3.0, 3.0])
    assert state.gap == 1


def test_rounds_without_a_move_do_not_count_into_the_usual_move():
    moves, gaps = [0.0, 1.0, 3.0, 0.0, 4.0], [1.0, 1.0, 3.0, 1.0, 2.0]  # means 1, 2
    transform = co2.scale_by_staleness_gap()
    state = transform.init(jnp.zeros(2))
    for move, gap in zip(moves, gaps, strict=True):
        now, stale = jnp.array([0.6, 0.8]) * move, jnp.zeros(2)
        _, state = transform.update(jnp.ones(2), state, now, stale_params=stale)
        np.testing.assert_allclose(state.gap, gap, rtol=1e-6)
    assert state.num_rounds == 3
    assert state.num_rounds.dtype == jnp.int32


def test_snoo_is_diloco_of_one_region(arrivals):
    inner_lr, lr, b, h = 0.1, 0.7, 0.9, 3
    optimizer = snoo.snoo(optax.sgd(inner_lr, momentum=0.5), lr, b, h)
    actual, _ = run(optimizer, arrivals, np.ones(4))
    x, w, m, inner = np.ones(4), np.ones(4), np.zeros(4), np.zeros(4)
    for t, g in enumerate(arrivals):
        inner = 0.5 * inner + g
        w = w - inner_lr * inner
        if (t + 1) % h == 0:
            m = b * m + (x - w)
            x = x - lr * ((x - w) + b * m)
            w = x
        np.testing.assert_allclose(actual[t], w, rtol=1e-12)


def test_snoo_without_momentum_and_rate_one_is_the_inner_optimizer(arrivals):
    actual, _ = run(snoo.snoo(optax.adam(0.1), 1.0, 0.0, 2), arrivals, np.ones(4))
    wanted, _ = run(optax.adam(0.1), arrivals, np.ones(4))
    np.testing.assert_allclose(actual, wanted, rtol=1e-12)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: outer.delayed_nesterov(1.0, momentum=1.0), r"momentum=1\.0"),
        (lambda: outer.delayed_nesterov(1.0, buffer_size=0), "buffer_size=0"),
        (lambda: outer.group_heavy_ball(momentum=-0.1), r"momentum=-0\.1"),
        (lambda: co2.co2(momentum=2.0), r"momentum=2\.0"),
        (lambda: co2.co2(max_abs=0.0), r"max_abs=0\.0"),
        (lambda: co2.co2(gap="x"), "staleness_gap='x' is unknown; use one of"),
        (lambda: snoo.snoo(optax.sgd(1.0), sync_interval=0), "sync_interval=0"),
        (lambda: snoo.snoo(optax.sgd(1.0), momentum=1.5), r"momentum=1\.5"),
        # Unwrapped, as users have them: only in tests are types checked at every call.
        (lambda: unwrap(snoo.snoo)(optax.sgd(1.0), sync_interval=2.5),
         r"sync_interval=2\.5 must be a whole number"),
        (lambda: unwrap(outer.scale_by_delayed_nesterov)(buffer_size=2.5),
         r"buffer_size=2\.5 must be a whole number"),
        (lambda: unwrap(snoo.snoo)(optax.adam),
         r"inner=<function adam .*must be an optax\.GradientTransformation"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (outer.group_heavy_ball(), "params and group_mean_params"),
        (co2.scale_by_staleness_gap(), "params and stale_params"),
        (snoo.snoo(optax.sgd(1.0)), "snoo needs params"),
    ],
)
def test_missing_arguments_are_named(optimizer, message):
    zero = jnp.zeros(1)
    with pytest.raises(ValueError, match=message):
        optimizer.update(zero, optimizer.init(zero))


def test_a_state_made_eagerly_can_be_donated():
    transform, params = outer.delayed_nesterov(0.7), {"w": jnp.ones(3)}
    update = jax.jit(transform.update, donate_argnums=1)
    step, state = update(params, transform.init(params))
    np.testing.assert_allclose(step["w"], -0.7 / 4, rtol=1e-6)
    update(params, state)


def test_a_move_that_is_not_finite_is_no_usual_one():
    transform, place = outer.scale_by_staleness_gap(), jnp.zeros(1)
    state, gaps = transform.init(place), []
    for move in (1.0, np.inf, 1.0, 100.0):
        _, state = transform.update(place, state, jnp.full(1, move), stale_params=place)
        gaps.append(float(state.gap))
    assert gaps == [1, np.inf, 1, 100]
    assert state.num_rounds == 3


def test_the_gap_has_a_gradient_where_nothing_moved():
    transform, place = outer.scale_by_staleness_gap(), jnp.zeros(2)
    state = transform.init(place)._replace(mean_move=jnp.float32(1), num_rounds=1)

    def first(params):
        return transform.update(place, state, params, stale_params=place)[0].sum()

    np.testing.assert_array_equal(jax.grad(first)(place), [0, 0])
