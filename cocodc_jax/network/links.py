"""Links between regions: bandwidth, latency, jitter, loss, and how they change.

A message of b bytes sent over a link arrives after `b / bytes_per_s + delay_s`. What a
single TCP stream reaches over a lossy link is bounded by
`bytes_per_s <= (segment / round trip) sqrt(3 / 2) / sqrt(loss)` (Mathis, Semke,
Mahdavi, Ott, "The macroscopic behavior of the TCP congestion avoidance algorithm",
1997).
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

_SEGMENT_BYTES = 1448  # TCP payload of a 1500-byte packet with timestamps


def check(condition: bool, name: str, value: object, rule: str) -> None:
    """Refuse a value that does not obey a rule."""
    if not condition:
        raise ValueError(f"{name}={value!r} must be {rule}")


def transfer_s(num_bytes: float, bytes_per_s: float) -> float:
    """Return the seconds that bytes take on a link; infinite during an outage."""
    if num_bytes == 0:
        return 0.0
    return num_bytes / bytes_per_s if bytes_per_s > 0 else math.inf


@dataclasses.dataclass(frozen=True)
class Link:
    """One direction of the path between two regions.

    Attributes:
      bandwidth_gbps: payload rate of the path in 10^9 bits per second (what an
        application gets; protocol headers are not added).
      latency_s: one-way delay in seconds, half the round trip.
      jitter_s: the delay varies by at most this much either way, in seconds.
      loss: share of packets lost, in [0, 1).
    """

    bandwidth_gbps: float
    latency_s: float
    jitter_s: float = 0.0
    loss: float = 0.0

    def __post_init__(self):
        rate = self.bandwidth_gbps
        check(0 < rate < math.inf, "bandwidth_gbps", rate, "positive and finite")
        for name in ("latency_s", "jitter_s"):
            value = getattr(self, name)
            check(0 <= value < math.inf, name, value, "finite and not negative")
        check(0 <= self.loss < 1, "loss", self.loss, "in [0, 1)")

    @property
    def bytes_per_s(self) -> float:
        """Rate one stream reaches, after loss, in bytes per second."""
        return self.changed_bytes_per_s(1.0, 0.0)

    def changed_bytes_per_s(self, factor: float, extra_latency_s: float) -> float:
        """Return the rate with `factor` times the bandwidth and an extra latency."""
        wire = factor * self.bandwidth_gbps * 1e9 / 8
        latency_s = self.latency_s + extra_latency_s
        if self.loss == 0 or latency_s == 0:
            return wire * (1 - self.loss)
        stream = _SEGMENT_BYTES / (2 * latency_s) * math.sqrt(1.5 / self.loss)
        return min(wire * (1 - self.loss), stream)

    @property
    def delay_s(self) -> float:
        """One-way delay to plan with, in seconds.

        A collective waits for its slowest message, so the largest jitter counts, not
        the mean.
        """
        return self.latency_s + self.jitter_s


@dataclasses.dataclass(frozen=True)
class LinkChange:
    """A temporary change of a link, for the worse or the better.

    Attributes:
      start_s: when it begins, in simulated seconds.
      duration_s: how long it lasts, in seconds; finite.
      bandwidth_factor: the bandwidth is multiplied by this; 0 is an outage.
      extra_latency_s: added to the one-way delay, in seconds.
      source: index of the sending region, or None for every region.
      target: index of the receiving region, or None for every region.
    """

    start_s: float
    duration_s: float
    bandwidth_factor: float = 1.0
    extra_latency_s: float = 0.0
    source: int | None = None
    target: int | None = None

    def __post_init__(self):
        for name in ("start_s", "bandwidth_factor", "extra_latency_s"):
            value = getattr(self, name)
            check(0 <= value < math.inf, name, value, "finite and not negative")
        length = self.duration_s
        check(0 < length < math.inf, "duration_s", length, "positive and finite")

    @property
    def end_s(self) -> float:
        """When the change ends, in seconds."""
        return self.start_s + self.duration_s


@dataclasses.dataclass(frozen=True, eq=False)
class LinkState:
    """All links at one moment, as matrices; row sends, column receives."""

    # float64 [M, M], infinite on the diagonal, 0 during an outage.
    bytes_per_s: np.ndarray
    delay_s: np.ndarray  # float64 [M, M], 0 on the diagonal.
    # Rate at which a region can send, and receive, over all its links.
    line_bytes_per_s: float = math.inf

    @property
    def num_regions(self) -> int:
        """Number of regions M."""
        return len(self.bytes_per_s)

    def subset(self, region_ids: Sequence[int]) -> "LinkState":
        """Return the links among some regions only, in the order given."""
        grid = np.ix_(region_ids, region_ids)
        line = self.line_bytes_per_s
        return LinkState(self.bytes_per_s[grid], self.delay_s[grid], line)


@dataclasses.dataclass(frozen=True)
class Topology:
    """Regions and the link of every ordered pair.

    Attributes:
      regions: names, one per region.
      links: links[i][j] carries what i sends to j; the diagonal is never read.
      changes: how links change with time.
      line_gbps: 10^9 bits per second that a region can send, and receive, over all its
        links together.
    """

    regions: tuple[str, ...]
    links: tuple[tuple[Link, ...], ...]
    changes: tuple[LinkChange, ...] = ()
    line_gbps: float = math.inf

    def __post_init__(self):
        num = len(self.regions)
        check(num >= 1, "regions", self.regions, "at least one region")
        check(len(set(self.regions)) == num, "regions", self.regions, "distinct names")
        sizes = [len(row) for row in self.links]
        check(sizes == [num] * num, "links", sizes, f"{num} rows of {num} links")

        for change in self.changes:
            for name in ("source", "target"):
                index = getattr(change, name)
                known = index is None or 0 <= index < num
                check(known, f"changes.{name}", index, f"a region id below {num}")

    @property
    def num_regions(self) -> int:
        """Number of regions M."""
        return len(self.regions)

    @property
    def change_times_s(self) -> tuple[float, ...]:
        """Moments at which some link changes, in seconds, in order."""
        times = {t for c in self.changes for t in (c.start_s, c.end_s)}
        return tuple(sorted(times))

    @property
    def undisturbed(self) -> "Topology":
        """The same links, which never change."""
        return dataclasses.replace(self, changes=())

    def scaled(self, share: float) -> "Topology":
        """Return the same regions with a share of all bandwidths."""

        def narrow(link: Link) -> Link:
            return dataclasses.replace(link, bandwidth_gbps=link.bandwidth_gbps * share)

        links = tuple(tuple(map(narrow, row)) for row in self.links)
        return dataclasses.replace(self, links=links, line_gbps=self.line_gbps * share)

    def subset(self, region_ids: Sequence[int]) -> "Topology":
        """Return some of the regions only, in the order given."""
        new = {old: i for i, old in enumerate(region_ids)} | {None: None}
        links = tuple(tuple(self.links[i][j] for j in region_ids) for i in region_ids)
        changes = tuple(
            dataclasses.replace(c, source=new[c.source], target=new[c.target])
            for c in self.changes
            if c.source in new and c.target in new
        )
        names = tuple(self.regions[i] for i in region_ids)
        return Topology(names, links, changes, self.line_gbps)

    def at(self, time_s: float = 0.0) -> LinkState:
        """Return the links as they are at a moment in simulated seconds."""
        delay = np.array([[link.delay_s for link in row] for row in self.links])
        factor = np.ones_like(delay)
        extra = np.zeros_like(delay)

        for change in self.changes:
            if change.start_s <= time_s < change.end_s:
                everyone = slice(None)
                source = everyone if change.source is None else change.source
                target = everyone if change.target is None else change.target
                where = (source, target)
                factor[where] *= change.bandwidth_factor
                extra[where] += change.extra_latency_s

        delay += extra
        cells = zip(itertools.chain(*self.links), factor.flat, extra.flat, strict=True)
        rates = [link.changed_bytes_per_s(*change) for link, *change in cells]
        rate = np.reshape(rates, delay.shape)
        np.fill_diagonal(rate, np.inf)
        np.fill_diagonal(delay, 0.0)

        return LinkState(rate, delay, self.line_gbps * 1e9 / 8)


def uniform(
    num_regions: int, link: Link, changes: tuple[LinkChange, ...] = ()
) -> Topology:
    """Return equal links between all regions, each with a line as fast as a link.

    >>> uniform(2, Link(bandwidth_gbps=1.0, latency_s=0.05)).regions
    ('region0', 'region1')
    """
    check(num_regions >= 1, "num_regions", num_regions, "at least 1")
    names = tuple(f"region{i}" for i in range(num_regions))
    links = ((link,) * num_regions,) * num_regions
    return Topology(names, links, changes, link.bandwidth_gbps)
