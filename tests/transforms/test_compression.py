"""Compressors: round trip, error bound, bias, and bytes that are really sent.

- decode(encode(x)) is within the stated bound of x, elementwise, for any x;
- codes come back as they were packed, in the bits they were promised;
- message_bytes is the sum of nbytes and equals the count by hand;
- stochastic rounding has the right mean, nearest rounding does not;
- with error feedback, sent + residual = meant, and the means agree;
- everything runs under jit and vmap without a second trace.
"""

import collections
import functools
import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax.transforms import compression, compressor, packing
from tests.slow import mostly_slow

EXPRESSIONS = [
    "identity", "float16", "bfloat16", "int8", "int4(block_size=16)",
    "int4(stochastic=True)", "int2", "stat2", "fp4", "fp4(stochastic=True)", "sign",
    "top_k(density=0.2)", "top_k(0.2, int8())",
    "chunked_top_k(k=3, chunk_side=4, values=int2(block_size=3))",
    "chunked_top_k(k=3, chunk_side=4, values=stat2())", "dct_top_k(k=3, chunk_side=4)",
    "threshold(density=0.2, every=2)", "threshold(density=0.2, values=int8())",
    "low_rank(rank=1)", "low_rank(rank=1, factors=int4())", "error_feedback(sign)",
    "error_feedback(matrices(stat2), decay=0.9)",
    "error_feedback(threshold(density=0.2))",
    "error_feedback(low_rank(rank=1, factors=int4()), decay=0.9)",
]  # fmt: skip

# Subnormals are flushed to zero on some devices; a block may still mix 1e-30 and 1e30.
values = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False).map(
    lambda x: 0.0 if abs(x) < 2.0**-100 else x
)
MAX_SIZE = 40
vectors = st.lists(values, min_size=MAX_SIZE, max_size=MAX_SIZE).map(
    lambda x: np.array(x, np.float32)
)


def tree(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "w": rng.normal(size=(6, 9)).astype(np.float32),
        "stack": [rng.normal(size=(2, 5, 4)).astype(jnp.bfloat16), None],
        "scale": np.asarray(rng.normal(), np.float32),
    }


TRACES = collections.Counter()


@functools.cache
def compiled(text):
    """Return a jitted (tree, state or None, key) -> (message, state, decoded)."""
    built = compression.parse(text)

    @jax.jit
    def go(x, state, key):
        TRACES[text] += 1
        message, state = built.encode(x, built.init(x) if state is None else state, key)
        return message, state, built.decode(message)

    return go


KEY = jax.random.key(0)


def round_trip(text, x, key=KEY):
    return compiled(text)(x, None, key)[2]


def leaves_of(*trees):
    return zip(*map(jax.tree.leaves, trees), strict=True)


# --- packing ---


pack = jax.jit(packing.pack, static_argnums=1)
unpack = jax.jit(packing.unpack, static_argnums=(1, 2))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 13])
@given(data=st.data())
@settings(max_examples=30)
def test_packing_is_a_little_endian_bit_stream(bits, data):
    codes = data.draw(
        st.lists(st.integers(0, 2**bits - 1), min_size=9, max_size=9), "codes"
    )

    stream = "".join(f"{c:0{bits}b}"[::-1] for c in codes)
    by_hand = [int(stream[i : i + 8][::-1], 2) for i in range(0, len(stream), 8)]

    packed = pack(np.array(codes), bits)
    assert packed.dtype == jnp.uint8
    np.testing.assert_array_equal(packed, by_hand)
    np.testing.assert_array_equal(unpack(packed, bits, 9), codes)


# --- round trips and bounds ---


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_decoding_restores_shapes_and_dtypes(text):
    x = tree()
    _, _, back = compiled(text)(x, None, KEY)

    assert jax.tree.structure(back) == jax.tree.structure(x)
    for a, b in leaves_of(back, x):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.all(np.isfinite(a.astype(np.float32)))


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_bytes_are_those_of_the_arrays_of_a_message(text):
    built = compression.parse(text)
    x = tree()
    message, _, _ = compiled(text)(x, None, KEY)

    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(message))
    assert compression.message_bytes(message) == nbytes
    shapes = jax.eval_shape(lambda x: built.encode(x, built.init(x), KEY)[0], x)
    assert compression.message_bytes(shapes) == nbytes


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_zeros_decode_to_zeros_without_recompilation(text):
    x = tree()
    go = compiled(text)
    _, state, _ = go(x, None, KEY)
    num_traces = TRACES[text]

    _, new_state, zeros = go(jax.tree.map(np.zeros_like, x), None, KEY)

    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(zeros))
    assert TRACES[text] == num_traces
    assert jax.tree.map(jnp.shape, new_state) == jax.tree.map(jnp.shape, state)


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_no_dtype_is_promoted_implicitly(text):
    built = compression.parse(text)
    x = tree()
    with jax.numpy_dtype_promotion("strict"):
        back = jax.eval_shape(
            lambda x: built.decode(built.encode(x, built.init(x), KEY)[0]), x
        )
    assert jax.tree.map(jnp.dtype, back) == jax.tree.map(lambda a: a.dtype, x)


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_empty_tensors_are_compressed(text):
    built = compression.parse(text)
    x = {"none": np.zeros((0, 3), np.float32), "some": np.ones((2, 2), np.float32)}
    go = jax.jit(lambda x: built.decode(built.encode(x, built.init(x), KEY)[0]))
    back = go(x)
    assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, x)


def blockwise_absmax(x, block):
    rows = np.pad(np.abs(x), (0, -len(x) % block)).reshape(-1, block)
    return np.repeat(rows.max(1), block)[: len(x)]


BOUNDS = {
    "int8(block_size=16)": lambda x, s: s / 254,
    "int4(block_size=16)": lambda x, s: s / 14,
    "int2(block_size=16)": lambda x, s: s / 3,
    "fp4(block_size=16)": lambda x, s: np.maximum(np.abs(x) / 3, s / 128),
    "int8(16, stochastic=True)": lambda x, s: s / 127,
    "int4(16, stochastic=True)": lambda x, s: s / 7,
    "int2(16, stochastic=True)": lambda x, s: 2 * s / 3,
    "fp4(16, stochastic=True)": lambda x, s: np.maximum(np.abs(x), s / 64),
}


@pytest.mark.parametrize("text", BOUNDS)
@given(x=vectors)
@settings(max_examples=50)
def test_errors_stay_within_their_bounds(text, x):
    scale = blockwise_absmax(x, 16)
    slack = 1e-6 * scale  # float32 rounding.
    bound = BOUNDS[text](x, scale) * (1 + 1e-5) + slack

    assert np.all(np.abs(np.asarray(round_trip(text, x)) - x) <= bound)


@pytest.mark.parametrize(("name", "digits"), [("float16", 11), ("bfloat16", 8)])
def test_casts_keep_their_significant_bits(name, digits):
    x = np.linspace(0.1, 100, 57, dtype=np.float32)
    back = round_trip(name, x)
    assert np.all(np.abs(back - x) <= x * 2.0**-digits)
    assert np.any(back != x)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("fp4", 3 * np.array([0, 1, -1 / 64, 1 / 32, -1 / 16, 1 / 8, -1 / 4, 1 / 2])),
        ("int2", [3, -3, 1, -1]),
        ("int4", range(-7, 8)),
        ("int8", range(-127, 128)),
        ("sign", [2, -2, -2, 2]),
        ("top_k(1.0)", [2, -2, 0, 1e-30]),
        ("float16", [65504, -65504, np.inf, np.nan]),
    ],
)
def test_exact_values_survive(text, values):
    x = np.float32(values)
    np.testing.assert_allclose(round_trip(text, x), x, rtol=1e-6)


def test_values_beyond_float16_saturate():
    assert round_trip("float16", np.float32([7e4, -1e30])).tolist() == [65504, -65504]


@pytest.mark.parametrize(
    "text", [x for x in EXPRESSIONS if "low_rank" not in x and "every" not in x]
)
def test_a_nan_is_not_hidden_among_many_numbers(text):
    """XLA's maximum of many numbers may drop a NaN that its maximum of few keeps."""
    x = np.random.default_rng(0).normal(size=(70, 66)).astype(np.float32)
    x[3, 3] = np.nan
    back = np.asarray(round_trip(text, x))
    assert np.isnan(back[3, 3])


@pytest.mark.parametrize("text", ["int8", "int4", "int2", "fp4"])
def test_a_nan_makes_its_own_block_one_and_no_other(text):
    x = np.random.default_rng(0).normal(size=(70, 66)).astype(np.float32)
    whole = np.asarray(round_trip(text, x)).ravel()
    x[3, 3] = np.nan
    back = np.asarray(round_trip(text, x)).ravel()
    assert np.isnan(back[:256]).all()
    np.testing.assert_array_equal(back[256:], whole[256:])


def test_sign_has_the_least_squares_scale_per_block():
    x = np.random.default_rng(0).normal(size=11).astype(np.float32)
    back = np.asarray(round_trip("sign(4)", x))
    for i in range(0, 11, 4):
        block = x[i : i + 4]
        best = np.linalg.lstsq(np.sign(block)[:, None], block)[0]
        np.testing.assert_allclose(back[i : i + 4], np.sign(block) * best, rtol=1e-5)


# --- unbiasedness ---


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "fp4"])
def test_stochastic_rounding_is_unbiased_and_nearest_is_not(name):
    x = np.float32([1.0, 0.33, -0.7, 0.01, -0.004, 0.0, 0.51])
    keys = jax.random.split(KEY, 4000)
    go = jax.vmap(lambda key: round_trip(f"{name}(stochastic=True)", x, key))

    samples = np.asarray(go(keys))
    error = samples.std(0) / np.sqrt(len(keys))
    assert np.all(np.abs(samples.mean(0) - x) <= 4.5 * error + 1e-6)

    nearest = round_trip(name, x)
    assert np.any(np.abs(nearest - x) > 4.5 * error + 1e-6)


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "fp4"])
def test_stochastic_rounding_without_a_key_is_refused(name):
    x = np.float32([1.0, 0.33])
    message = rf"{name}\(stochastic=True\).encode needs a key"
    with pytest.raises(ValueError, match=message):
        round_trip(f"{name}(stochastic=True)", x, None)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("ef+sign", "ErrorFeedbackState"),
        ("low_rank(rank=1)", "LowRankState"),
        ("threshold(density=0.2)", "ThresholdState"),
    ],
)
def test_a_state_that_is_not_its_own_is_refused(text, kind):
    built = compression.parse(text)
    x = tree()
    with pytest.raises(ValueError, match=f"state is a tuple, .* the {kind} of "):
        built.encode(x, ())
    with pytest.raises(ValueError, match="is of 3 leaves, but the tree has 1: pass wh"):
        built.encode({"w": x["w"]}, built.init(x))


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_counters_are_not_rounded(text):
    """Integers survive unchanged, or are refused by name."""
    built = compression.parse(text)
    tree = {"count": jnp.arange(12), "w": jnp.ones((4, 3))}
    if text == "identity":
        back = built.decode(built.encode(tree, built.init(tree))[0])
        np.testing.assert_array_equal(back["count"], tree["count"])
        return

    message = "takes float arrays, but the leaf 'count' is of dtype int32, which it"
    if "matrices" in text:  # Vectors are sent in full.
        tree = {"count": jnp.ones((4, 3), int)}
    with pytest.raises(ValueError, match=message):
        built.encode(tree, built.init(tree), jax.random.key(0))


@pytest.mark.parametrize("text", ["ef+topk:0.5", "lowrank:1"])
def test_a_state_of_other_shapes_is_refused(text):
    """That could be broadcast, or folded otherwise."""
    built = compression.parse(text)
    state = built.init({"w": jnp.zeros((9, 5))})
    with pytest.raises(ValueError, match=r"for the leaf 'w' of shape \(9, 10\), which"):
        built.encode({"w": jnp.zeros((9, 10))}, state)
    with pytest.raises(ValueError, match=r"for the leaf 'w' of shape \(9, 1\), which"):
        built.encode({"w": jnp.zeros((9, 1))}, state)


# --- sparse ---


@given(vectors)
@settings(max_examples=50, deadline=None)
def test_top_k_keeps_the_largest_and_drops_the_rest(x):
    back = np.asarray(round_trip("top_k(0.2)", x))
    kept = back != 0
    np.testing.assert_array_equal(back[kept], x[kept])
    assert kept.sum() == min(8, np.count_nonzero(x))
    if kept.sum() == 8:
        assert np.abs(x[kept]).min() >= np.abs(x[~kept]).max()


def chunks_of(matrix, side):
    """Every chunk as a view, cut by hand."""
    for i in range(0, matrix.shape[0], side):
        for j in range(0, matrix.shape[1], side):
            yield np.s_[i : i + side, j : j + side]


def test_chunked_top_k_keeps_k_per_chunk():
    x = np.random.default_rng(0).normal(size=(6, 9)).astype(np.float32)
    back = np.asarray(round_trip("chunked_top_k(2, 4)", x))
    for where in chunks_of(x, 4):
        chunk = x[where]
        sent = back[where]
        largest = np.sort(np.abs(chunk).ravel())[-2:]
        wanted = np.where(np.abs(chunk) >= largest[0], chunk, 0)
        np.testing.assert_array_equal(sent, wanted)


@pytest.mark.parametrize(
    ("shape", "sent"),
    [((64, 64), 128), ((64, 128), 256), ((32, 64), 64), ((64,), 2), ((3,), 1)],
)
def test_smaller_chunks_send_the_same_share(shape, sent):
    """128 of 4096, 1 of 32; a vector's chunk of 64 sends 2, not itself."""
    rng = np.random.default_rng(0)
    back = round_trip("chunked_top_k(128)", rng.normal(size=shape).astype(np.float32))
    assert np.count_nonzero(back) == sent


def test_dct_top_k_against_scipy():
    x = np.random.default_rng(0).normal(size=(6, 9)).astype(np.float32)
    back = np.asarray(round_trip("dct_top_k(2, 4)", x))

    padded = np.pad(x, ((0, 2), (0, 3)))
    wanted = np.zeros_like(padded)
    for where in chunks_of(padded, 4):
        coefficients = scipy.fft.dctn(padded[where], norm="ortho")
        largest = np.sort(np.abs(coefficients).ravel())[-2]
        coefficients[np.abs(coefficients) < largest] = 0
        wanted[where] = scipy.fft.idctn(coefficients, norm="ortho")

    np.testing.assert_allclose(back, wanted[:6, :9], atol=1e-6)


@pytest.mark.parametrize("shape", [(), (3,), (9, 4), (2, 3, 4), (5, 2, 2, 3)])
def test_dct_with_all_coefficients_is_lossless(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    back = round_trip("dct_top_k(16, 4)", x)
    np.testing.assert_allclose(back, x, atol=1e-6)


# --- low rank ---


def test_warm_start_converges_to_the_leading_directions():
    rng = np.random.default_rng(0)
    u, _ = np.linalg.qr(rng.normal(size=(12, 12)))
    v, _ = np.linalg.qr(rng.normal(size=(10, 10)))
    singular = 2.0 ** -np.arange(10)
    x = (u[:, :10] * singular @ v.T).astype(np.float32)
    best = np.linalg.norm(singular[2:])

    state = compression.low_rank(rank=2).init(x)
    errors = []
    for _ in range(12):
        _, state, back = compiled("low_rank(rank=2)")(x, state, KEY)
        errors.append(np.linalg.norm(back - x))

    assert errors[0] > 1.05 * best
    np.testing.assert_allclose(errors[-1], best, rtol=1e-3)


def test_low_rank_recovers_after_a_matrix_of_zeros():
    x = np.outer(np.arange(6.0), np.ones(7)).astype(np.float32)
    go = compiled("low_rank(rank=1)")
    _, state, _ = go(0 * x, compression.low_rank(rank=1).init(x), KEY)
    _, state, back = go(x, state, KEY)
    np.testing.assert_allclose(back, x, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((), (1, 1)),
        ((5,), (1, 5)),
        ((12, 1024, 2688), (12288, 2688)),
        ((1024, 16, 64), (1024, 1024)),
        ((12, 1024, 16, 64), (12288, 1024)),
    ],
)
def test_a_tensor_is_the_squarest_matrix_of_its_axes(shape, matrix):
    assert compressor.matrix_shape(shape) == matrix


# --- bytes ---


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("identity", 4 * 64 * 128),
        ("float16", 2 * 64 * 128),
        ("bfloat16", 2 * 64 * 128),
        ("int8", 64 * 128 + 32 * 4),
        ("int4", 64 * 128 // 2 + 32 * 4),
        ("fp4", 64 * 128 // 2 + 32 * 4),
        ("int2", 64 * 128 // 4 + 32 * 4),
        # Four means of bins, whatever the size.
        ("stat2", 64 * 128 // 4 + 16),
        ("matrices(stat2)", 64 * 128 // 4 + 16),
        ("sign", 64 * 128 // 8 + 32 * 4),
        # 82 of 8192: 82 float32 and 82 indices of 13 bits
        ("top_k(0.01)", 82 * 4 + -(-82 * 13 // 8)),
        # 2 chunks of 32 values of 2 bits with a scale, and 12-bit indices
        ("chunked_top_k(values=int2(block_size=32))", 2 * (8 + 4 + 48)),
        # Two chunks of 128 values, in one table, and 12-bit indices
        ("chunked_top_k(128, values=stat2())", 256 // 4 + 16 + 256 * 12 // 8),
        ("dct_top_k", 2 * (32 * 4 + 48)),
        # room for 123 of 8192, whose indices need 14 bits with the padding's
        ("threshold(0.01)", 123 * 4 + -(-123 * 14 // 8)),
        ("low_rank(4)", 4 * (64 + 128) * 4),
        # 256 and 512 codes of 4 bits, 1 and 2 scales
        ("low_rank(4, int4())", 128 + 4 + 256 + 8),
        ("error_feedback(int4)", 64 * 128 // 2 + 32 * 4),
    ],
)
def test_bytes_by_hand(text, nbytes):
    built = compression.parse(text)
    x = np.ones((64, 128), np.float32)
    message = jax.eval_shape(lambda x: built.encode(x, built.init(x))[0], x)
    assert compression.message_bytes(message) == nbytes


# --- error feedback ---


@pytest.mark.parametrize(
    "inner",
    [
        "sign", "int2", "stat2", "matrices(stat2)", "fp4", "top_k(0.1)",
        "dct_top_k(2, 4)", "threshold(0.1, every=4)", "low_rank(1, int4())",
    ],
)  # fmt: skip
def test_messages_and_the_residual_add_up_to_the_input(inner):
    text = f"error_feedback({inner})"
    state = compression.parse(text).init(tree())
    meant = 0.0
    sent = 0.0
    residuals = []

    for i in range(20):
        x = tree(seed=i)
        _, state, back = compiled(text)(x, state, KEY)
        meant += np.asarray(x["w"], np.float64)
        sent += np.asarray(back["w"], np.float64)
        residuals.append(np.linalg.norm(state.residual["w"]))
        # 20 additions in float32.
        np.testing.assert_allclose(sent + state.residual["w"], meant, atol=1e-4)

    # The residual stays bounded, so the mean of the messages approaches the input's.
    assert max(residuals[10:]) < 2.5 * max(residuals[:10])


def test_the_first_residual_is_zero_where_parameters_are_not_finite():
    tree = jnp.array([jnp.inf, jnp.nan, 1.0])
    assert not compression.parse("ef+int8").init(tree).residual.any()


def test_bfloat16_trees_keep_a_float32_residual():
    x = jnp.array([1.0, 2.0**-9], jnp.bfloat16)
    text = "error_feedback(int4)"
    state = compression.parse(text).init(x)
    sent = 0.0
    for _ in range(64):
        _, state, back = compiled(text)(x, state, KEY)
        assert back.dtype == jnp.bfloat16
        sent = sent + np.asarray(back, np.float32)

    assert state.residual.dtype == jnp.float32
    # 64 * 2**-9, or one code (1/7) more: bfloat16 loses none of it.
    np.testing.assert_allclose(sent + state.residual, [64.0, 0.125], rtol=1e-5)


# --- regions ---


# Each codec once, alone or inside of another compressor.
QUICK = (
    "bfloat16",
    "int4(stochastic=True)",
    "stat2",
    "fp4",
    "top_k(0.2, int8())",
    "chunked_top_k(k=3, chunk_side=4, values=int2(block_size=3))",
    "dct_top_k(k=3, chunk_side=4)",
    "error_feedback(sign)",
    "error_feedback(threshold(density=0.2))",
    "error_feedback(low_rank(rank=1, factors=int4()), decay=0.9)",
)


@pytest.mark.parametrize("text", mostly_slow(EXPRESSIONS, quick=QUICK))
def test_one_message_per_region_under_vmap(text):
    regions = [tree(i)["w"] for i in range(3)]
    go = jax.vmap(lambda x: compiled(text)(x, None, KEY))
    messages, _, back = go(np.stack(regions))
    message, _, alone = compiled(text)(regions[1], None, KEY)
    nbytes = compression.message_bytes(message)
    assert compression.message_bytes(messages) == 3 * nbytes
    np.testing.assert_allclose(back[1], alone, atol=1e-5)


# --- parse and errors ---


@pytest.mark.parametrize("value", ["int8", compression.int8])
@pytest.mark.parametrize(
    ("argument", "build"),
    [
        ("inner", compression.error_feedback),
        ("inner", compression.matrices),
        ("values", compression.top_k),
        ("values", compression.dct_top_k),
        ("values", compression.threshold),
        ("factors", compression.low_rank),
    ],
)
def test_names_and_factories_are_refused_as_compressors(
    monkeypatch, argument, build, value
):
    build = inspect.unwrap(build)
    if argument != "inner":
        plain = inspect.unwrap(compressor.stateless)
        monkeypatch.setattr(sys.modules[build.__module__], "stateless", plain)
    with pytest.raises(ValueError, match=f"^{argument}=.*int8.* must be a Compressor,"):
        build(**{argument: value})
