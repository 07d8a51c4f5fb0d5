"""Messages of many regions averaged over their senders, against SciPy's transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft
from jax.sharding import PartitionSpec as P

from cocodc_jax.transforms import compression
from cocodc_jax.transforms.decoupled import average_duplicates

# No chunk with a single column or row: its coefficients come in equal pairs.
M, ROWS, COLUMNS, SIDE, K = 3, 6, 10, 4, 3


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def chunks():
    for i in range(0, ROWS, SIDE):
        for j in range(0, COLUMNS, SIDE):
            yield np.s_[i : i + SIDE, j : j + SIDE]


def transform(x, apply):
    """Apply a transform to every chunk of the padded matrix."""
    out = np.zeros((8, 12))
    for where in chunks():
        out[where] = apply(x[where], norm="ortho")
    return out


def largest(coefficients):
    """Mask of the K largest of every chunk."""
    mask = np.zeros(coefficients.shape, bool)
    for where in chunks():
        size = np.abs(coefficients[where])
        mask[where] = size >= np.sort(size.ravel())[-K]
    return mask


def pad(x):
    return np.pad(x, ((0, 2), (0, 2)))


def average(coefficients, masks):
    total = (coefficients * masks).sum(0)
    mean = total / np.maximum(masks.sum(0), 1)
    return transform(mean, scipy.fft.idctn)[:ROWS, :COLUMNS]


@pytest.fixture
def regions():
    """Regions alike enough to send some of the same coefficients."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=(ROWS, COLUMNS))
    return common + 0.3 * rng.normal(size=(M, ROWS, COLUMNS))


def encode_all(compressor, regions):
    def of_one(x):
        return compressor.encode(x, compressor.init(x))[0]

    return jax.jit(jax.vmap(of_one))(regions)


def averaged(messages, compressor):
    return jax.jit(lambda m: average_duplicates(m, compressor))(messages)


def test_mean_over_senders(regions):
    compressor = compression.dct_top_k(k=K, chunk_side=SIDE)
    actual = averaged(encode_all(compressor, regions), compressor)
    spectra = np.stack([transform(pad(x), scipy.fft.dctn) for x in regions])
    masks = np.stack([largest(s) for s in spectra])
    assert {0, 1, 2, 3} == set(masks.sum(0).ravel())
    np.testing.assert_allclose(actual, average(spectra, masks), atol=1e-10)


@pytest.mark.parametrize(
    "text", ["dct_top_k(16, 4)", "chunked_top_k(16, 4)", "top_k(1.0)"]
)
def test_of_everything_sent_it_is_the_mean(text, regions):
    compressor = compression.parse(text)
    actual = averaged(encode_all(compressor, regions), compressor)
    np.testing.assert_allclose(actual, regions.mean(0), atol=1e-10)


def test_of_one_region_it_is_decode(regions):
    compressor = compression.parse("dct_top_k(3, 4, values=int2(3))")
    messages = encode_all(compressor, regions[:1])
    one = jax.tree.map(lambda x: np.asarray(x)[0], messages)
    actual = averaged(messages, compressor)
    decoded = jax.jit(compressor.decode)(one)
    np.testing.assert_allclose(actual, decoded, rtol=1e-6, atol=1e-7)


def test_compressed_values_are_decoded_before_they_are_averaged():
    regions = np.array([[127.0, 0, 0, 1], [0, 254.0, 0, 1], [127.0, 2.0, 0, 0]])
    compressor = compression.parse("top_k(0.5, values=int8())")
    actual = averaged(encode_all(compressor, regions), compressor)
    # 254 has steps of 2: region 1 sends its 1 as 0 or 2.
    np.testing.assert_allclose(actual[:3], [127, 128, 0], rtol=1e-6)


def test_trees_and_dtypes_in_shard_map_after_all_gather():
    compressor = compression.parse("dct_top_k(4, 4, values=int8())")
    rng = np.random.default_rng(1)
    tree = {
        "w": rng.normal(size=(M, 2, 5, 4)).astype(np.float32),
        "b": [jnp.asarray(rng.normal(size=(M, 7)), jnp.bfloat16), None],
    }
    mesh = jax.make_mesh((M,), ("region",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(x):
        x = jax.tree.map(lambda leaf: leaf[0], x)
        message, _ = compressor.encode(x, ())
        combined = average_duplicates(jax.lax.all_gather(message, "region"), compressor)
        return jax.tree.map(lambda leaf: leaf[None], combined)

    specs = P("region")
    go = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs))
    actual = go(tree)
    assert actual["b"][0].dtype == jnp.bfloat16
    wanted = averaged(encode_all(compressor, tree), compressor)
    for a, w in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        for region in np.asarray(a, np.float32):
            np.testing.assert_allclose(region, np.asarray(w, np.float32), atol=1e-6)


@pytest.mark.parametrize("text", ["int4", "ef+lowrank:2", "threshold"])
def test_messages_that_cannot_be_read_are_named(text):
    compressor = compression.parse(text)
    with pytest.raises(ValueError, match="average_duplicates cannot read messages of"):
        average_duplicates((), compressor)
