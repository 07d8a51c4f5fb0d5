"""Unequal regions: when their steps end, and their weights in a mean."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocodc_jax.sync.regions import Regions

# Tenths, which floats do not hold: their quotients must still be cut exactly.
TENTHS = st.lists(st.integers(10, 70), min_size=1, max_size=5).map(lambda x: [10, *x])


def regions_of(tenths):
    return Regions(tuple(k / 10 for k in tenths), (1,) * len(tenths))


def test_steps_and_sequences_of_unequal_regions_by_hand():
    """Step times 1, 1.5 and 2: steps end at 1 2 3 4, at 1.5 3, and at 2 4."""
    regions = Regions((1.0, 1.5, 2.0), (4, 2, 8))
    assert regions.num == 3
    assert not regions.are_even
    assert regions.steps_done(4).tolist() == [4, 2, 2]
    assert regions.sequences_done(4).tolist() == [16, 4, 16]
    assert regions.participating(0, 4).astype(int).tolist() == [
        [1, 0, 0],
        [1, 1, 1],
        [1, 1, 0],
        [1, 0, 1],
    ]


def test_equal_regions_take_part_in_every_step():
    regions = Regions.alike(3)
    assert regions.are_even
    np.testing.assert_array_equal(regions.participating(5, 2), np.ones((2, 3)))


@given(TENTHS, st.integers(0, 3000))
def test_steps_are_whole_quotients(tenths, tick):
    exact = [math.floor(Fraction(10 * tick, k)) for k in tenths]
    assert regions_of(tenths).steps_done(tick).tolist() == exact


@given(TENTHS, st.integers(0, 500), st.integers(1, 40), st.integers(0, 40))
def test_active_ticks_add_up_to_the_steps_done(tenths, tick, num_ticks, more):
    regions = regions_of(tenths)
    active = regions.participating(tick, num_ticks + more)
    done = regions.steps_done(tick + num_ticks + more) - regions.steps_done(tick)
    np.testing.assert_array_equal(active.sum(0), done)

    # The fastest steps at every tick, and a cut changes nothing.
    assert active[:, 0].all()
    if more:
        before = regions.participating(tick, num_ticks)
        after = regions.participating(tick + num_ticks, more)
        np.testing.assert_array_equal(active, np.concatenate([before, after]))


def test_weights_by_tokens():
    """From tick 0 to 4 the regions did 4, 2 and 2 steps of 4, 2 and 8 sequences."""
    regions = Regions((1.0, 1.5, 2.0), (4, 2, 8))
    weights = regions.weights(0, 4, lambda steps, tokens: tokens)
    np.testing.assert_allclose(weights, np.array([16, 4, 16]) / 36)
    # Since tick 2 (2, 1, 1 steps done): 2, 1 and 1 more; region 1 is not counted.
    weights = regions.weights(2, 4, lambda steps, tokens: tokens, (0, 2))
    np.testing.assert_allclose(weights, [8 / 16, 0, 8 / 16])
    squares = regions.weights(0, 4, lambda n, tokens: tokens * tokens / n)
    np.testing.assert_allclose(squares, np.array([64, 8, 128]) / 200)


@given(TENTHS, st.integers(0, 60), st.integers(0, 60), st.data())
def test_weights_are_a_mean(tenths, tick, ticks, data):
    regions = regions_of(tenths)
    part = data.draw(st.sets(st.integers(0, regions.num - 1), min_size=1))
    counted = tuple(sorted(part))

    weights = regions.weights(tick, tick + ticks, lambda n, tokens: 3 * tokens, counted)
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1)
    assert not weights[[m for m in range(regions.num) if m not in part]].any()

    # A common factor changes nothing.
    same = regions.weights(tick, tick + ticks, lambda n, tokens: tokens, counted)
    np.testing.assert_allclose(weights, same)

    alike = regions.weights(tick, tick + ticks, None, counted)
    np.testing.assert_allclose(alike[list(counted)], 1 / len(counted))


def test_weights_are_equal_if_no_region_did_a_step():
    regions = Regions((1.0, 4.0, 4.0), (1, 1, 1))
    weights = regions.weights(0, 3, lambda steps, tokens: tokens, (1, 2))
    np.testing.assert_allclose(weights, [0, 0.5, 0.5])


@pytest.mark.parametrize(
    ("step_times", "batch_sizes", "message"),
    [
        ((1.0,), (1, 1), r"step_times=\(1.0,\) and batch_sizes=\(1, 1\) must have one"),
        ((), (), "must have one entry for each region"),
        ((2.0, 3.0), (1, 1), r"step_times=\(2.0, 3.0\) must be at least 1 .* fastest"),
        ((1.0, 0.5), (1, 1), r"step_times=\(1.0, 0.5\) must be at least 1"),
        ((1.0, 2.0), (1, 0), r"batch_sizes=\(1, 0\) must be at least 1"),
    ],
)
def test_wrong_arguments_are_named(step_times, batch_sizes, message):
    with pytest.raises(ValueError, match=message):
        Regions(step_times, batch_sizes)
