"""What of a state fits another program: counts of schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cocodc_jax.program.fit import at_step


def regional(optimizer):
    params = {"w": jnp.ones((2, 3))}
    return jax.vmap(optimizer.init)(params)


def counts(state):
    found = optax.tree_utils.tree_get_all_with_path(state, "count")
    return [(path[-1].tuple_name, np.asarray(count).tolist()) for path, count in found]


def test_schedules_count_the_steps_and_nothing_else_does():
    rate = optax.linear_schedule(0.1, 0.0, 100)
    scheduled = optax.inject_hyperparams(optax.adamw)(learning_rate=rate)
    state = regional(optax.chain(scheduled, optax.scale_by_schedule(rate)))
    found = counts(at_step(state, np.array([7, 3])))
    assert {name for name, _ in found} >= {
        "ScaleByAdamState", "ScaleByScheduleState", "WrappedScheduleState",
    }  # fmt: skip
    for name, count in found:
        assert count == ([0, 0] if name == "ScaleByAdamState" else [7, 3]), name
    # Each may be donated.
    leaves = jax.tree.leaves(at_step(state, np.array([7, 3])))
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


def test_without_a_schedule_it_is_the_same():
    state = regional(optax.adam(0.1))
    assert at_step(state, np.array([7, 3])) is state
