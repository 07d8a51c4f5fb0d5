"""Averages over regions other than the plain mean, and averages of moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.sync import moments
from cocodc_jax.sync.averages import RadialDirectional, SharedMask, sync_key
from cocodc_jax.sync.messages import AsIs
from cocodc_jax.sync.moments import Moments
from cocodc_jax.sync.schedules import staggered
from cocodc_jax.transforms import compression
from cocodc_jax.transforms.mt_adam import mt_adam
from cocodc_jax.transforms.muon import muon

RDA = RadialDirectional()
KEY = sync_key(0, 8)


def averaged(average, parts, weights=None, key=None):
    """Average regions' fragments, in NumPy but for the average itself."""
    made = [average.before(part, key) for part in parts]
    weights = np.full(len(parts), 1 / len(parts)) if weights is None else weights
    mean = jax.tree.map(
        lambda *x: sum(w * y for w, y in zip(weights, x, strict=True)), *made
    )
    return average.after(mean, parts[0], key)


def part(**leaves):
    return {path.replace("_", "/"): jnp.asarray(x) for path, x in leaves.items()}


def test_lengths_and_directions_by_hand():
    """Of [6, 0] and [0, 2]: length 4 along the diagonal; the mean is [3, 1]."""
    parts = [part(w=[6.0, 0.0]), part(w=[0.0, 2.0])]
    out = averaged(RDA, parts)["w"]
    np.testing.assert_allclose(out, 4 / np.sqrt(2) * np.ones(2), rtol=1e-6)
    weighted = averaged(RDA, parts, [0.75, 0.25])["w"]
    direction = np.array([0.75, 0.25]) / np.hypot(0.75, 0.25)
    np.testing.assert_allclose(weighted, 5 * direction, rtol=1e-6)
    # A late region has weight 0.
    np.testing.assert_allclose(averaged(RDA, parts, [1, 0])["w"], [6, 0], rtol=1e-6)


def test_embeddings_are_averaged_plainly_and_layers_one_by_one():
    stacked = np.array([[6.0, 0.0], [1.0, 0.0]])
    other = np.array([[0.0, 2.0], [3.0, 0.0]])
    out = averaged(RDA, [part(embedding_w=x, blocks_w=x) for x in (stacked, other)])
    np.testing.assert_array_equal(out["embedding/w"], [[3, 1], [2, 0]])
    expected = [[4 / np.sqrt(2)] * 2, [2, 0]]
    np.testing.assert_allclose(out["blocks/w"], expected, rtol=1e-6)


@pytest.mark.parametrize("values", [(3.0, -1.0), (0.0, 0.0)])
def test_opposite_directions_and_zeros_average_to_zero(values):
    parts = [part(w=[value]) for value in values]
    np.testing.assert_array_equal(averaged(RDA, parts)["w"], [0])


MASKED = {"a": jnp.zeros((10, 10)), "b": jnp.zeros(7)}


def test_a_mask_has_the_share_of_every_array_and_is_the_same_in_every_region():
    drawn = SharedMask(0.3).mask(MASKED, KEY)
    again = SharedMask(0.3).mask(MASKED, sync_key(0, 8))

    assert jax.tree.map(jnp.sum, drawn) == {"a": 30, "b": 2}
    assert (drawn["a"] == again["a"]).all()


@pytest.mark.parametrize(
    ("fragment_id", "step", "seed"), [(0, 12, 0), (1, 8, 0), (0, 8, 1)]
)
def test_masks_differ_between_syncs_and_seeds(fragment_id, step, seed):
    drawn = SharedMask(0.3).mask(MASKED, KEY)
    other = SharedMask(0.3, seed=seed).mask(MASKED, sync_key(fragment_id, step))

    assert (drawn["a"] != other["a"]).any()


def test_entries_that_are_drawn_are_averaged_and_others_are_zero():
    rng = np.random.default_rng(0)
    parts = [part(w=rng.normal(size=(4, 5))) for _ in range(3)]
    mask = SharedMask(0.4)
    out = averaged(mask, parts, key=KEY)["w"]
    mean = np.mean([x["w"] for x in parts], axis=0)
    drawn = mask.mask(parts[0], KEY)["w"]
    np.testing.assert_allclose(out, np.where(drawn, mean, 0), rtol=0, atol=1e-6)
    assert drawn.sum() == 8


def test_bytes_are_those_of_the_averaged_entries():
    shapes = {
        "embedding": jax.ShapeDtypeStruct((4, 8), "float32"),
        "blocks/w": jax.ShapeDtypeStruct((3, 8, 8), "float32"),
    }

    assert AsIs(average=RDA).num_bytes(shapes, 4) == 4 * (32 + 192 + 3)
    masked = AsIs(average=SharedMask(0.25))
    assert masked.num_bytes(shapes, 4) == 4 * (8 + 48)
    int8 = masked.compressed(compression.int8())
    assert int8.average == SharedMask(0.25)
    assert int8.num_bytes(shapes, 4) == 8 + 48 + 2 * 4  # A scale each.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SharedMask(0.0), "mask_density=0.0 must be above 0 and at most 1"),
        (lambda: methods.get("loscar", mask_seed=0.5), "mask_seed=0.5 must be a whole"),
        (lambda: methods.get("streaming_diloco", merge_rule="replay", mixing_alpha=0.3),
         "mixing_alpha=0.3 has no meaning with merge_rule='replay'; leave"),
        (lambda: methods.get("des_loc", sync_moments=(3, 6)),
         r"sync_moments=\(3, 6\) must be two numbers"),
        (lambda: methods.get("loscar", compress="ef+int8"),
         r"compress='error_feedback\(int8\)' has no meaning for method='loscar': "
         "entries are drawn anew for each message"),
        (lambda: methods.get("noloco").with_sync(message=AsIs(average=RDA)),
         "RadialDirectional makes one pseudo-gradient of all, but it has outer"),
        (lambda: methods.get("streaming_diloco", merge_rule="sum"),
         r"merge_rule='sum' is unknown; use one of \('mix', 'replay'\)"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- Moments that go with a sync ---


def test_each_moment_is_due_at_its_own_interval():
    table = {n: Moments(3, 6).due(n) for n in range(1, 13)}
    assert [n for n, due in table.items() if "mu" in due] == [3, 6, 9, 12]
    assert [n for n, due in table.items() if "nu" in due] == [6, 12]
    assert Moments(0, 2).due(2) == ("nu",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3,6", Moments(3, 6)), ("0, 1", Moments(0, 1)), ("", None), ("0,0", None)],
)
def test_moments_are_read_from_a_text(text, expected):
    assert Moments.parse(text) == expected


@pytest.mark.parametrize("text", ["3", "3,6,9", "3,x", "-1,2"])
def test_invalid_texts_of_moments_are_refused(text):
    with pytest.raises(ValueError, match=f"sync_moments='{text}' must be two numbers"):
        methods.get("des_loc", sync_moments=text)


def test_intervals_of_moments_are_not_negative():
    with pytest.raises(ValueError, match="first=-1 must be at least 0"):
        Moments(-1, 2)


def test_moments_are_found_by_type_and_put_back():
    params = {"w": jnp.ones(2)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), mt_adam(0.1))
    state = optimizer.init(params)
    (adam,) = moments.take(state, ("mu", "nu"))
    assert len(adam["mu"]) == 2

    new = [{"mu": ({"w": 1}, {"w": 2})}]
    state = moments.put(state, new)
    assert moments.take(state, ("mu",)) == new
    assert moments.take(state, ("nu",))[0]["nu"]["w"].tolist() == [0, 0]
    assert moments.take(optax.sgd(0.1, 0.9).init(params), ("mu",)) == []


def test_moments_of_muon_are_those_of_leaves_that_are_no_matrices():
    params = {"blocks": {"w": jnp.ones((2, 3, 3))}, "embed": jnp.ones((4, 3))}
    (adam,) = moments.take(muon(0.1).init(params), ("nu",))
    assert adam["nu"]["embed"].shape == (4, 3)
    assert isinstance(adam["nu"]["blocks"]["w"], optax.MaskedNode)


def test_sync_moments_needs_one_fragment_and_no_delay():
    method = methods.get("des_loc")
    with pytest.raises(ValueError, match="sync_moments=3,6 goes with .* delay_steps=0"):
        method.with_sync(schedule=staggered(4, 1, 2))
    with pytest.raises(ValueError, match="num_fragments=1"):
        method.with_sync(schedule=staggered(4, 2))
