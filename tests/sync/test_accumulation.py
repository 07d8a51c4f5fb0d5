"""After how many steps an optimizer makes an update, wherever that is wrapped."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax.sync import accumulation, inner_counts

PARAMS = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}
RATE = optax.linear_schedule(1.0, 0.0, 100)
PARTS = {"w": "one", "b": "other"}


def multi_steps(every_k, optimizer=None, **options):
    optimizer = optax.adam(RATE) if optimizer is None else optimizer
    return optax.MultiSteps(optimizer, every_k, **options).gradient_transformation()


def by_step(step):
    return jnp.where(step > 9, 4, 2)


KNOWN = {
    "none": (optax.adam(0.1), 1, ()),
    "bare": (multi_steps(4), 4, (4,)),
    "chain": (optax.chain(optax.clip(1.0), multi_steps(4)), 4, (4,)),
    "masked": (optax.masked(multi_steps(3), {"w": True, "b": False}), 3, (3,)),
    "extra": (optax.with_extra_args_support(multi_steps(4)), 4, (4,)),
    "two": (
        optax.multi_transform({"one": multi_steps(2), "other": multi_steps(3)}, PARTS),
        6,
        (2, 3),
    ),
    "hyperparams": (
        optax.inject_hyperparams(lambda rate: multi_steps(5, optax.adam(rate)))(0.1),
        5,
        (5,),
    ),
    "every": (optax.chain(optax.apply_every(6), optax.sgd(0.1)), 6, (6,)),
    "nested": (multi_steps(3, optax.chain(optax.clip(1.0), multi_steps(2))), 6, (3, 6)),
    "sam": (
        optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), sync_period=3),
        3,
        (3,),
    ),
    "value": (
        multi_steps(2, optax.contrib.reduce_on_plateau(patience=1)),
        2,
        (2,),
    ),
}
UNKNOWN = {
    "schedule": multi_steps(by_step),
    "schedule in a chain": optax.chain(optax.clip(1.0), multi_steps(by_step)),
    "apply_if_finite": optax.apply_if_finite(multi_steps(4), 3),
    "skipped": optax.chain(multi_steps(4, should_skip_update_fn=optax.skip_not_finite)),
    "now and then": optax.conditionally_mask(multi_steps(4), lambda step: step % 3 > 0),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_number_is_read_off_the_update(name):
    optimizer, steps, periods = KNOWN[name]
    accumulated = accumulation.find(optimizer, PARAMS)
    assert (accumulated.steps, accumulated.periods) == (steps, periods)

    # Inside of a compiled function too, where operations are only traced.
    traced = []
    jax.jit(lambda x: traced.append(accumulation.find(optimizer, x)))(PARAMS)
    assert traced == [accumulated]


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_number_that_depends_on_more_is_not_known(name):
    accumulated = accumulation.find(UNKNOWN[name], PARAMS)
    assert (accumulated.names, accumulated.steps) == (("optax.MultiSteps",), None)


def counts_after(optimizer, steps):
    """Counts as `at_steps` sets them, and as the optimizer does."""
    set_to = inner_counts.at_steps(
        optimizer.init(PARAMS),
        np.array(steps),
        accumulation.find(optimizer, PARAMS).periods,
        lambda count, old: count.astype(old.dtype),
    )

    state = optimizer.init(PARAMS)
    update = jax.jit(lambda state: optimizer.update(PARAMS, state, PARAMS)[1])
    for _ in range(steps):
        state = update(state)
    return counts(set_to), counts(state)


def counts(state):
    """Counts of updates and schedules, without those of bias corrections."""
    paths = jax.tree_util.tree_leaves_with_path(state)
    fields = ("count", "step", "step_count", "mini_step", "gradient_step")
    return {
        jax.tree_util.keystr(path): int(x)
        for path, x in paths
        if getattr(path[-1], "name", "") in fields
        and "adam" not in jax.tree_util.keystr(path)
    }


SGD = optax.sgd(RATE)


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD,
        multi_steps(4, SGD),
        optax.chain(optax.scale_by_schedule(RATE), multi_steps(4, SGD)),
        multi_steps(3, optax.chain(SGD, multi_steps(2, SGD))),
        optax.chain(optax.apply_every(4), SGD),
        pytest.param(
            optax.chain(
                optax.add_decayed_weights(RATE), optax.add_noise(1.0, 0.5, key=1)
            ),
            marks=pytest.mark.skipif(
                optax.__version__ == "0.2.6", reason="its decay's schedule stands still"
            ),
        ),
        optax.contrib.schedule_free_sgd(0.1, warmup_steps=5),
    ],
)
@pytest.mark.parametrize("steps", [6, 11])
def test_counts_are_those_of_the_optimizer_at_the_same_step(optimizer, steps):
    set_to, wanted = counts_after(optimizer, steps)
    assert set_to == wanted
    assert any(wanted.values())


def test_counts_inside_of_an_unknown_accumulation_stay():
    optimizer = optax.chain(multi_steps(by_step, SGD), optax.scale_by_schedule(RATE))
    state = inner_counts.at_steps(
        optimizer.init(PARAMS), np.array(7), (None,), lambda count, old: count
    )
    assert set(counts(state[0]).values()) == {0}
    assert set(counts(state[1]).values()) == {7}


def test_counts_of_another_state_are_taken_over():
    optimizer = multi_steps(2, optax.adam(RATE))
    state = optimizer.init(PARAMS)
    for _ in range(3):
        _, state = optimizer.update(PARAMS, state, PARAMS)

    fresh = optimizer.init(PARAMS)
    merged = inner_counts.with_counts(fresh, state)
    assert (int(merged.mini_step), int(merged.gradient_step)) == (1, 1)
    adam, schedule = merged.inner_opt_state
    assert (int(adam.count), int(schedule.count)) == (0, 1)
    assert merged.acc_grads is fresh.acc_grads or not np.any(merged.acc_grads["w"])
