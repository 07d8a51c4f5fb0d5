"""Pairings of regions that exchange in pairs."""

from __future__ import annotations

import numpy as np


def matchings(num_regions: int) -> np.ndarray:
    """List matchings such that every pair of regions is in exactly one.

    These are the rounds of a round-robin tournament (circle method). A matching drawn
    uniformly pairs a region with each other one equally often. It does not contain all
    matchings of more than four regions, which keeps the number of different exchanges
    at M - 1 instead of (M - 1)!!.

    Args:
      num_regions: M, at least 1. If it is odd, each matching leaves one region alone.

    Returns:
      Partners, int64 `[N, M]`, N = M - 1 for even M, else M; a region left alone is its
      own partner.

    Raises:
      ValueError: if `num_regions` is below 1.

    >>> print(matchings(4))
    [[3 2 1 0]
     [1 0 3 2]
     [2 3 0 1]]
    """
    if num_regions < 1:
        raise ValueError(f"num_regions={num_regions} must be at least 1")
    players = num_regions + num_regions % 2  # A bye if odd.
    circle = players - 1
    rounds = []
    for turn in range(circle):
        partner = np.arange(players)
        for i in range(circle):
            other = (turn - i) % circle
            partner[i] = players - 1 if other == i else other
            if other == i:
                partner[players - 1] = i
        alone = partner[:num_regions] >= num_regions
        rounds.append(np.where(alone, np.arange(num_regions), partner[:num_regions]))
    return np.stack(rounds)
