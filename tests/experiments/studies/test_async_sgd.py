"""The parameter server: its order of events, its arithmetic, what it shows."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from experiments.studies import async_sgd
from experiments.studies.async_sgd import Setup, arrivals, make_problem, measure

SMALL = Setup(updates=12, workers=3, batch=8, constant_strength=5.0, seeds=2)


def index(name):
    return async_sgd.names(SMALL).index(name)


def test_arrivals_in_order_of_time():
    """Worker i delivers at (i + 1), 2 (i + 1), ...; ties go to the lower number."""
    workers = arrivals(4, 200)
    clock, count = [], np.zeros(4, int)
    for worker in workers:
        count[worker] += 1
        clock.append((count[worker] * (worker + 1), worker))
    assert clock == sorted(clock)
    assert count.tolist() == sorted(count, reverse=True)


def gradient(params, x, y):
    """Mean cross-entropy of tanh(x A) B, differentiated by hand in float64."""
    hidden = np.tanh(x @ params["hidden"])
    logits = hidden @ params["head"]
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    back = (p @ params["head"].T) * (1 - hidden**2)
    return {"hidden": x.T @ back, "head": hidden.T @ p}


def loss(params, x, y):
    logits = np.tanh(x @ params["hidden"]) @ params["head"]
    logits -= logits.max(1, keepdims=True)
    return np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y])


def replayed(setup, name, seed):
    """The server in NumPy, for the rules that need no second derivative."""
    problem = jax.tree.map(np.asarray, make_problem(seed)._replace(key=None))
    x, y = np.float64(problem.x), problem.y
    keys = jax.random.split(make_problem(seed).key, setup.updates)
    params = {k: np.float64(v) for k, v in problem.params.items()}
    read = [params] * setup.workers
    mean_square = {k: 0.0 for k in params}
    errors = []
    for worker, key in zip(arrivals(setup.workers, setup.updates), keys, strict=True):
        chosen = np.asarray(jax.random.randint(key, (setup.batch,), 0, len(y)))
        g = gradient(read[worker], x[chosen], y[chosen])
        fresh = gradient(params, x[chosen], y[chosen])
        used = {}
        for k in params:
            square = g[k] ** 2 * (params[k] - read[worker][k])
            mean_square[k] = 0.95 * mean_square[k] + 0.05 * g[k] ** 2
            used[k] = {
                "stale": g[k],
                "constant": g[k] + setup.constant_strength * square,
                "adaptive": g[k]
                + setup.adaptive_strength / np.sqrt(mean_square[k] + 1e-7) * square,
                "fresh": fresh[k],
            }[name]
        size = lambda t: np.sqrt(sum((v**2).sum() for v in t.values()))  # noqa: E731
        errors.append(size({k: used[k] - fresh[k] for k in used}) / size(fresh))
        params = {k: params[k] - setup.learning_rate * used[k] for k in params}
        read = [params if i == worker else r for i, r in enumerate(read)]
    return loss(params, x, y), np.mean(errors)


@pytest.mark.parametrize("name", ["stale", "constant", "adaptive", "fresh"])
def test_the_server_is_the_formula(name):
    final, errors = jax.jit(functools.partial(async_sgd.simulate, SMALL))(
        index(name), 1
    )
    expected_loss, expected_error = replayed(SMALL, name, 1)
    # Twelve updates in float32 against float64.
    np.testing.assert_allclose(final, expected_loss, rtol=2e-5)
    np.testing.assert_allclose(errors[name], expected_error, rtol=2e-3, atol=1e-6)


def test_one_worker_is_never_stale():
    measured = measure(dataclasses.replace(SMALL, workers=1))
    losses = {name: losses for name, (losses, _) in measured.items()}
    # The products add exact zeros.
    assert losses["exact"] == losses["adaptive"] == losses["stale"] == losses["fresh"]


def test_the_exact_product_comes_closest_to_the_fresh_gradient():
    measured = measure(dataclasses.replace(SMALL, updates=100, workers=6))
    error = {name: np.mean(errors) for name, (_, errors) in measured.items()}
    assert error["fresh"] == 0
    assert error["exact"] < 0.6 * error["stale"]
    assert len(measured["stale"][0]) == 2


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        *((name, 0, "at least 1") for name in ("updates", "workers", "batch", "seeds")),
        *(("learning_rate", x, "positive and finite") for x in (0, math.nan, math.inf)),
        ("constant_strength", math.nan, "finite"),
        ("adaptive_strength", math.inf, "finite"),
    ],
)
def test_numbers_are_checked(field, value, rule):
    with pytest.raises(ValueError, match=f"{field}={value} must be {rule}"):
        dataclasses.replace(SMALL, **{field: value})


def test_a_rule_that_diverges_leaves_the_others_numbers(call):
    flags = "--constant_strength=1e6", "--updates=60", "--seeds=2", "--workers=2"
    out, _ = call(async_sgd, *flags)
    rows = {line.split()[0]: line for line in out.splitlines() if line.split()}
    assert rows["constant"].split()[1:3] == ["diverged", "-"]
    assert "diverged" not in rows["exact"]


def test_one_worker_leaves_no_gap_to_close(call):
    out, _ = call(async_sgd, "--workers=1", "--updates=4", "--seeds=1")
    assert "%" not in out
    assert "+-" not in out  # One seed has no interval.
    assert "One seed; 1 workers" in out


def test_a_wrong_flag_is_one_line(refused):
    assert refused(async_sgd, "--workers=0") == "--workers=0 must be at least 1"
