"""`stat2` against its formula, by hand, and its bounds.

`matrices`, which sends vectors in full, is tested here too: MuLoCo sends by both.
"""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax.transforms import compression
from cocodc_jax.transforms.compressor import matrices
from cocodc_jax.transforms.statistical import stat2
from tests.program import family_reference

ENCODE = jax.jit(lambda x: stat2().encode(x, ())[0])
DECODE = jax.jit(stat2().decode)


def round_trip(x):
    return stat2().decode(stat2().encode(x, ())[0])


def decoded(x):
    return np.asarray(DECODE(ENCODE(x)))


def test_codes_and_table_by_hand():
    """Mean 2, squares 36 + 4 + 4 + 16 + 36 = 96, sigma sqrt(24) = 4.899.

    A bin is 7.348 wide: -6 - 2.25 sigma is below all, so code 0 is not used.
    """
    x = np.float32([-4, 0, 0, 6, 8])
    message = ENCODE(x)
    # Codes 1, 2, 2, 3, 3 from the lowest bits on: 1 + 4 * 2 + 16 * 2 + 64 * 3, and 3.
    assert message.arrays["codes"].tolist() == [233, 3]
    assert message.arrays["table"].tolist() == [0, -4, 0, 7]
    assert decoded(x).tolist() == [-4, 0, 0, 7, 7]


@pytest.mark.parametrize("draw", ["normal", "laplace", "exponential"])
def test_stat2_equals_its_formula(draw):
    x = getattr(np.random.default_rng(1), draw)(size=(13, 37))
    expected = family_reference.stat2(x)
    assert len(np.unique(expected)) == (3 if draw == "exponential" else 4)
    with jax.enable_x64(True):
        actual = np.asarray(jax.jit(round_trip)(x))
    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10)


@given(
    st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
        min_size=12,
        max_size=12,
    )
)
@settings(max_examples=80, deadline=None)
def test_the_mean_is_kept_and_no_error_is_longer_than_the_spread(values):
    x = np.float32(values)
    back = decoded(x).astype(np.float64)
    wide = x.astype(np.float64)

    # Rounding of some ten float32 sums, and the smallest normal number.
    room = 1e-5 * np.abs(wide).max() + 1e-37
    assert abs(back.sum() - wide.sum()) <= 12 * room

    spread = np.linalg.norm(wide - wide.mean())
    assert np.linalg.norm(back - wide) <= spread + 4 * room


@pytest.mark.parametrize("x", [[3.0], [2.0, 2.0], [0.0, 0.0, 0.0]])
def test_few_values_survive(x):
    np.testing.assert_array_equal(decoded(np.float32(x)), x)


def test_vectors_and_norms_of_stacks_go_whole():
    rng = np.random.default_rng(0)
    blocks = {"up": rng.normal(size=(2, 5, 4)), "norm": rng.normal(size=(2, 5))}
    tree = {"blocks": blocks, "head": rng.normal(size=(5, 7)), "norm": np.ones(5)}
    tree = jax.tree.map(np.float32, tree)

    built = matrices(stat2())
    message, _ = jax.jit(lambda x: built.encode(x, built.init(x)))(tree)
    back = jax.jit(built.decode)(message)

    assert jax.tree.structure(back) == jax.tree.structure(tree)
    np.testing.assert_array_equal(back["blocks"]["norm"], blocks["norm"].astype("f4"))
    np.testing.assert_array_equal(back["norm"], tree["norm"])

    np.testing.assert_allclose(back["head"], decoded(tree["head"]), rtol=1e-6)
    up = tree["blocks"]["up"]
    np.testing.assert_allclose(back["blocks"]["up"], decoded(up), rtol=1e-6)

    # Two tables; 40 and 35 codes; 10 and 5 float32.
    assert compression.message_bytes(message) == 32 + 10 + 9 + 60


def test_a_layer_of_its_own_is_no_stack():
    tree = {"blocks/0/norm": np.ones(4, "f4"), "blocks/0/up": np.ones((4, 4), "f4")}
    message, _ = jax.eval_shape(lambda x: matrices(stat2()).encode(x, ()), tree)
    assert set(message.vectors) == {"blocks/0/norm"}
    assert set(jax.eval_shape(matrices(stat2()).decode, message)) == set(tree)


def test_a_stack_may_have_more_values_than_an_int32():
    stack = jax.ShapeDtypeStruct((64, 8192, 8192), "bfloat16")
    message, _ = jax.eval_shape(lambda x: stat2().encode(x, ()), stack)
    assert compression.message_bytes(message) == 64 * 8192 * 8192 // 4 + 16
    assert jax.eval_shape(stat2().decode, message) == stack
