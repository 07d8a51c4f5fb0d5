"""Matchings: who meets whom."""

import itertools

import numpy as np
import pytest

from cocodc_jax.sync.pairs import matchings


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
