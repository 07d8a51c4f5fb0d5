"""Digests of outer fragments: they show differences, apart from rounding."""

import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax.elastic.marks import _is_near
from cocodc_jax.engine import digests

LANES = digests._LANES


def mark(part):
    return digests.mark((0, 1), np.asarray(digests.digest(part)))


def part(num, dtype=jnp.float32):
    values = np.random.default_rng(num).normal(size=num)
    return {"w": jnp.asarray(values, dtype), "empty": jnp.zeros((0, 3))}


@pytest.mark.parametrize("num", [5, LANES + 3, 2 * LANES])
@pytest.mark.parametrize("at", [0, -1])
def test_one_bit_changes_a_digest_and_counts_as_rounding(num, at):
    first = part(num)
    other = part(num)
    assert mark(first) == mark(other)
    value = first["w"][at]
    other["w"] = other["w"].at[at].set(jnp.nextafter(value, value + 1))
    assert mark(first).bits != mark(other).bits
    assert _is_near(mark(first), mark(other))


def test_a_different_model_is_not_taken_for_rounding():
    first = part(2 * LANES + 7)
    other = part(2 * LANES + 7)
    other["w"] = other["w"] + 0.01 * part(2 * LANES + 7)["w"][::-1]
    assert not _is_near(mark(first), mark(other))


def test_swapped_values_change_a_digest():
    first = part(2 * LANES)
    backwards = {**first, "w": first["w"][::-1]}
    rolled = {**first, "w": jnp.roll(first["w"], LANES)}

    assert mark(backwards).bits != mark(first).bits
    assert mark(rolled).bits != mark(first).bits


def test_values_in_another_leaf_change_a_digest():
    first = part(2 * LANES)
    leaves = {"a": first["w"][:9], "b": first["w"][9:18]}
    swapped = {"a": leaves["b"], "b": leaves["a"]}
    assert mark(leaves).bits != mark(swapped).bits


def test_the_scale_is_the_root_mean_square():
    values = part(3 * LANES + 100)["w"]
    digest = mark({"w": values})
    np.testing.assert_allclose(digest.scale, np.sqrt(np.mean(np.square(values))), 1e-5)
    assert abs(digest.at) < 5 * digest.scale


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32, jnp.complex64])
def test_a_changed_value_of_any_dtype_changes_a_digest(dtype):
    first = part(40, dtype)
    other = {**first, "w": first["w"].at[3].add(1)}
    assert mark(first).bits != mark(other).bits


def test_values_that_are_not_finite_are_compared_by_their_bits():
    first = {"w": jnp.array([1.0, jnp.nan])}
    digest = mark(first)
    assert (digest.at, digest.scale) == (0, 0)
    assert mark(first) == digest
    other = {"w": jnp.array([2.0, jnp.nan])}
    assert mark(other).bits != digest.bits


def test_marks_come_in_order_once_they_are_there():
    marker = digests.Marker()
    parts = [part(5), part(6)]
    for step, mean in enumerate(parts):
        marker.applied((0, step), mean)
    for _, value in marker._pending:
        value.block_until_ready()
    assert [x.sync for x in marker.ready()] == [(0, 0), (0, 1)]
    assert marker.ready() == []
