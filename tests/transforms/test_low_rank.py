"""Rank that changes: the effective rank against NumPy, states of another size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax.transforms import low_rank, power_sgd
from cocodc_jax.transforms.error_feedback import error_feedback
from tests.numerics import assert_all_close, assert_within_ulps


def entropy_rank(x):
    s = np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)
    p = s[s > 0] / s.sum()
    return np.exp(-np.sum(p * np.log(p)))


def matrix(rows, columns, rank, seed=0):
    rng = np.random.default_rng(seed)
    left = rng.normal(size=(rows, rank))
    right = rng.normal(size=(rank, columns))
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


def test_effective_rank_is_the_mean_over_tensors():
    tree = {"a": np.eye(3), "b": [np.ones((4, 4)), None]}
    np.testing.assert_allclose(low_rank.effective_rank(tree), 2, rtol=1e-5)


def test_effective_rank_of_a_tree_without_leaves_is_refused():
    with pytest.raises(ValueError, match="without leaves"):
        low_rank.effective_rank(((), ()))


def test_the_right_factor_has_the_rank_of_the_decoded_matrix():
    compressor = low_rank.low_rank(rank=3)
    x = {"w": matrix(12, 10, 6), "bias": np.ones(5, np.float32)}

    @jax.jit
    def sent(x):
        message, state = compressor.encode(x, compressor.init(x))
        decoded = compressor.decode(message)["w"]
        return decoded, low_rank.effective_rank(state.right)

    decoded, actual = sent(x)
    np.testing.assert_allclose(actual, entropy_rank(decoded), rtol=1e-4)
    assert 1 < actual < 3


TREE = {"w": matrix(12, 10, 6), "small": matrix(3, 3, 1), "b": np.ones(4, np.float32)}


RESIZE = jax.jit(low_rank.resize, static_argnums=2)


@functools.cache
def state_of(rank):
    """After a first message."""
    compressor = low_rank.low_rank(rank)
    return jax.jit(lambda x: compressor.encode(x, compressor.init(x))[1])(TREE)


@pytest.mark.parametrize("rank", [1, 2, 5, 6])
@pytest.mark.parametrize("old_rank", [1, 2, 5, 6])
def test_a_resized_state_is_one_of_its_rank(old_rank, rank):
    """At rank 6 all are sent in full, at 1 the smallest matrix is not."""
    state = state_of(old_rank)
    resized = RESIZE(state, TREE, rank)
    new = low_rank.low_rank(rank)
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
        assert_within_ulps(resized.right[2][:, kept:], fresh.right[2][:, kept:])

    message, _ = jax.eval_shape(new.encode, TREE, resized)
    assert message == jax.eval_shape(new.encode, TREE, fresh)[0]


def test_a_warm_start_survives_a_larger_rank():
    x = matrix(12, 10, 4)
    small = low_rank.low_rank(2)
    large = low_rank.low_rank(4)
    state = small.init(x)
    encode = jax.jit(small.encode)
    for _ in range(8):
        _, state = encode(x, state)

    @jax.jit
    def resized(x, state):
        return large.decode(large.encode(x, low_rank.resize(state, x, 4))[0])

    np.testing.assert_allclose(resized(x, state), x, atol=1e-4)


def test_a_state_is_resized_by_shapes_alone():
    state = low_rank.low_rank(2).init(TREE)
    resized = low_rank.resize(state, jax.eval_shape(lambda: TREE), 3)
    assert resized.right[2].shape == (10, 3)


def test_a_rank_of_zero_is_refused():
    state = low_rank.low_rank(2).init(TREE)
    with pytest.raises(ValueError, match="rank=0 must be at least 1"):
        low_rank.resize(state, TREE, 0)


# --- Stacks of layers ---------------------------------------------------------------

STACK = np.stack([matrix(12, 10, 6, seed) for seed in range(3)])


def test_a_stack_is_factorised_layer_by_layer():
    """As each layer by itself, from the same random columns, for three rounds."""
    built = low_rank.low_rank(rank=2)
    state = built.init({"blocks/up": STACK})
    alone = [low_rank.LowRankState((np.asarray(q),)) for q in state.right[0]]

    @jax.jit
    def send(x, state):
        message, state = built.encode(x, state)
        return message, state, built.decode(message)

    for turn in range(3):
        stack = np.roll(STACK, turn, axis=1)
        message, state, back = send({"blocks/up": stack}, state)
        decoded = back["blocks/up"]
        for i, layer in enumerate(stack):
            _, alone[i], one = send(layer, alone[i])
            np.testing.assert_allclose(decoded[i], one, atol=1e-5)
            np.testing.assert_allclose(state.right[0][i], alone[i].right[0], atol=1e-4)

    sizes = [x.size for x in jax.tree.leaves(message)]
    assert sum(sizes) == 3 * 2 * (12 + 10)

    # Not as one matrix of 36 rows, whose two directions three layers would share.
    _, _, folded = send(stack, built.init(stack))
    whole = np.linalg.norm(folded - stack)
    assert np.linalg.norm(decoded - stack) < whole


def test_norms_of_a_stack_go_whole_and_a_layer_of_its_own_is_a_matrix():
    tree = {"blocks/norm": np.ones((3, 64), "f4"), "blocks/0/up": matrix(12, 10, 6)}
    state = low_rank.low_rank(rank=2).init(tree)
    assert [np.shape(q) for q in state.right] == [(10, 2), (0,)]


def test_a_stacks_rank_is_the_mean_of_its_layers():
    layers = np.stack([np.diag([1.0, 1, 1, 0]), np.diag([1.0, 0, 0, 0])])
    actual = low_rank.effective_rank({"blocks": {"up": layers.astype("f4")}})
    np.testing.assert_allclose(actual, 2, rtol=1e-5)


def test_a_resized_stack_keeps_its_columns():
    tree = {"blocks/up": STACK}
    built = low_rank.low_rank(rank=2)
    _, state = built.encode(tree, built.init(tree))
    larger = low_rank.resize(state, tree, 4)
    assert larger.right[0].shape == (3, 10, 4)
    np.testing.assert_array_equal(larger.right[0][..., :2], state.right[0])
    back = low_rank.resize(larger, tree, 2)
    np.testing.assert_array_equal(back.right[0], state.right[0])


# --- The order of PowerSGD ----------------------------------------------------------


def power_sgd_round(trees, states):
    """One exchange of equally weighted regions."""
    right = states[0].right
    meant = [power_sgd.meant(*pair) for pair in zip(trees, states, strict=True)]
    mean = lambda trees: jax.tree.map(lambda *x: sum(x) / len(x), *trees)  # noqa: E731
    left = power_sgd.orthonormal(
        mean([power_sgd.first(x, right) for x in meant]), right
    )
    sums = mean([power_sgd.second(x, left, right) for x in meant])

    arrived = power_sgd.decoded(left, sums, trees[0])
    kept = [power_sgd.missed(x, left, power_sgd.second(x, left, right)) for x in meant]
    right = power_sgd.refreshed(sums, right)
    return arrived, [power_sgd.PowerSgdState(e, right) for e in kept]


def test_power_sgd_of_one_region_is_low_rank_with_error_feedback():
    built = error_feedback(low_rank.low_rank(rank=2))
    tree = {"blocks/up": STACK, "w": TREE["w"], "b": TREE["b"]}
    state = built.init(tree)
    states = [power_sgd.init(tree, 2)]

    for _ in range(3):
        message, state = built.encode(tree, state)
        arrived, states = power_sgd_round([tree], states)
        assert_all_close(arrived, built.decode(message), atol=1e-4)
        assert_all_close(states[0].residual, state.residual, atol=1e-4)


def test_power_sgd_of_many_regions_is_low_rank_of_their_mean():
    """Factors of rank 2 of each region would add up to rank 6."""
    trees = [{"w": matrix(12, 10, 6, seed)} for seed in range(3)]
    arrived, states = power_sgd_round(trees, [power_sgd.init(t, 2) for t in trees])
    mean = np.mean([t["w"] for t in trees], axis=0)
    built = low_rank.low_rank(rank=2)
    message, state = built.encode({"w": mean}, built.init({"w": mean}))
    np.testing.assert_allclose(arrived["w"], built.decode(message)["w"], atol=1e-4)

    assert np.linalg.matrix_rank(arrived["w"], tol=1e-4) == 2
    np.testing.assert_allclose(states[1].right[0], state.right[0], atol=1e-4)

    # The part that their mean missed, without the differences between regions.
    missed = np.mean([s.residual["w"] for s in states], axis=0)
    np.testing.assert_allclose(missed, mean - arrived["w"], atol=1e-5)

    left = np.linalg.qr(mean @ power_sgd.init({"w": mean}, 2).right[0])[0]
    kept = trees[2]["w"] - left @ (left.T @ trees[2]["w"])
    np.testing.assert_allclose(states[2].residual["w"], kept, atol=1e-5)


def test_a_tensor_sent_in_full_has_no_residual():
    """A residual A_m - A^ would hold the differences between regions."""
    trees = [{"b": np.ones(3, np.float32)}, {"b": -np.ones(3, np.float32)}]
    states = [power_sgd.init(t, 6) for t in trees]
    for _ in range(2):
        arrived, states = power_sgd_round(trees, states)
        assert not arrived["b"].any()
        assert not states[0].residual["b"].any()
