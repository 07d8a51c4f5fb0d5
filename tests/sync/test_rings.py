"""Rings and pairs: who passes on to whom, and how much is sent."""

import itertools

import jax
import numpy as np
import pytest

from cocodc_jax.sync.regions import matchings
from cocodc_jax.sync.summed import ByRings
from cocodc_jax.transforms import compression


@pytest.mark.parametrize("num_places", range(1, 13))
def test_each_order_visits_every_place(num_places):
    for stride in ByRings(8).strides(num_places):
        assert len({q * stride % num_places for q in range(num_places)}) == num_places


def test_strides_differ_as_long_as_there_are_some():
    assert ByRings(4).strides(5) == (1, 4, 2, 3)
    assert ByRings(3).strides(4) == (1, 3, 1)
    assert ByRings(2).strides(2) == (1, 1)
    assert ByRings(2).strides(1) == (0, 0)


def test_bytes_are_twice_all_but_one_share():
    shapes = {"w": jax.ShapeDtypeStruct((60, 20), np.float32)}
    assert ByRings(2).num_bytes(shapes, 4) == 4 * 1200 * 2 * 3 / 4
    assert ByRings(2).num_bytes(shapes, 1) == 0
    # 1201 numbers do not divide by 8: each chunk has 151.
    assert ByRings(2).num_sent(1201, 4) == 2 * 2 * 3 * 151


def test_it_lies_on_the_inner_mesh():
    assert ByRings(2).only_in_program == "its rings use the inner mesh"
    assert ByRings(2).compressor() is None


def test_no_rings():
    with pytest.raises(ValueError, match="num_rings=0 must be positive"):
        ByRings(0)


def test_rings_carry_nothing_compressed():
    with pytest.raises(ValueError, match="its rings pass on partial sums"):
        ByRings(2).compressed(compression.parse("int8"))


# --- Pairs ---


@pytest.mark.parametrize("num_regions", range(1, 14))
def test_every_pair_meets_once(num_regions):
    """In as few rounds as there are, so of an odd number each is alone once."""
    partners = matchings(num_regions)
    assert partners.shape == (max(1, num_regions - 1 + num_regions % 2), num_regions)
    everyone = np.arange(num_regions)
    met = []
    for row in partners:
        np.testing.assert_array_equal(row[row], everyone)
        met += [(i, j) for i, j in enumerate(row) if i < j]
    assert sorted(met) == list(itertools.combinations(range(num_regions), 2))


def test_none_to_pair():
    with pytest.raises(ValueError, match="num_regions=0 must be at least 1"):
        matchings(0)
