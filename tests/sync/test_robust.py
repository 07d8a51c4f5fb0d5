"""Exclusion of outliers from a mean, and robust means, against NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cocodc_jax import methods
from cocodc_jax.sync import robust
from cocodc_jax.sync.messages import Compressed
from cocodc_jax.transforms import compression
from cocodc_jax.transforms.compressor import identity

M = 6
# Half of the smallest normal number is zero to some of the processor's threads.
LENGTHS = st.one_of(
    st.floats(2.0**-100, 1e6, width=32), st.sampled_from([np.nan, 1.0, 0.0])
)

JUDGE = {mean: jax.jit(robust.Robust(3.0, mean).judge) for mean in ("weighted", "clip")}
TRIMMED = jax.jit(robust.trimmed_mean, static_argnums=2)


def reference(lengths, weights, above, mean):
    """The verdicts and weights of the module's docstring, one region at a time."""
    there = [m for m in range(M) if weights[m] > 0]
    finite = [lengths[m] for m in there if np.isfinite(lengths[m])]
    median = np.median(finite) if finite else 0.0

    verdict = [0] * M
    for m in there:
        if not np.isfinite(lengths[m]):
            verdict[m] = robust.NOT_FINITE
        elif median > 0 and lengths[m] > above * median:
            verdict[m] = robust.OUTLIER

    kept = np.array([weights[m] if verdict[m] == 0 else 0 for m in range(M)])
    if any(verdict) and kept.sum() > 0:
        kept = kept / kept.sum()
    if mean == "clip" and (kept > 0).any():
        limit = np.median([lengths[m] for m in range(M) if kept[m] > 0])
        for m in range(M):
            if kept[m] > 0 and lengths[m] > limit:
                kept[m] *= limit / lengths[m]
    return verdict, kept


@settings(deadline=None, max_examples=60)
@given(
    st.lists(LENGTHS, min_size=M, max_size=M),
    st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=M, max_size=M),
    st.sampled_from(["weighted", "clip"]),
)
def test_outliers_among_lengths_are_those_of_numpy(lengths, weights, mean):
    weights = np.array(weights, np.float32)
    if weights.sum() == 0:
        weights[0] = 1
    weights /= weights.sum()
    lengths = np.array(lengths, np.float32)

    verdict, scaled = JUDGE[mean](lengths, weights)
    expected, kept = reference(lengths, weights, 3.0, mean)

    assert verdict.tolist() == expected
    np.testing.assert_allclose(scaled, kept, rtol=1e-6, atol=0)
    assert np.isfinite(scaled).all()


def test_outliers_and_nan_are_left_out_by_hand():
    """Lengths 1, 2, 3, nan, 40: median 2.5; 40 is above 5 times that, and 3 is not."""
    lengths = jnp.array([1.0, 2.0, 3.0, jnp.nan, 40.0])
    weights = jnp.full(5, 0.2)
    verdict, scaled = robust.Robust(5.0).judge(lengths, weights)
    assert verdict.tolist() == [0, 0, 0, robust.NOT_FINITE, robust.OUTLIER]
    np.testing.assert_allclose(scaled, [1 / 3, 1 / 3, 1 / 3, 0, 0], rtol=1e-6)
    assert robust.reasons_of(np.asarray(verdict)) == {3: "not finite", 4: "outlier"}
    assert robust.left_out(np.asarray(verdict)).tolist() == [0, 0, 0, 1, 1]

    _, scaled = robust.Robust(5.0, "clip").judge(lengths, weights)  # The median is 2.
    np.testing.assert_allclose(scaled, [1 / 3, 1 / 3, 2 / 9, 0, 0], rtol=1e-6)


@settings(deadline=None, max_examples=30)
@given(
    hnp.arrays(np.float32, (M, 3), elements=st.floats(-100, 100, width=32)),
    st.integers(1, M),
    st.sampled_from([0.0, 0.1, 0.25, 0.4]),
)
def test_a_trimmed_mean_is_that_of_numpy(values, num, trim):
    """The mean is over the first `num` regions; the others are NaN."""
    counted = np.arange(M) < num
    values[num:] = np.nan
    mean = TRIMMED(values, counted, trim)
    cut = math.floor(trim * num + 1e-9)
    ordered = np.sort(values[:num].astype(np.float64), axis=0)[cut : num - cut]
    np.testing.assert_allclose(mean, ordered.mean(0), rtol=1e-4, atol=1e-4)


def test_length_is_that_of_the_message():
    params = {"w": jnp.ones(3)}
    assert robust.length(params, {"w": jnp.array([3.0, 4.0])}) == 5

    half = {"w": jnp.array([300.0, 400.0], jnp.bfloat16)}  # Squares are summed wider.
    assert robust.length(params, half) == 500


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([1.0, np.nan], [3.0, 4.0]),
        ([1.0, np.inf], [3.0, 4.0]),
        ([1.0, 1.0], [np.nan, 4.0]),
        ([1.0, 1.0], [np.inf, 4.0]),
        ([1.0, 1.0], [1e30, 1.0]),  # Its square is infinite.
    ],
)
def test_the_length_of_a_message_that_is_not_finite_is_nan(params, message):
    assert np.isnan(robust.length({"w": jnp.array(params)}, {"w": jnp.array(message)}))


@pytest.mark.parametrize("name", ["fp4", "stat2", "ef+topk:0.5", "lowrank:1+int4"])
def test_a_message_that_is_replaced_by_zeros_decodes_to_zero(name):
    """Bad messages are replaced by it, so that weight 0 gives no NaN."""
    compressor = compression.parse(name)

    @jax.jit
    def both(x):
        message, _ = compressor.encode(x, compressor.init(x), jax.random.key(0))
        two = jax.tree.map(lambda a: jnp.stack([a, a]), message)
        return compressor.decode(
            jax.tree.map(lambda a: a[1], robust.without(two, jnp.array([1.0, 0.0])))
        )

    np.testing.assert_array_equal(both({"w": jnp.arange(8.0).reshape(2, 4)})["w"], 0)


class TestArguments:
    def test_a_robust_mean_is_read_from_its_text(self):
        of = robust.Robust.of
        assert of(None, "clip") == robust.Robust(math.inf, "clip")
        assert of(4.0, "trim:0.25") == robust.Robust(4.0, "trim", 0.25)

    def test_without_the_options_a_method_is_not_robust(self):
        assert methods.get("diloco").sync.robust is None
        assert not methods.get("diloco").can_restore

    def test_trimmed_messages_are_gathered(self):
        message = methods.get("diloco", robust_mean="trim:0.25").sync.message
        assert isinstance(message, Compressed)
        assert message.by.name == identity().name

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"exclude_above": 1.0}, "exclude_above=1.0 must be above 1"),
            ({"exclude_above": "3"}, "exclude_above='3' must be above 1"),
            ({"robust_mean": "trim:0.5"}, "robust_mean='trim:0.5' must be 'clip', or"),
            ({"robust_mean": "median"}, "robust_mean='median' must be"),
        ],
    )
    def test_other_values_are_refused(self, options, match):
        with pytest.raises(ValueError, match=match):
            methods.get("diloco", **options)

    @pytest.mark.parametrize(
        ("name", "options", "why"),
        [
            ("multi_ring", {"robust_mean": "clip"}, "its rings pass on sums"),
            (
                "dilocox",
                {"robust_mean": "clip", "sum_factors": True},
                "its factors are summed on their",
            ),
            ("sparseloco", {"robust_mean": "trim:0.2"}, "does not have every entry"),
            ("delayed_nesterov", {"robust_mean": "clip"}, "come one by one"),
            ("mla", {"exclude_above": 9.0}, "come one by one"),
            ("decoupled_diloco", {"robust_mean": "clip"}, "lengths and directions"),
            ("noloco", {"exclude_above": 9.0}, "none to restore one from"),
            ("data_parallel", {"exclude_above": 9.0}, "no outer parameters to restore"),
            ("des_loc", {"exclude_above": 9.0}, "the inner optimizer's moments too"),
            ("snoo", {"exclude_above": 9.0}, "has no others to be compared with"),
        ],
    )
    def test_methods_that_cannot_be_robust_are_refused(self, name, options, why):
        with pytest.raises(ValueError, match=rf"method='{name}': .*{why}"):
            methods.get(name, **options)

    @pytest.mark.parametrize("sparse", ["topk:0.25", "chunked:8", "threshold:0.25"])
    @pytest.mark.parametrize("wrapped", ["", "ef+", "matrices+", "ef+matrices+"])
    def test_sparse_messages_are_refused_however_wrapped(self, sparse, wrapped):
        with pytest.raises(ValueError, match="does not have every entry"):
            methods.get("diloco", compress=wrapped + sparse, robust_mean="trim:0.25")

    @pytest.mark.parametrize("dense", ["int4", "matrices+int4", "lowrank:2"])
    def test_dense_messages_may_be_robust(self, dense):
        method = methods.get("diloco", compress=dense, robust_mean="trim:0.25")
        assert method.sync.robust.trim == 0.25

    def test_a_trimmed_mean_has_no_weights(self):
        with pytest.raises(ValueError, match="a trimmed mean has no weights"):
            methods.get("diloco", robust_mean="trim:0.2", region_weights="tokens")
