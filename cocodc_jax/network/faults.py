"""Find faulty links, senders, receivers and regions from message times alone.

Each sync sends messages of one size over the same pairs of regions, so the time of a
message is compared with earlier times of its pair (C4, arXiv 2406.04594). With x a time
in seconds, over the healthy past of its pair

    z = (x - median) / max(1.4826 MAD, 0.1 median)                      robust z-score

a cell of the matrix of pairs (row sends, column receives) is bad if z is above the
threshold in three of the last five syncs. The denominator is at least `least`, because
a busy machine delays messages by six times that now and then. A sixth of `least` is
enough for a message that is late alone, by four times as much as any other of its sync:
a link that loses packets delays nearly all of its messages, but not by much.

Bad cells are then explained by as few causes as possible, the cause of most cells
first:

    most of a row       the sender        most of the row and of the column   the region
    most of a column    the receiver      most of every row and column    the network
    a cell by itself    the link

If all cells between two groups of at least two regions are bad, the network is cut into
two: a partition.

Two regions have one cell each way, which is always a link. Bad times are not added to
the past, so a fault is reported as long as it lasts. A message that never arrived has
an infinite time; one that was not measured is NaN. The floor of a tenth of the median,
the threshold and the patience are ours. `Regions` does the same for times of steps: it
compares a region's ratio to its own past with that of the others.
"""

import collections
import dataclasses
from collections.abc import Iterable
from typing import TypeVar

import numpy as np

from cocodc_jax.network.links import Topology
from cocodc_jax.network.timeline import Timeline

_WINDOW = 32  # Healthy times that are remembered.
_THRESHOLD = 6.0  # The score above which a time is bad.
_LOOKED_AT = 5  # Syncs.
_PATIENCE = 3  # How many of these must be bad.
_LEAST_PAST = 3  # Times that are needed for a score.
_MAD_TO_SIGMA = 1.4826  # For normal numbers.
_ALONE = 4.0  # Times as late as any other.
_LEAST_CELLS = 5  # Of three regions, if one message did not arrive.

When = TypeVar("When", int, float)
Numbers = np.ndarray | float


@dataclasses.dataclass(frozen=True)
class Finding:
    """A fault, and the evidence for it."""

    # "link", "sender", "receiver", "region", "partition" or "network" by messages;
    # "slow" by steps; "gone" for a region that no longer takes part, "silent" for one
    # that sends nothing now.
    kind: str
    # Its regions: two of a link, none of the network, a partition's smaller part, else
    # one.
    where: tuple[int, ...]
    seconds: float  # The median of the bad values now.
    usual: float  # The median of their medians before.
    score: float  # The median of their robust z-scores.

    def explain(self, regions: tuple[str, ...] = (), unit: str = "s") -> str:
        """Return the finding in words, with the evidence, in one line.

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

        subject = {
            "link": "link from {} to {}",
            "network": "the network",
            "partition": f"the network is cut before {' and '.join(names)}",
            "region": "{}, all that it sends and receives",
        }.get(self.kind, f"{self.kind} {{}}")

        return (
            f"{subject.format(*names)}: {self.seconds:.3g} {unit}, usually "
            f"{self.usual:.3g} {unit} (z = {self.score:.3g})"
        )


class _Past:
    """The usual value of each number of an array, and which are bad now.

    The unit of deviations is at least `floor` times the median, and at least `least`.
    """

    def __init__(self, floor: float = 0.1, least: float = 1e-12):
        self._floor = floor
        self._least = least
        self._values: collections.deque[np.ndarray] = collections.deque(maxlen=_WINDOW)
        self._bad: collections.deque[np.ndarray] = collections.deque(maxlen=_LOOKED_AT)

    def _usual(self, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return medians of the past, and the unit of each one's deviations."""
        past = np.stack([np.full(shape, np.nan), *self._values])
        known = np.isfinite(past).sum(0) >= _LEAST_PAST
        median = _median(past)
        scale = _scale(median, _median(np.abs(past - median)), self._floor)
        return np.where(known, median, np.nan), np.where(known, scale, np.nan)

    def _learn(self, values: np.ndarray, bad: np.ndarray) -> np.ndarray:
        """Add new values; return which have been bad for long enough."""
        self._bad.append(bad)
        self._values.append(np.where(bad | ~np.isfinite(values), np.nan, values))
        return bad & (np.stack(self._bad).sum(0) >= _PATIENCE)


class Messages(_Past):
    """Watches the times of messages between all pairs of regions."""

    def observe(self, seconds: np.ndarray) -> list[Finding]:
        """Add the times of a sync, and return the faults now."""
        seconds = np.array(seconds, float)
        np.fill_diagonal(seconds, np.nan)
        median, scale = self._usual(seconds.shape)
        late = seconds - median
        score = robust_z(late, scale, self._least)
        keen = robust_z(late, scale, self._least / _THRESHOLD)
        bad = (score > _THRESHOLD) | (keen > _THRESHOLD) & _alone(late)
        bad = self._learn(seconds, bad)
        numbers = (seconds, median, score)

        return [
            Finding(kind, where, *(float(np.median(x[cells])) for x in numbers))
            for kind, where, cells in explain(bad, np.isnan(seconds))
        ]


class Regions(_Past):
    """Watches a number of each region: seconds of a step."""

    def __init__(self, floor: float = 0.1, against_others: bool = False):
        super().__init__(floor)
        self._against_others = against_others

    def observe(self, values: np.ndarray) -> list[Finding]:
        """Add the numbers of a sync, `[M]`, and return the faulty regions now."""
        values = np.array(values, float)
        median, scale = self._usual(values.shape)
        score = robust_z(values - median, scale)

        bad = score > _THRESHOLD
        if self._against_others and bad.any():
            with np.errstate(divide="ignore", invalid="ignore"):
                grown = np.where(median > 0, values / median, 1.0)
            bad &= _among_others(grown, self._floor) > _THRESHOLD

        return [
            Finding("slow", (int(i),), *(float(x[i]) for x in (values, median, score)))
            for i in np.nonzero(self._learn(values, bad))[0]
        ]


def pair_seconds(topology: Topology, num_bytes: float, time_s: float) -> np.ndarray:
    """Return a message's time between each pair, `[M, M]`, infinite in an outage."""
    links = topology.at(time_s)
    with np.errstate(divide="ignore"):
        return links.delay_s + num_bytes / links.bytes_per_s


def watch_links(topology: Topology, timeline: Timeline) -> list[tuple[float, Finding]]:
    """Return the faults of a simulated network, as the syncs of a run find them."""
    others = max(topology.num_regions - 1, 1)
    observed = []
    for sync in sorted(timeline.syncs, key=lambda sync: sync.start_s):
        size = max(sync.bytes_sent) / others
        at_s = sync.start_s
        observed.append((at_s, pair_seconds(topology, size, at_s)))
    return _named(Messages(), observed)


def watch_steps(timeline: Timeline) -> list[tuple[int, Finding]]:
    """Return the regions whose steps have become slow, and after which step."""
    return _named(Regions(floor=0.5), timeline.stretches())


def _named(
    watch: Messages | Regions, observed: Iterable[tuple[When, np.ndarray]]
) -> list[tuple[When, Finding]]:
    """Return each finding with the moment at which it was new."""
    first_seen = []
    known = set()
    for when, values in observed:
        now = {(x.kind, x.where): x for x in watch.observe(values)}
        first_seen += [(when, x) for key, x in now.items() if key not in known]
        known = set(now)
    return first_seen


def robust_z(late: Numbers, scale: Numbers, least: float = 1e-12) -> np.ndarray:
    """Return robust z-scores of deviations from the median."""
    with np.errstate(invalid="ignore"):
        return late / np.maximum(scale, least)


def _scale(median: Numbers, mad: Numbers, floor: float) -> np.ndarray:
    return np.maximum(_MAD_TO_SIGMA * mad, floor * np.abs(median))


def _median(values: np.ndarray) -> np.ndarray:
    """As `np.nanmedian` over the first axis, in a fiftieth of the time for so few."""
    ordered = np.sort(values, axis=0)  # NaN is last.
    count = (~np.isnan(values)).sum(0)
    middle = [np.maximum(count - 1, 0) // 2, count // 2]
    middle = np.minimum(middle, len(values) - 1)
    medians = np.take_along_axis(ordered, middle, axis=0).mean(0)
    return np.where(count > 0, medians, np.nan)


def _among_others(values: np.ndarray, floor: float) -> np.ndarray:
    """Return the robust z-score of each value against all the others; NaN is none."""
    scores = np.full(len(values), np.nan)
    known = np.flatnonzero(np.isfinite(values))
    for i in known if len(known) > 1 else ():
        others = values[known[known != i]]
        middle = np.median(others)
        scale = _scale(middle, np.median(np.abs(others - middle)), floor)
        scores[i] = robust_z(values[i] - middle, scale)
    return scores


def _alone(late: np.ndarray) -> np.ndarray:
    """Return the cell of the matrix of pairs that is far later than all others."""
    is_alone = np.zeros(late.shape, bool)
    if np.isfinite(late).sum() < _LEAST_CELLS:
        return is_alone
    rest = np.where(np.isnan(late), 0.0, late)
    first = np.unravel_index(np.argmax(rest), rest.shape)
    most = rest[first]
    rest[first] = 0.0
    is_alone[first] = most > _ALONE * rest.max()
    return is_alone


def explain(
    bad: np.ndarray, unknown: np.ndarray | None = None
) -> list[tuple[str, tuple[int, ...], np.ndarray]]:
    """Explain bad cells of the matrix of pairs by as few causes as possible.

    >>> bad = np.zeros((4, 4), bool)
    >>> bad[1] = [True, False, True, True]
    >>> bad[2, 3] = True
    >>> [(kind, where) for kind, where, _ in explain(bad)]
    [('sender', (1,)), ('link', (2, 3))]
    """
    num = len(bad)
    there = ~(np.eye(num, dtype=bool) if unknown is None else unknown)
    np.fill_diagonal(there, False)

    left = bad & there
    if not left.any():
        return []
    if part := _cut_off(left):
        return [("partition", part, left)]

    shares = [left.sum(axis) > there.sum(axis) / 2 for axis in (0, 1)]
    if num > 2 and np.all(shares):
        return [("network", (), left)]
    cells = {("sender", i): np.s_[i, :] for i in range(num)}
    cells |= {("receiver", i): np.s_[:, i] for i in range(num)}
    lines: dict[tuple[str, int], np.ndarray] = {}

    while True:
        bad_in = {key: left[x].sum() for key, x in cells.items()}
        most = [k for k, n in bad_in.items() if n > 1 and 2 * n > there[cells[k]].sum()]
        if not most:
            break
        # Among equal ones, that of the first region, and the sender before the
        # receiver.
        key = min(most, key=lambda key: (-bad_in[key], key[1]))
        lines[key] = line = np.zeros_like(left)
        line[cells[key]] = left[cells[key]]
        left = left & ~line

    causes: list[tuple[str, tuple[int, ...], np.ndarray]] = []
    for (kind, i), line in lines.items():
        twin = lines.get(("receiver" if kind == "sender" else "sender", i))
        if twin is None:
            causes.append((kind, (i,), line))
        elif kind == "sender":
            causes.append(("region", (i,), line | twin))

    for i, j in np.argwhere(left):
        cell = np.zeros_like(left)
        cell[i, j] = True
        causes.append(("link", (int(i), int(j)), cell))

    return causes


def _cut_off(bad: np.ndarray) -> tuple[int, ...]:
    """Return the smaller of two groups of regions that have only bad cells between.

    Groups have two regions or more. Of equal groups it is that without region 0; () if
    there are none.
    """
    num = len(bad)
    group = {0}
    joined = ~(bad & bad.T)
    while more := {
        j for i in group for j in range(num) if joined[i, j] and j not in group
    }:
        group |= more

    rest = sorted(set(range(num)) - group)
    if min(len(group), len(rest)) < 2:
        return ()

    # The others are one group if all reach all.
    inside = joined[np.ix_(rest, rest)].astype(int)
    is_one_group = (np.linalg.matrix_power(inside, len(rest)) > 0).all()
    if not is_one_group:
        return ()
    return tuple(min(rest, sorted(group), key=len))
