"""Loss spikes: a region's loss against its own past, by robust z-scores.

With x the loss of a region at a step and the median over its last 64 losses outside of
spikes,

    z = (x - median) / max(1.4826 MAD, 0.01 |median|)

a spike begins if z is above a threshold at 3 of the last 5 steps; one hard batch is not
a spike. A non-finite loss has the largest score. A spike has ended if none of the last
5 was above. The window, the floor and the three of five are ours.

The remedy: go back to the last checkpoint and continue with other data, as PaLM was
trained (arXiv 2204.02311, section 5.1: from some hundred steps before, without the
batches around the spike).
"""

import collections
import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

WINDOW = 64
LEAST_PAST = 16
LOOKED_AT = 5
PATIENCE = 3


class Spike(NamedTuple):
    """A spike that has begun."""

    step: int  # At which it was detected.
    region: int
    loss: float | None  # At that step; None if it is not finite.
    usual: float  # The median before it.
    score: float  # z, at most 1e6.


class LossSpikeError(ArithmeticError):
    """The loss has a spike, so the run must go back to its last checkpoint."""

    def __init__(self, spikes: list[Spike], last_good: int | None):
        self.spikes = spikes  # Of all processes.
        first = spikes[0]
        where = "there is none" if last_good is None else f"step {last_good}"
        super().__init__(
            f"loss {first.loss} at step {first.step} in region {first.region} is a "
            f"spike (usually {first.usual:.4g}, z = {first.score:.3g}); last good "
            f"checkpoint: {where}"
        )


@dataclasses.dataclass(frozen=True)
class SpikeWatch:
    """Whether to look for spikes, and whether one prevents saving."""

    zscore: float = 0.0  # The threshold; 0 looks for none.
    # Whether saving after a spike raises a `LossSpikeError`.
    rolls_back: bool = False

    def __post_init__(self):
        if not 0 <= self.zscore < math.inf:
            raise ValueError(
                f"spike_zscore={self.zscore} must be a positive number of robust "
                "standard deviations, or 0 for none"
            )
        if self.rolls_back and not self.zscore:
            raise ValueError(
                "max_rollbacks needs spike_zscore above 0, such as 10: spike_zscore=0 "
                "finds no spikes"
            )


NO_SPIKES = SpikeWatch()


class Spikes:
    """Looks for spikes, step by step."""

    def __init__(self, zscore: float):
        self._zscore = zscore
        self._past: list[collections.deque[float]] = []
        self._high: list[collections.deque[int]] = []
        self._is_on: list[bool] = []

    def observe(self, step: int, losses: np.ndarray, first_region: int) -> list[Spike]:
        """Add the losses of a step, `[R]`, and return the spikes that begin there."""
        while len(self._past) < len(losses):
            self._past.append(collections.deque(maxlen=WINDOW))
            self._high.append(collections.deque(maxlen=LOOKED_AT))
            self._is_on.append(False)

        spikes = []
        for i, loss in enumerate(np.asarray(losses, float)):
            usual, score = self._score(i, loss)
            self._high[i].append(int(score > self._zscore))
            if not self._high[i][-1] and math.isfinite(loss):
                self._past[i].append(float(loss))

            if sum(self._high[i]) >= PATIENCE and not self._is_on[i]:
                self._is_on[i] = True
                spike_loss = float(loss) if math.isfinite(loss) else None
                spikes.append(
                    Spike(
                        step=step,
                        region=first_region + i,
                        loss=spike_loss,
                        usual=usual,
                        score=score,
                    )
                )

            self._is_on[i] &= any(self._high[i])
        return spikes

    def _score(self, i: int, loss: float) -> tuple[float, float]:
        if len(self._past[i]) < LEAST_PAST:
            return math.nan, 0.0
        past = np.array(self._past[i])
        median = float(np.median(past))
        mad = float(np.median(np.abs(past - median)))
        scale = max(1.4826 * mad, 0.01 * abs(median), 1e-12)
        score = (loss - median) / scale if math.isfinite(loss) else math.inf
        return median, min(score, 1e6)

    def to_json(self) -> dict[str, Any]:
        """Return the history, for a checkpoint; plain values."""
        return {
            "past": [list(x) for x in self._past],
            "high": [list(x) for x in self._high],
            "is_on": list(self._is_on),
        }

    def continue_from(self, known: dict[str, Any]) -> None:
        """Restore the history that `to_json` returned."""
        self._past = [collections.deque(x, WINDOW) for x in known["past"]]
        self._high = [collections.deque(x, LOOKED_AT) for x in known["high"]]
        self._is_on = list(known["is_on"])
