"""Steps whose number is an argument, against `lax.scan` of as many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax import methods
from cocodc_jax.program import batches as counted
from tests.numerics import assert_within_ulps
from tests.program import tiny


def step(state, xs):
    x, weight = xs
    state = jax.tree.map(lambda s: jnp.tanh(s * weight + x), state)
    return state, (state["a"].sum(), {"seen": x[0] > 0})


def numbers(num_steps):
    rng = np.random.default_rng(num_steps)
    x = rng.normal(size=(num_steps, 3)).astype(np.float32)
    return x, rng.normal(size=num_steps).astype(np.float32)


@pytest.mark.parametrize("num_steps", [1, 2, 9, 10, 11])
def test_the_first_steps_are_those_of_a_scan(num_steps):
    start, xs = {"a": jnp.ones(3), "b": jnp.zeros(3)}, numbers(num_steps)
    state, outs = jax.jit(counted.scan, static_argnums=0)(
        step, start, counted.padded(xs, num_steps), np.int32(num_steps)
    )
    wanted, each = jax.jit(counted.scan, static_argnums=0)(step, start, xs)
    assert_within_ulps(state, wanted)
    room = counted.padded_length(num_steps)
    for x, y in zip(jax.tree.leaves(outs), jax.tree.leaves(each), strict=True):
        assert x.shape == (room, *y.shape[1:])
        assert x.dtype == y.dtype
        assert_within_ulps(x[:num_steps], y)
        assert not x[num_steps:].any()


def test_what_is_behind_the_last_step_is_not_looked_at():
    xs = jax.tree.map(
        lambda x: np.concatenate([x, np.full_like(x, np.nan)]), numbers(5)
    )
    state, (losses, _) = counted.scan(step, {"a": jnp.ones(3)}, xs, np.int32(5))
    assert np.isfinite(state["a"]).all()
    assert np.isfinite(losses).all()


def test_inputs_are_not_copied_where_there_is_room():
    xs = numbers(20)
    assert counted.padded(xs, 20) is xs


def test_large_inputs_are_given_no_room():
    large = jax.ShapeDtypeStruct((3, 1 << 20), np.float32)
    assert not counted.takes({"x": large, "y": numbers(3)})
    assert counted.takes(jax.ShapeDtypeStruct((10, 1 << 20), np.float32))
    assert counted.takes(numbers(3))


def test_scans_of_every_length_are_one_program():
    traces = []

    def loss_fn(params, batch, key):
        traces.append(1)
        return tiny.loss_fn(params, batch, key)

    method = methods.get("streaming_diloco", sync_interval=14, num_fragments=2)
    program = tiny.program_of(method, loss=loss_fn)
    _, outputs = tiny.finish(program, tiny.start(program), 30)
    lengths = {len(output.losses) for output in outputs}
    assert len(lengths) > 1
    assert all(output.losses.shape[1:] == (4,) for output in outputs)
    assert program._steps._cache_size() == 1
    assert len(traces) == 1
