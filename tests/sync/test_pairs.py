"""Matchings: who meets whom."""

import itertools

import numpy as np
import pytest

from cocodc_jax.sync.regions import matchings


@pytest.mark.parametrize("num_regions", range(1, 14))
def test_every_pair_meets_once(num_regions):
    partners = matchings(num_regions)
    assert partners.shape == (max(1, num_regions - 1 + num_regions % 2), num_regions)
    everyone = np.arange(num_regions)
    met = []
    for row in partners:
        np.testing.assert_array_equal(row[row], everyone)
        met += [(i, j) for i, j in enumerate(row) if i < j]
    assert sorted(met) == list(itertools.combinations(range(num_regions), 2))


@pytest.mark.parametrize("num_regions", [1, 3, 7])
def test_of_an_odd_number_each_is_alone_once(num_regions):
    alone = matchings(num_regions) == np.arange(num_regions)[None]
    assert (alone.sum(0) == 1).all()
    assert (alone.sum(1) == 1).all()


def test_of_an_even_number_nobody_is_alone():
    assert not (matchings(6) == np.arange(6)[None]).any()


def test_none_to_pair():
    with pytest.raises(ValueError, match="num_regions=0 must be at least 1"):
        matchings(0)
