"""Outer optimizers against loops in NumPy, and their limits that optax knows."""

from inspect import unwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax.transforms import heloco, outer, primal_average
from tests.program import family_reference as reference

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def arrivals():
    return np.random.default_rng(0).normal(size=(9, 4))


def run(optimizer, gradients, x, extras=None):
    """Return the parameters after every update."""
    optimizer = optax.with_extra_args_support(optimizer)
    x = jnp.asarray(x)
    path = []
    state = optimizer.init(x)
    update = jax.jit(lambda g, s, p, e: optimizer.update(g, s, p, **e))

    for i, g in enumerate(gradients):
        step, state = update(g, state, x, extras(i, x) if extras else {})
        x = optax.apply_updates(x, step)
        path.append(np.asarray(x))

    return np.array(path), state


@pytest.mark.parametrize(("n", "c"), [(1, 0.0), (3, 0.0), (3, 1 / 3), (4, 0.1)])
def test_delayed_nesterov(arrivals, n, c):
    actual, _ = run(outer.delayed_nesterov(0.3, 0.8, n, c), arrivals, np.ones(4))
    x = np.ones(4)
    take = reference.delayed_nesterov(0.3, 0.8, n, c)
    for t, g in enumerate(arrivals):
        x = take(x, g)
        np.testing.assert_allclose(actual[t], x, rtol=1e-12)


def test_group_of_one_is_a_heavy_ball(arrivals):
    alone = lambda i, x: {"group_mean_params": x}  # noqa: E731
    actual, _ = run(outer.group_heavy_ball(0.7, 0.5), arrivals, np.ones(4), alone)
    wanted, _ = run(optax.sgd(0.7, momentum=0.5), arrivals, np.ones(4))
    np.testing.assert_allclose(actual, wanted, rtol=1e-12)


def test_staleness_gap_of_parameters_that_stand_still_is_one():
    transform = outer.scale_by_staleness_gap()
    zero = jnp.zeros(2)
    g, state = transform.update(zero + 3, transform.init(zero), zero, stale_params=zero)
    np.testing.assert_array_equal(g, [3.0, 3.0])
    assert state.gap == 1


def test_rounds_without_a_move_do_not_count_into_the_usual_move():
    moves = [0.0, 1.0, 3.0, 0.0, 4.0]  # means 1, 2
    gaps = [1.0, 1.0, 3.0, 1.0, 2.0]
    transform = outer.scale_by_staleness_gap()
    state = transform.init(jnp.zeros(2))

    for move, gap in zip(moves, gaps, strict=True):
        now = jnp.array([0.6, 0.8]) * move
        stale = jnp.zeros(2)
        _, state = transform.update(jnp.ones(2), state, now, stale_params=stale)
        np.testing.assert_allclose(state.gap, gap, rtol=1e-6)

    assert state.num_rounds == 3
    assert state.num_rounds.dtype == jnp.int32


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: outer.delayed_nesterov(1.0, momentum=1.0), r"momentum=1\.0"),
        (lambda: outer.delayed_nesterov(1.0, buffer_size=0), "buffer_size=0"),
        (lambda: outer.group_heavy_ball(momentum=-0.1), r"momentum=-0\.1"),
        (lambda: outer.co2(momentum=2.0), r"momentum=2\.0"),
        (lambda: primal_average.primal_average(1.0),
         r"eval_interpolation=1\.0 must be at least 0 and below 1"),
        (lambda: primal_average.primal_start(1.5),
         r"train_interpolation=1\.5 must be between 0 and 1"),
        (lambda: outer.co2(max_abs=0.0), r"max_abs=0\.0"),
        (lambda: heloco.heloco(momentum=1.0), r"momentum=1\.0"),
        (lambda: heloco.heloco(keep_cosine=1.5), r"keep_cosine=1\.5 must be between"),
        (lambda: heloco.heloco(max_removal=-0.1), r"max_removal=-0\.1 must be between"),
        (lambda: heloco.heloco(removal_rate=-1.0), r"removal_rate=-1\.0 must be at le"),
        (lambda: heloco.heloco(turn_rate=-1.0), r"turn_rate=-1\.0"),
        (lambda: heloco.heloco(confidence_scale=-3.0), r"confidence_scale=-3\.0"),
        (lambda: heloco.heloco(weight=0.0), r"weight=0\.0 must be positive"),
        (lambda: outer.group_heavy_ball(np.nan), "learning_rate=nan"),
        (lambda: outer.group_heavy_ball(pull=-1.0), r"pull=-1\.0"),
        (lambda: unwrap(outer.group_heavy_ball)(momentum=np.float32(-1)),
         r"momentum=np.float32\(-1.0\) must be at least 0"),
        (lambda: unwrap(outer.group_heavy_ball)(momentum=None), "momentum=None must"),
        (lambda: unwrap(outer.group_heavy_ball)(momentum=[0.9]), r"momentum=\[0.9\]"),
        (lambda: unwrap(heloco.mla)(None), "learning_rate=None must be a finite"),
        (lambda: unwrap(outer.group_heavy_ball)(momentum="1"), "momentum='1' must"),
        # Unwrapped, as users have them: only in tests are types checked at every call.
        (lambda: unwrap(outer.scale_by_delayed_nesterov)(buffer_size=2.5),
         r"buffer_size=2\.5 must be a whole number"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (outer.group_heavy_ball(), "params and group_mean_params"),
        (outer.scale_by_staleness_gap(), "params and stale_params"),
    ],
)
def test_missing_arguments_are_named(optimizer, message):
    zero = jnp.zeros(1)
    with pytest.raises(ValueError, match=message):
        optimizer.update(zero, optimizer.init(zero))


def test_a_state_made_eagerly_can_be_donated():
    transform = outer.delayed_nesterov(0.7)
    params = {"w": jnp.ones(3)}
    update = jax.jit(transform.update, donate_argnums=1)
    step, state = update(params, transform.init(params))
    np.testing.assert_allclose(step["w"], -0.7 / 4, rtol=1e-6)
    update(params, state)


def test_a_move_that_is_not_finite_is_no_usual_one():
    transform = outer.scale_by_staleness_gap()
    params = jnp.zeros(1)
    state = transform.init(params)
    gaps = []
    for move in (1.0, np.inf, 1.0, 100.0):
        now = jnp.full(1, move)
        _, state = transform.update(params, state, now, stale_params=params)
        gaps.append(float(state.gap))

    assert gaps == [1, np.inf, 1, 100]
    assert state.num_rounds == 3


def test_the_staleness_gap_has_a_finite_gradient_at_zero():
    transform = outer.scale_by_staleness_gap()
    stale = jnp.zeros(2)
    state = transform.init(stale)._replace(mean_move=jnp.float32(1), num_rounds=1)

    def first(params):
        return transform.update(stale, state, params, stale_params=stale)[0].sum()

    np.testing.assert_array_equal(jax.grad(first)(stale), [0, 0])


# --- Generalized primal averaging ---


def test_a_uniform_primal_average_is_schedule_free(arrivals):
    """The weight of the old average is 1 - 1/t at step t."""
    rate = 0.3
    mu = 0.6
    tx = optax.contrib.schedule_free_sgd(rate, b1=mu, weight_lr_power=0.0)
    wanted = jnp.ones(4)
    tx_state = tx.init(wanted)

    x = jnp.ones(4)
    state = primal_average.PrimalAverageState(jnp.zeros(4))
    start = primal_average.primal_start(mu)
    for t, g in enumerate(arrivals, 1):
        average = primal_average.primal_average(1 - 1 / t)
        step, state = average.update(rate * g, state)
        x = x + step

        step, tx_state = tx.update(g, tx_state, wanted)
        wanted = wanted + step
        np.testing.assert_allclose(start(x, state), wanted, rtol=1e-6)

        evaluated = optax.contrib.schedule_free_eval_params(tx_state, wanted)
        np.testing.assert_allclose(x, evaluated, rtol=1e-6)


def test_the_start_finds_its_state_in_wrappers_and_misses_none():
    params = {"a": jnp.ones(1), "b": jnp.ones(1)}
    masked = optax.masked(primal_average.primal_average(0.5), {"a": True, "b": False})
    _, state = masked.update(params, masked.init(params))  # e = -0.5
    begun = primal_average.primal_start(0.0)(params, state)
    assert {name: float(x[0]) for name, x in begun.items()} == {"a": 0.5, "b": 1.0}

    with pytest.raises(ValueError, match="state holds 0 states of primal_average"):
        primal_average.primal_start(0.5)(params, optax.sgd(0.1).init(params))


# --- HeLoCo ---


@pytest.mark.parametrize(
    "numbers", [(0.2, 0.5, 1.0, 3.0, 0.5), (0.9, 8.0, 0.4, 0.1, 0.3)]
)
def test_against_numpy(numbers):
    seen = set()
    model = np.ones(44)
    take, start = reference.look_ahead(0.3, 0.8, 0.7, numbers, seen)

    optimizer = heloco.heloco(0.3, 0.8, *numbers, 0.7)
    ahead = heloco.look_ahead(0.3, 0.8)
    x = reference.split(model)
    state = optimizer.init(x)
    update = jax.jit(optimizer.update)

    for g in np.random.default_rng(1).normal(size=(40, 44)):
        step, state = update(reference.split(g), state)
        x = optax.apply_updates(x, step)
        model = take(model, g)
        np.testing.assert_allclose(reference.join(x), model, atol=1e-10)
        np.testing.assert_allclose(reference.join(ahead(x, state)), start(model))

    assert seen == {"keep", "turn", "take off"}


def corrected_by(m, g, **options):
    """Return the update of g with the momentum m, which mu = 0 then forgets."""
    transform = heloco.scale_by_heloco(0.0, **options)
    state = heloco.AveragedMomentumState(jnp.asarray(m))
    return transform.update(jnp.asarray(g), state)[0]


def test_heloco_corrects_gradients_by_hand():
    """m = [2, 0], so kappa ||m|| = 6 of kappa 3."""
    m = np.array([2.0, 0.0])
    np.testing.assert_allclose(corrected_by(m, [1.0, 3.0]), [1.0, 3.0])

    # c = -0.6, conf = 5 / 11: of the -3, 0.5 * 0.6 * 5 / 11 is taken off.
    np.testing.assert_allclose(
        corrected_by(m, [-3.0, 4.0]), [-3 * (1 - 0.3 * 5 / 11), 4.0]
    )

    # c = -1, conf = 1 where the momentum does not count: half, the most there is.
    free = {"confidence_scale": 0.0, "removal_rate": 9.0}
    np.testing.assert_allclose(corrected_by(m, [-4.0, 0.0], **free), [-2.0, 0.0])

    # c = 0, conf = 2 / (2 + 6): a quarter of the way from [0, 1] to [1, 0].
    turned = 2 * np.array([0.25, 0.75]) / np.sqrt(0.25**2 + 0.75**2)
    np.testing.assert_allclose(corrected_by(m, [0.0, 2.0]), turned)


def test_heloco_keeps_the_first_step_and_zeros():
    g = np.array([1.0, -2.0])
    zero = np.zeros(2)
    np.testing.assert_array_equal(corrected_by(zero, g, keep_cosine=1.0), g)
    np.testing.assert_array_equal(corrected_by(g, zero), zero)


def test_heloco_lets_a_scalar_turn_back():
    """A number has only cosines 1 and -1; rid of all it could never turn."""
    optimizer = outer.heloco(0.5, 0.5)
    x = jnp.array(4.0)
    state = optimizer.init(x)
    for _ in range(40):
        step, state = optimizer.update(x, state)  # of x**2 / 2
        x = x + step
    np.testing.assert_allclose(x, 0, atol=1e-3)


@pytest.mark.parametrize("factory", [heloco.heloco, heloco.mla])
def test_look_ahead_finds_the_momentum_in_wrappers(factory):
    """The wrapper's state has the hyperparameter "momentum" too."""
    params = jnp.array([4.0])
    wrapped = optax.inject_hyperparams(factory)(learning_rate=1.0, momentum=0.5)

    _, state = wrapped.update(jnp.array([2.0]), wrapped.init(params), params)

    start = heloco.look_ahead(1.0, 0.5)
    np.testing.assert_allclose(start(params, state), [3.5])


def test_look_ahead_without_a_momentum_is_refused():
    params = jnp.array([4.0])
    start = heloco.look_ahead(1.0, 0.5)

    with pytest.raises(ValueError, match="state holds 0 momenta of heloco or mla"):
        start(params, optax.sgd(1.0, momentum=0.5).init(params))


def test_look_ahead_leaves_masked_parameters_unchanged():
    start = outer.look_ahead(1.0, 0.5)
    params = {"a": jnp.ones(1), "b": jnp.ones(1)}
    masked = optax.masked(outer.mla(1.0, 0.5), {"a": True, "b": False})
    _, state = masked.update(params, masked.init(params), params)  # m = 1/2 in a
    ahead = start(params, state)
    np.testing.assert_array_equal([ahead["a"][0], ahead["b"][0]], [0.75, 1])
