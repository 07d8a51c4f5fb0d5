"""Messages of many regions: means over senders, and over owners."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax.sync.messages import MaskedCore
from cocodc_jax.transforms import compression
from cocodc_jax.transforms import masked as masked_file
from cocodc_jax.transforms.compressor import identity, message_bytes, per_leaf
from cocodc_jax.transforms.decoupled import average_duplicates
from cocodc_jax.transforms.low_rank import low_rank
from cocodc_jax.transforms.masked import masked, weigh_owned
from cocodc_jax.transforms.sparsify import top_k
from tests.numerics import assert_within_ulps
from tests.program import family_reference as reference

M, ROWS, COLUMNS = 3, 6, 10


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
def test_messages_that_cannot_be_read_are_named(text):
    compressor = compression.parse(text)
    with pytest.raises(ValueError, match="average_duplicates cannot read messages of"):
        average_duplicates((), compressor)


# --- Entries of a region's own: who owns what, and the mean over owners ---

NUM_REGIONS = 4
RNG = np.random.default_rng(0)
REGIONS = RNG.normal(size=(NUM_REGIONS, 5, 6)).astype(np.float32)


def messages(compressor):
    states = jax.vmap(compressor.init)(REGIONS)
    states = states._replace(region=jnp.arange(NUM_REGIONS))
    return jax.jit(jax.vmap(lambda x, s: compressor.encode(x, s)[0]))(REGIONS, states)


def decoded(compressor):
    return np.asarray(jax.jit(jax.vmap(compressor.decode))(messages(compressor)))


@pytest.mark.parametrize("density", [0.25, 0.4])
def test_the_mean_is_that_of_the_owners(density):
    """Of a core that says half of everything, and so leaves half."""
    half = per_leaf("half", lambda x, key: x / 2, lambda arrays, shape: arrays)
    found = decoded(masked(half, density, NUM_REGIONS))
    own = np.abs(found - REGIONS / 2) > 1e-6
    owners = own.sum(0)
    assert own.sum(axis=(1, 2)).tolist() == [round(30 * density)] * 4
    assert set(owners.ravel()) <= {0, 1, 2}  # 8 of 30, four times: two owned twice.
    theirs = (own * REGIONS / 2).sum(0) / np.maximum(owners, 1)
    np.testing.assert_allclose(found.mean(0), REGIONS.mean(0) / 2 + theirs, atol=1e-6)


@pytest.mark.parametrize(
    "weights", [[0.625, 0.125, 0.125, 0.125], [0, 0.5, 0.25, 0.25], [0, 0, 0.5, 0.5]]
)
def test_a_weighted_mean_is_that_of_the_owners_that_count(weights):
    """Where none of them does, the core alone is left."""
    weights, density = np.float32(weights), 0.4
    half = per_leaf("half", lambda x, key: x / 2, lambda arrays, shape: arrays)
    compressor = masked(half, density, NUM_REGIONS)
    own = (np.abs(decoded(compressor) - REGIONS / 2) > 1e-6) * weights[:, None, None]
    core = np.einsum("m,mij->ij", weights, REGIONS / 2)
    total = own.sum(0)
    theirs = (own * REGIONS / 2).sum(0) / np.where(total > 0, total, 1)
    scaled = weigh_owned(messages(compressor), jnp.asarray(weights), half, density)
    found = np.asarray(jax.vmap(compressor.decode)(scaled))
    np.testing.assert_allclose(
        np.einsum("m,mij->ij", weights, found), core + theirs, atol=1e-6
    )
    message = MaskedCore(half, density, num_regions=NUM_REGIONS)
    mean = message.combine(messages(compressor), jnp.asarray(weights))
    np.testing.assert_allclose(mean, core + theirs, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 5])
def test_the_order_is_the_same_as_a_constant_and_drawn_in_the_program(
    monkeypatch, seed
):
    compressor = masked(top_k(1 / 30), 0.4, NUM_REGIONS, seed)
    one = jax.tree.map(lambda x: x[0], messages(compressor))

    def sorts():
        program = jax.jit(lambda message: compressor.decode(message))
        return "stablehlo.sort" in program.lower(one).as_text()

    found = decoded(compressor)
    assert not sorts()
    monkeypatch.setattr(masked_file, "_MOST_CONSTANT", 29)
    assert sorts()
    again = jax.jit(jax.vmap(lambda message: compressor.decode(message)))
    assert_within_ulps(again(messages(compressor)), found)


def test_a_message_is_as_large_as_it_says_before_it_is_drawn():
    part = {"a": jnp.ones((3, 4)), "b": jnp.ones(5, jnp.bfloat16)}
    message = MaskedCore(top_k(0.25), 0.5, seed=3, num_regions=2)
    compressor = message.compressor()
    sent, _ = compressor.encode(part, compressor.init(part))
    kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert kinds(message.encoded(part)) == kinds(sent)


def test_bytes_are_the_core_the_values_and_whose_they_are():
    compressor = masked(low_rank(1), 0.25, NUM_REGIONS)
    message, _ = compressor.encode(REGIONS[0], compressor.init(REGIONS[0]))
    assert message_bytes(message) == 4 * (5 + 6) + 4 * round(30 * 0.25) + 4


def test_errors():
    for density in (0, 1.5):
        with pytest.raises(ValueError, match=f"^density={density} must be above 0"):
            masked(identity(), density, 2)
