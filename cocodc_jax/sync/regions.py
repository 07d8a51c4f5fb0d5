"""Regions of different speeds and batch sizes, and how they are paired.

Time is counted in *ticks*, the steps of the fastest region. Everywhere else, steps of a
run (schedules, records, `--steps`) are ticks. A region whose step takes s ticks has
done floor(t / s) steps at tick t.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from cocodc_jax.transforms.numerics import check_at_least


class Weigh(Protocol):
    """Computes the weights of regions in a mean from their steps and tokens."""

    def __call__(self, steps: np.ndarray, tokens: np.ndarray, /) -> np.ndarray:
        """Return the weights of the regions, up to a common factor.

        Args:
          steps: each region's inner steps since the last sync, float64 `[R]`.
          tokens: each region's tokens since then, float64 `[R]`.

        Returns:
          float64 `[R]`, at least 0. If all are 0, the weights are equal.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Regions:
    """Speed and batch size of each region.

    Attributes:
      step_times: ticks of one inner step of each region, at least 1.
      batch_sizes: sequences in one step's batch of each region.
    """

    step_times: tuple[float, ...]
    batch_sizes: tuple[int, ...]

    def __post_init__(self):
        if len(self.step_times) != len(self.batch_sizes) or not self.step_times:
            raise ValueError(
                f"step_times={self.step_times} and batch_sizes={self.batch_sizes} must "
                "have one entry for each region"
            )

        are_times = all(1 <= time < math.inf for time in self.step_times)
        if not are_times or min(self.step_times) != 1:
            raise ValueError(
                f"step_times={self.step_times} must be at least 1 and finite for every "
                "region and 1 for the fastest, whose steps time is counted in"
            )
        if min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes={self.batch_sizes} must be at least 1")

    @classmethod
    def alike(cls, num_regions: int) -> Regions:
        """Make regions of equal speed and batch size."""
        check_at_least("regions", num_regions, 1)
        return cls((1.0,) * num_regions, (1,) * num_regions)

    @property
    def num(self) -> int:
        """Number of regions, M."""
        return len(self.step_times)

    @property
    def are_even(self) -> bool:
        """Whether every region steps at every tick."""
        return max(self.step_times) == 1

    def steps_done(self, tick: int) -> np.ndarray:
        """Return the inner steps of each region by `tick`, int64 `[R]`."""
        # The epsilon corrects the rounding of a whole quotient.
        return np.array([math.floor(tick / s + 1e-9) for s in self.step_times])

    def participating(self, tick: int, num_ticks: int) -> np.ndarray:
        """Return which regions end a step at each tick after `tick`, bool `[T, R]`."""
        done = [self.steps_done(t) for t in range(tick, tick + num_ticks + 1)]
        return np.diff(done, axis=0) > 0

    def sequences_done(self, tick: int) -> np.ndarray:
        """Return the sequences of each region by `tick`, int64 `[R]`."""
        return self.steps_done(tick) * np.array(self.batch_sizes)

    def weights(
        self,
        since: int,
        tick: int,
        weigh: Weigh | None,
        participating: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Return weights of the regions in a mean, float64 `[R]`, of sum 1.

        They are for `weigh` of the work between two ticks (None: equal), of the
        participating regions (None: all).
        """
        counted = np.zeros(self.num)
        counted[list(range(self.num) if participating is None else participating)] = 1
        if weigh is not None:
            steps = self.steps_done(tick) - self.steps_done(since)
            weights = counted * weigh(steps, steps * np.array(self.batch_sizes))
            if weights.sum() > 0:  # Else no region did a step: equal weights.
                counted = weights
        return counted / counted.sum()


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

    >>> print(matchings(4))
    [[3 2 1 0]
     [1 0 3 2]
     [2 3 0 1]]
    """
    check_at_least("num_regions", num_regions, 1)
    last = num_regions - 1 + num_regions % 2  # A bye if M is odd.
    rounds, players = np.mgrid[:last, :last]
    partners = (rounds - players) % last
    partners[partners == players] = last
    of_last = np.argmax(partners == last, axis=1)
    partners = np.column_stack([partners, of_last])[:, :num_regions]
    return np.where(partners < num_regions, partners, np.arange(num_regions))
