"""Names what is faulty: a link, a sender, a receiver, a region, from times alone.

Collectives of training are periodic and regular: each sync sends messages of one size
over the same pairs, so what a message takes is compared with what that pair took before
(C4, arXiv 2406.04594). With x a time in seconds, over the healthy past of its own pair

    z = (x - median) / max(1.4826 MAD, 0.1 median)                      robust z-score

a cell of the matrix of pairs (row sends, column receives) is bad where z is above
`threshold` in `patience` of the last five syncs. Lateness is measured by `least` at
least, by six times of which a busy machine delays messages now and then; a sixth of it
does for one that is late alone, by four times as much as any other of the same sync: a
link that loses packets delays nearly all of its messages, but not by much. Bad cells
are then explained by as few causes as do (`causes.py`).

Two regions have one cell each way: always a link. What is bad is not learned from, so a
fault stays named as long as it lasts. A message that never came takes infinitely long;
one that was not measured is NaN, and says nothing. The floor of a tenth of the median,
the threshold and the patience are ours.

Times of steps and lengths of messages, a number for each region, go the same way, by
`Regions`: against a region's own past, and how many times it against the others.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics

import numpy as np

from cocodc_jax.network.causes import alone, explain

_WINDOW = 32  # healthy times that are remembered
_LOOKED_AT = 5  # syncs among which `patience` bad ones are looked for
_LEAST_PAST = 3  # times by which anything can be judged
_MAD_TO_SIGMA = 1.4826  # of normal numbers


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is faulty, and the evidence for it.

    Attributes:
      kind: "link", "sender", "receiver", "region", "partition" or "network" of
        messages; "slow" or "unusual" of numbers; "gone" of a region that takes part no
        more, "silent" of one that is not heard and may be soon.
      where: the regions by number: two of a link, none of the network, those of the
        smaller part of a partition, else one.
      seconds: the median of the bad values now.
      usual: the median of their medians before.
      score: the median of their robust z-scores.
    """

    kind: str
    where: tuple[int, ...]
    seconds: float
    usual: float
    score: float

    def explain(self, regions: tuple[str, ...] = (), unit: str = "s") -> str:
        """Say it in a line, with the evidence.

        >>> Finding("link", (0, 2), 1.5, 0.5, 40.0).explain()
        'link from region 0 to region 2: 1.5 s, usually 0.5 s (z = 40)'
        """
        names = [regions[i] if regions else f"region {i}" for i in self.where]
        if self.kind == "gone":
            return f"{names[0]} is gone: it has ended, is silent or cut off"
        if self.kind == "silent":
            return (
                f"{names[0]} is silent for {self.seconds:.3g} {unit}, before for at "
                f"most {self.usual:.3g} {unit}"
            )
        what = {
            "link": "link from {} to {}",
            "network": "the network",
            "partition": f"the network is cut before {' and '.join(names)}",
            "region": "{}, all that it sends and receives",
        }.get(self.kind, f"{self.kind} {{}}")
        return (
            f"{what.format(*names)}: {self.seconds:.3g} {unit}, usually "
            f"{self.usual:.3g} {unit} (z = {self.score:.3g})"
        )


def robust_z(
    value: np.ndarray,
    median: np.ndarray | float,
    mad: np.ndarray | float,
    floor: float = 0.1,
    least: float = 1e-12,
) -> np.ndarray:
    """Return robust z-scores."""
    return _times(value - median, _scale(median, mad, floor), least)


def _median(values: np.ndarray) -> np.ndarray:
    """Return the medians over the first axis of what is not NaN; NaN where all is.

    `np.nanmedian` takes fifty times as long for so few, and holds up inner steps.
    """
    ordered = np.sort(values, axis=0)  # NaN is last.
    count = (~np.isnan(values)).sum(0)
    middle = [np.maximum(count - 1, 0) // 2, count // 2]
    middle = np.minimum(middle, len(values) - 1)
    return np.where(
        count > 0, np.take_along_axis(ordered, middle, axis=0).mean(0), np.nan
    )


def _scale(
    median: np.ndarray | float, mad: np.ndarray | float, floor: float
) -> np.ndarray:
    return np.maximum(_MAD_TO_SIGMA * mad, floor * np.abs(median))


def _times(late: np.ndarray, scale: np.ndarray, least: float) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return late / np.maximum(scale, least)


class _Past:
    """What is usual of an array of numbers, each by itself, and which are bad now."""

    def __init__(
        self, threshold: float, patience: int, floor: float, least: float = 1e-12
    ):
        if not threshold > 0 or not 1 <= patience <= _LOOKED_AT:
            raise ValueError(
                f"threshold={threshold} must be positive and patience={patience} "
                f"between 1 and {_LOOKED_AT}"
            )
        self._threshold, self._patience = threshold, patience
        self._floor, self._least = floor, least
        self._values: collections.deque[np.ndarray] = collections.deque(maxlen=_WINDOW)
        self._bad: collections.deque[np.ndarray] = collections.deque(maxlen=_LOOKED_AT)

    def score(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return medians of the past and scores, NaN where too little is known."""
        median, scale = self.usual(values.shape)
        return median, _times(values - median, scale, self._least)

    def usual(self, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return medians of the past, and what deviations of each are measured by."""
        if not self._values:
            nothing = np.full(shape, np.nan)
            return nothing, nothing
        past = np.stack(self._values)
        known = np.isfinite(past).sum(0) >= _LEAST_PAST
        median = _median(past)
        mad = _median(np.abs(past - median))
        scale = _scale(median, mad, self._floor)
        return np.where(known, median, np.nan), np.where(known, scale, np.nan)

    def learn(self, values: np.ndarray, bad: np.ndarray) -> np.ndarray:
        """Take in new values; return which have been bad for long enough."""
        self._bad.append(bad)
        self._values.append(np.where(bad | ~np.isfinite(values), np.nan, values))
        return bad & (np.stack(self._bad).sum(0) >= self._patience)

    def is_bad(self, score: np.ndarray) -> np.ndarray:
        """Tell which scores are above the threshold."""
        return np.nan_to_num(score, nan=0.0, posinf=np.inf) > self._threshold


class Messages:
    """Watches the times of messages between all pairs of regions."""

    def __init__(
        self,
        threshold: float = 6.0,
        patience: int = 3,
        floor: float = 0.1,
        least: float = 1e-12,
    ):
        """Begin with nothing known.

        Raises:
          ValueError: for numbers out of range.
        """
        self._past = _Past(threshold, patience, floor, least)
        self._threshold, self._least = threshold, least

    def observe(self, seconds: np.ndarray) -> list[Finding]:
        """Take in one sync, and say what is faulty now."""
        seconds = np.array(seconds, float)
        np.fill_diagonal(seconds, np.nan)
        median, scale = self._past.usual(seconds.shape)
        late = seconds - median
        score = _times(late, scale, self._least)
        keen = _times(late, scale, self._least / self._threshold)
        bad = self._past.is_bad(score) | self._past.is_bad(keen) & alone(late)
        bad = self._past.learn(seconds, bad)
        return [
            Finding(
                kind,
                where,
                float(np.median(seconds[cells])),
                float(np.median(median[cells])),
                float(np.median(score[cells])),
            )
            for kind, where, cells in explain(bad, np.isnan(seconds))
        ]


class Regions:
    """Watches a number of each region: seconds of a step, or lengths of messages."""

    def __init__(
        self,
        threshold: float = 6.0,
        patience: int = 3,
        floor: float = 0.1,
        against_others: bool = False,
        kind: str = "",
    ):
        """Begin with nothing known.

        Raises:
          ValueError: for numbers out of range.
        """
        self._past = _Past(threshold, patience, floor)
        self._threshold, self._floor = threshold, floor
        self._against_others = against_others
        self._kind = kind or ("unusual" if against_others else "slow")

    def observe(self, values: np.ndarray) -> list[Finding]:
        """Take in the numbers of one sync, `[M]`, and say whose are faulty now."""
        values = np.array(values, float)
        median, score = self._past.score(values)
        bad = self._past.is_bad(score)
        if self._against_others and bad.any():
            with np.errstate(divide="ignore", invalid="ignore"):
                grown = np.where(median > 0, values / median, 1.0)
            bad &= _among_others(grown, self._floor) > self._threshold
        return [
            Finding(
                self._kind,
                (int(i),),
                float(values[i]),
                float(median[i]),
                float(score[i]),
            )
            for i in np.nonzero(self._past.learn(values, bad))[0]
        ]


def _among_others(values: np.ndarray, floor: float) -> np.ndarray:
    """Return the robust z-score of each value against all the others; NaN is none."""
    scores = [np.nan] * len(values)
    known = [i for i, x in enumerate(values) if np.isfinite(x)]
    for i in known:
        others = [float(values[j]) for j in known if j != i]
        if others:
            middle = statistics.median(others)
            apart = statistics.median(abs(x - middle) for x in others)
            scores[i] = float(robust_z(values[i], middle, apart, floor))
    return np.array(scores)
