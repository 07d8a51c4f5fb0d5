"""When each packet arrives: delay, metering, loss and queues, without any input/output.

A packet of b bits that region i sends to region j at time t

    enters its uplink at  e = max(t, previous u of i)
    has left it at        u = e + b / uplink_i
    has left the link at  d = max(max(e, previous d of ij) + b / rate_ij, u)
    reaches j at          a = max(d + delay_ij + jitter, previous a of ij)
    is handed over at         max(a, previous hand-over to j + b / downlink_j)

so bits flow through (an idle meter adds nothing to the one before it) and packets of an
ordered pair never overtake one another. A packet that would wait longer than the buffer
at a meter is dropped, as at the tail of a full queue. While a link has rate 0 (an
outage), packets that enter it are dropped; those under way arrive. A packet keeps the
rate and the delay of the moment at which it was sent.
"""

import dataclasses
import heapq
import itertools
import random
from collections.abc import Sequence

Matrix = Sequence[Sequence[float]]

_ON_THE_WAY = 0
_IN_DOWNLINK = 1


@dataclasses.dataclass(frozen=True)
class Conditions:
    """All links from one moment on. In matrices, the row sends, the column receives.

    Attributes:
      start_s: since when, in seconds; the first of a sequence starts at 0.
      rate_bps: bits per second of each ordered pair; 0 is an outage.
      delay_s: one-way delay of each ordered pair in seconds.
      jitter_s: the delay varies by at most this much either way, in seconds.
      loss: share of packets lost, in [0, 1).
      uplink_bps: bits per second that a region can send in all; infinite if not
        metered.
      downlink_bps: bits per second that a region can receive in all.
    """

    start_s: float
    rate_bps: Matrix
    delay_s: Matrix
    jitter_s: Matrix
    loss: Matrix
    uplink_bps: Sequence[float]
    downlink_bps: Sequence[float]

    @property
    def num_regions(self) -> int:
        """Number of regions M."""
        return len(self.uplink_bps)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Counters of each ordered pair; bytes are whole IP packets."""

    sent_bytes: list[list[int]]  # That region i gave its interface for region j.
    delivered_bytes: list[list[int]]  # That reached j.
    sent_packets: list[list[int]]  # As sent_bytes.
    lost_packets: list[list[int]]  # By the link's loss.
    overflow_packets: list[list[int]]  # By a full queue, on either side.
    outage_packets: list[list[int]]  # Sent while the link was out.


class Shaper:
    """Holds packets until they are due. Times are seconds since the lab's start.

    Attributes:
      changes_from_s: the time from which `Conditions.start_s` counts.
    """

    def __init__(self, conditions: Sequence[Conditions], buffer_s: float, seed: int):
        """Set up idle links; `conditions` are in the order of their starts."""
        num = conditions[0].num_regions
        self.changes_from_s = 0.0
        self._links, *self._later = conditions
        self._buffer_s = buffer_s
        self._random = random.Random(seed)

        self._uplink_free_s = [0.0] * num
        self._downlink_free_s = [0.0] * num
        self._link_free_s = [[0.0] * num for _ in range(num)]
        self._last_arrival_s = [[0.0] * num for _ in range(num)]

        self._heap: list[tuple[float, int, int, int, int, bytes]] = []
        self._order = itertools.count()  # breaks ties in favour of the older packet
        counters = {
            field.name: [[0] * num for _ in range(num)]
            for field in dataclasses.fields(Traffic)
        }
        self.traffic = Traffic(**counters)

    @property
    def next_s(self) -> float:
        """When there is something to do, in seconds; infinite if nothing is queued."""
        return self._heap[0][0] if self._heap else float("inf")

    def send(self, now_s: float, source: int, target: int, packet: bytes) -> None:
        """Accept a packet from a region."""
        while self._later and now_s - self.changes_from_s >= self._later[0].start_s:
            self._links = self._later.pop(0)
        links = self._links
        count = self.traffic
        size = len(packet)
        count.sent_bytes[source][target] += size
        count.sent_packets[source][target] += 1

        rate = links.rate_bps[source][target]
        if rate == 0:
            count.outage_packets[source][target] += 1
            return

        uplink_free_s = self._uplink_free_s[source]
        link_free_s = self._link_free_s[source][target]
        if max(uplink_free_s, link_free_s) - now_s > self._buffer_s:
            count.overflow_packets[source][target] += 1
            return

        begin_s = max(now_s, uplink_free_s)
        uplink_free_s = begin_s + 8 * size / links.uplink_bps[source]
        departs_s = max(max(begin_s, link_free_s) + 8 * size / rate, uplink_free_s)
        self._uplink_free_s[source] = uplink_free_s
        self._link_free_s[source][target] = departs_s

        # Lost on the way: it has used the meters as any other.
        loss = links.loss[source][target]
        if loss and self._random.random() < loss:
            count.lost_packets[source][target] += 1
            return

        delay_s = links.delay_s[source][target]
        if jitter_s := links.jitter_s[source][target]:
            delay_s += self._random.uniform(-jitter_s, jitter_s)
        arrives_s = departs_s + max(0.0, delay_s)
        # Order is kept: TCP takes packets out of order for lost ones.
        arrives_s = max(arrives_s, self._last_arrival_s[source][target])
        self._last_arrival_s[source][target] = arrives_s
        self._push(arrives_s, _ON_THE_WAY, source, target, packet)

    def arrivals(self, now_s: float) -> list[tuple[int, bytes]]:
        """Return (region, packet) for all packets that are due, in order of time."""
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            time_s, _, stage, source, target, packet = heapq.heappop(self._heap)
            size = len(packet)
            free_s = self._downlink_free_s[target]
            if stage == _IN_DOWNLINK:
                self.traffic.delivered_bytes[source][target] += size
                due.append((target, packet))
            elif free_s - time_s > self._buffer_s:
                self.traffic.overflow_packets[source][target] += 1
            else:
                free_s += 8 * size / self._links.downlink_bps[target]
                self._downlink_free_s[target] = ready_s = max(time_s, free_s)
                self._push(ready_s, _IN_DOWNLINK, source, target, packet)

        return due

    def _push(self, time_s: float, stage: int, *packet) -> None:
        heapq.heappush(self._heap, (time_s, next(self._order), stage, *packet))
