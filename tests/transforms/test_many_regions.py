"""Messages of many regions: means over senders."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax.transforms import compression
from cocodc_jax.transforms.decoupled import average_duplicates
from tests.program import family_reference as reference

M = 3
ROWS = 6
COLUMNS = 10


@pytest.fixture
def regions():
    """Regions similar enough to send some of the same coefficients."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=(ROWS, COLUMNS))
    return common + 0.3 * rng.normal(size=(M, ROWS, COLUMNS))


def encode_all(compressor, regions):
    of_one = lambda x: compressor.encode(x, compressor.init(x))[0]  # noqa: E731
    return jax.jit(jax.vmap(of_one))(regions)


def averaged(messages, compressor):
    return jax.jit(lambda m: average_duplicates(m, compressor))(messages)


@pytest.mark.usefixtures("float64")
def test_mean_over_senders(regions):
    compressor = compression.dct_top_k(k=3, chunk_side=4)
    models = regions.reshape(M, -1)[:, :44]
    tree = [np.stack(x) for x in zip(*map(reference.split, models), strict=True)]
    actual = averaged(encode_all(compressor, tree), compressor)

    sent = np.array(list(map(reference.chunked(3, 4, is_cosine=True), models)))
    spectra = np.array(list(map(reference.in_cosines(4), sent)))
    assert {0, 1, 2, 3} == set((np.abs(spectra) > 1e-12).sum(0))

    expected = reference.mean_over_senders(sent, 4)
    np.testing.assert_allclose(reference.join(actual), expected, atol=1e-10)


def test_compressed_values_are_decoded_before_they_are_averaged():
    regions = np.array([[127.0, 0, 0, 1], [0, 254.0, 0, 1], [127.0, 2.0, 0, 0]])
    compressor = compression.parse("top_k(0.5, values=int8())")
    actual = averaged(encode_all(compressor, regions), compressor)
    # 254 has steps of 2: region 1 sends its 1 as 0 or 2.
    np.testing.assert_allclose(actual[:3], [127, 128, 0], rtol=1e-6)
    half = jnp.asarray(regions, jnp.bfloat16)
    assert averaged(encode_all(compressor, half), compressor).dtype == jnp.bfloat16


@pytest.mark.parametrize("text", ["int4", "ef+lowrank:2", "threshold"])
def test_messages_without_places_are_refused(text):
    compressor = compression.parse(text)
    with pytest.raises(ValueError, match="average_duplicates cannot read messages of"):
        average_duplicates((), compressor)
