"""Seconds of this package's exchanges between processes, message by message.

`exchange/collectives.py` sums a vector over M processes in two exchanges, in
each of which every process sends every other a part, one M-th; it gathers messages in
one, in which a part is a whole message. XLA hands an exchange to gloo, which keeps one
connection between two processes and sends a part only when its receiver has said that
it is ready.
Each process does, for one peer after the other:

    give its part to the connection, if the word of the peer has come; or when it comes
    say "ready" to the peer that it receives from, on the same connection

so the word of a process that begins late waits behind its own parts, since its peers
were ready before it, and the exchange takes two parts' time besides the delays where
one would do. Who is late in one exchange is late in the next: regions that wait for one
another settle to that. Where all regions send over one line each, parts wait for one
another there too, in the order in which they were given.

TCP's windows are taken to be open: connections that have carried such messages before,
and hosts that do not close windows after a rest
(`net.ipv4.tcp_slow_start_after_idle=0`). Nothing is lost.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence

from cocodc_jax.network.links import LinkState, transfer_s

PHASES = {"direct": 2, "direct_gather": 1}
_PACKETS = 8192  # of an exchange in all, about; a part is cut in 2 to 32 of them
_WORD, _PART = 0, 1
# Small, but they decide what comes first: a word's bytes, with headers and gloo's own,
# and the time in which a process sums what has come and begins the next exchange.
_WORD_BYTES, _BETWEEN_S = 100, 1e-3


@dataclasses.dataclass(frozen=True)
class _Message:
    kind: int
    phase: int
    source: int
    target: int
    is_last: bool = True  # packet of its part


class _Exchange:
    """Some exchanges one after the other, event by event."""

    def __init__(self, state: LinkState, part_bytes: float, phases: int, packets: int):
        self.phases, self.num = phases, state.num_regions
        self.rate, self.delay = state.bytes_per_s.tolist(), state.delay_s.tolist()
        self.line = state.line_bytes_per_s
        self.size, self.packets = part_bytes / packets, packets
        self.uplink_free = [-math.inf] * self.num
        self.downlink_free = [-math.inf] * self.num
        self.link_free = [[-math.inf] * self.num for _ in range(self.num)]
        self.phase = [-1] * self.num  # that a rank is in; past the last when it is done
        self.told: set[tuple[int, int, int]] = set()  # (phase, who is ready, for whom)
        self.unsent = [set[int]() for _ in range(self.num)]
        self.missing = [[self.num - 1] * phases for _ in range(self.num)]
        self.ends_s = [math.inf] * self.num
        self.events: list[tuple[float, int, int, _Message | None]] = []
        self.order = itertools.count()

    def run(self, starts_s: Sequence[float]) -> list[float]:
        """Return when each rank is done, given when each begins."""
        for rank, start_s in enumerate(starts_s):
            self.push(start_s, rank, None)
        while self.events:
            now, _, rank, message = heapq.heappop(self.events)
            if message is None:
                self.begin(now, rank)
            elif message.target != rank:  # Has come to the target's line.
                j, size = message.target, self.packet_bytes(message)
                # Bits flow through: an idle line adds nothing to the one before it.
                ready = max(now, self.downlink_free[j] + size / self.line)
                self.downlink_free[j] = ready
                self.push(ready, j, message)
            else:
                self.receive(now, message)
        return self.ends_s

    def push(self, time_s: float, rank: int, message: _Message | None) -> None:
        if time_s < math.inf:  # What a link that is out carries never comes.
            heapq.heappush(self.events, (time_s, next(self.order), rank, message))

    def begin(self, now: float, rank: int) -> None:
        """Begin the next phase of a rank, or note that it is done."""
        self.phase[rank] += 1
        phase = self.phase[rank]
        if phase == self.phases:
            self.ends_s[rank] = now
            return
        for step in range(1, self.num):
            to, source = (rank + step) % self.num, (rank - step) % self.num
            if (phase, to, rank) in self.told:
                self.give(now, _Message(_PART, phase, rank, to))
            else:
                self.unsent[rank].add(to)
            self.give(now, _Message(_WORD, phase, rank, source))
        self.go_on(now, rank)

    def packet_bytes(self, message: _Message) -> float:
        return self.size if message.kind == _PART else _WORD_BYTES

    def give(self, now: float, message: _Message) -> None:
        """Hand a message to its connection; all windows are open."""
        i, j, size = message.source, message.target, self.packet_bytes(message)
        count = self.packets if message.kind == _PART else 1
        for index in range(count):
            begin = max(now, self.uplink_free[i])
            up = begin + size / self.line
            busy_s = transfer_s(size, self.rate[i][j])
            leaves = max(max(begin, self.link_free[i][j]) + busy_s, up)
            self.uplink_free[i], self.link_free[i][j] = up, leaves
            each = dataclasses.replace(message, is_last=index == count - 1)
            self.push(leaves + self.delay[i][j], -1, each)

    def receive(self, now: float, message: _Message) -> None:
        rank, phase, source = message.target, message.phase, message.source
        if message.kind == _WORD:
            self.told.add((phase, source, rank))
            if phase == self.phase[rank] and source in self.unsent[rank]:
                self.unsent[rank].remove(source)
                self.give(now, _Message(_PART, phase, rank, source))
        elif message.is_last:
            self.missing[rank][phase] -= 1
        self.go_on(now, rank)

    def go_on(self, now: float, rank: int) -> None:
        phase = self.phase[rank]
        is_under_way = 0 <= phase < self.phases and not self.unsent[rank]
        if is_under_way and self.missing[rank][phase] == 0:
            self.missing[rank][phase] = -1  # once
            is_last = phase == self.phases - 1
            self.push(now if is_last else now + _BETWEEN_S, rank, None)


def part_bytes(name: str, num_regions: int, num_bytes: float) -> float:
    """Return the bytes that a region sends every other in each exchange."""
    return num_bytes / num_regions if name == "direct" else num_bytes


def seconds_of(
    state: LinkState, name: str, num_bytes: float, starts_s: Sequence[float]
) -> list[float]:
    """Return when each region is done, in seconds."""
    num, phases = state.num_regions, PHASES[name]
    if num == 1:
        return list(starts_s)
    packets = min(max(_PACKETS // (phases * num * num), 2), 32)
    size = part_bytes(name, num, num_bytes)
    return _Exchange(state, size, phases, packets).run(starts_s)
