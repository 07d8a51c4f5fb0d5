"""Rank that changes: the effective rank against NumPy, states of another size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax.transforms import low_rank


def entropy_rank(x):
    s = np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)
    p = s[s > 0] / s.sum()
    return np.exp(-np.sum(p * np.log(p)))


def matrix(rows, columns, rank, seed=0):
    rng = np.random.default_rng(seed)
    left, right = rng.normal(size=(rows, rank)), rng.normal(size=(rank, columns))
    return (left @ right).astype(np.float32)


@pytest.mark.parametrize("shape", [(5, 7), (9, 4), (2, 5, 4)])
def test_effective_rank_against_numpy(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    actual = jax.jit(low_rank.effective_rank)(x)
    folded = x.reshape(-1, x.shape[-1])
    np.testing.assert_allclose(actual, entropy_rank(folded), rtol=1e-5)
    assert actual.dtype == jnp.float32


def test_equal_singular_values_count_whole():
    q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 3)))
    np.testing.assert_allclose(low_rank.effective_rank(q), 3, rtol=1e-5)
    np.testing.assert_allclose(low_rank.effective_rank(np.ones(9)), 1, rtol=1e-5)
    np.testing.assert_allclose(low_rank.effective_rank(np.zeros((3, 3))), 1)


def test_it_is_the_mean_over_tensors_and_of_no_tensor_an_error():
    tree = {"a": np.eye(3), "b": [np.ones((4, 4)), None]}
    np.testing.assert_allclose(low_rank.effective_rank(tree), 2, rtol=1e-5)
    with pytest.raises(ValueError, match="without leaves"):
        low_rank.effective_rank(((), ()))


def test_the_right_factor_has_the_rank_of_the_decoded_matrix():
    compressor = low_rank.low_rank(rank=3)
    x = {"w": matrix(12, 10, 6), "bias": np.ones(5, np.float32)}
    message, state = compressor.encode(x, compressor.init(x))
    decoded = compressor.decode(message)["w"]
    actual = jax.jit(low_rank.effective_rank)(state.right)
    np.testing.assert_allclose(actual, entropy_rank(decoded), rtol=1e-4)
    assert 1 < actual < 3


TREE = {"w": matrix(12, 10, 6), "small": matrix(3, 3, 1), "b": np.ones(4, np.float32)}


@pytest.mark.parametrize("rank", [1, 2, 5, 6])
@pytest.mark.parametrize("old_rank", [1, 2, 5, 6])
def test_a_resized_state_is_one_of_its_rank(old_rank, rank):
    """At rank 6 all are sent whole, at 1 the smallest matrix is not."""
    old = low_rank.low_rank(old_rank)
    _, state = old.encode(TREE, old.init(TREE))
    new = low_rank.low_rank(rank)
    resized = jax.jit(low_rank.resize, static_argnums=2)(state, TREE, rank)
    fresh = new.init(TREE)
    assert jax.tree.structure(resized) == jax.tree.structure(fresh)
    for q, start in zip(resized.right, fresh.right, strict=True):
        assert np.shape(q) == np.shape(start)
    # w is the last of the sorted leaves.
    if old_rank < 6 and rank < 6:
        kept = min(old_rank, rank)
        np.testing.assert_array_equal(
            resized.right[2][:, :kept], state.right[2][:, :kept]
        )
        np.testing.assert_array_equal(
            resized.right[2][:, kept:], fresh.right[2][:, kept:]
        )
    message, _ = new.encode(TREE, resized)
    assert jax.tree.map(jnp.shape, message) == jax.tree.map(
        jnp.shape, new.encode(TREE, fresh)[0]
    )


def test_a_warm_start_survives_a_larger_rank():
    x = matrix(12, 10, 4)
    small, large = low_rank.low_rank(2), low_rank.low_rank(4)
    state = small.init(x)
    for _ in range(8):
        _, state = small.encode(x, state)
    message, _ = large.encode(x, low_rank.resize(state, x, 4))
    np.testing.assert_allclose(large.decode(message), x, atol=1e-4)


def test_shapes_are_enough_and_a_wrong_rank_is_named():
    compressor = low_rank.low_rank(2)
    shapes = jax.eval_shape(lambda: TREE)
    resized = low_rank.resize(compressor.init(TREE), shapes, 3)
    assert resized.right[2].shape == (10, 3)
    with pytest.raises(ValueError, match="rank=0 must be positive"):
        low_rank.resize(compressor.init(TREE), shapes, 0)
