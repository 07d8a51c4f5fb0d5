"""Seconds of this package's exchanges between processes, message by message.

`engine/collectives.py` sums a vector over M processes in two exchanges. In each, every
process sends a part of the vector, one M-th, to every other process. It gathers
messages in one exchange, in which a part is a full message. XLA hands an exchange to
gloo, which keeps one connection between two processes and sends a part only when its
receiver has reported that it is ready. Each process does, for one peer after another:

    give its part to the connection, once the peer's report "ready" has arrived
    report "ready" to the peer that it receives from, on the same connection

So the report of a process that begins late waits behind the parts that this process
sends, because its peers were ready before it. The exchange then takes the time of two
parts besides the delays, not of one. A process that is late in one exchange is late in
the next, and regions that wait for one another settle to that. If each region sends
over one line, its parts also wait for one another there, in the order in which they
were given to it.

TCP's windows are assumed to be open, as on connections that have carried such messages
before, between hosts that do not close windows after idle time
(`net.ipv4.tcp_slow_start_after_idle=0`). No packet is lost.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from cocodc_jax.network.links import LinkState, transfer_s

PHASES = {"direct": 2, "direct_gather": 1}
_PACKETS = 8192  # Of an exchange, about; a part is cut into 2 to 32 of them.
# Small, but they decide the order of events: the bytes of a report, with headers and
# gloo's own, and the time in which a process sums what has arrived and begins the next
# exchange.
_WORD_BYTES = 100
_BETWEEN_S = 1e-3


class _Exchange:
    """Exchanges one after another, simulated event by event."""

    def __init__(self, state: LinkState, part_bytes: float, phases: int, packets: int):
        self.phases = phases
        self.num = state.num_regions
        self.rate = state.bytes_per_s.tolist()
        self.delay = state.delay_s.tolist()
        self.line = state.line_bytes_per_s
        self.part = [part_bytes / packets] * packets

        self.uplink_free = [-math.inf] * self.num
        self.downlink_free = [-math.inf] * self.num
        self.link_free = [[-math.inf] * self.num for _ in range(self.num)]

        self.phase = [-1] * self.num  # Of each rank; past the last when it is done.
        self.left = [0] * self.num  # Parts of the phase, to be sent or received.
        # (phase, source, target) of which one side is ready.
        self.ready: set[tuple[int, int, int]] = set()
        self.ends_s = [math.inf] * self.num

        self.events: list[tuple[Any, ...]] = []
        self.order = itertools.count()

    def run(self, starts_s: Sequence[float]) -> list[float]:
        """Return when each rank ends, from when each starts."""
        for rank, start_s in enumerate(starts_s):
            self.at(start_s, self.begin, rank)
        while self.events:
            now, _, happen, *arguments = heapq.heappop(self.events)
            happen(now, *arguments)
        return self.ends_s

    def at(self, time_s: float, happen: Callable[..., None], *arguments: Any) -> None:
        if time_s < math.inf:  # Over a link that is down nothing arrives.
            heapq.heappush(self.events, (time_s, next(self.order), happen, *arguments))

    def begin(self, now: float, rank: int) -> None:
        """Begin the next phase of a rank, or note that it is done."""
        self.phase[rank] += 1
        phase = self.phase[rank]
        if phase == self.phases or self.num == 1:
            self.ends_s[rank] = now
            return

        self.left[rank] = 2 * (self.num - 1)
        for step in range(1, self.num):
            to = (rank + step) % self.num
            source = (rank - step) % self.num
            self.give_part(now, phase, rank, to)
            self.give(
                now, rank, source, [_WORD_BYTES], self.give_part, phase, source, rank
            )

    def give_part(self, now: float, phase: int, source: int, target: int) -> None:
        """Give a part to its connection at the second call, when both are ready."""
        if (phase, source, target) not in self.ready:
            self.ready.add((phase, source, target))
            return
        self.give(now, source, target, self.part, self.count, target)
        self.count(now, source)

    def give(
        self, now: float, i: int, j: int, packets: Sequence[float], *then: Any
    ) -> None:
        """Give a message to its connection; all windows are open."""
        for number, size in enumerate(packets, 1):
            begin = max(now, self.uplink_free[i])
            up = begin + size / self.line
            busy_s = transfer_s(size, self.rate[i][j])
            leaves = max(max(begin, self.link_free[i][j]) + busy_s, up)
            self.uplink_free[i] = up
            self.link_free[i][j] = leaves
            after = then if number == len(packets) else ()
            self.at(leaves + self.delay[i][j], self.arrive, j, size, *after)

    def arrive(self, now: float, j: int, size: float, *then: Any) -> None:
        """Pass a packet through the target's line, then call what follows."""
        # Bits flow through: an idle line adds nothing to the one before it.
        ready = max(now, self.downlink_free[j] + size / self.line)
        self.downlink_free[j] = ready
        if then:
            self.at(ready, *then)

    def count(self, now: float, rank: int) -> None:
        """Count a part that a rank has sent or received; after the last, begin anew."""
        self.left[rank] -= 1
        if not self.left[rank]:
            is_last = self.phase[rank] == self.phases - 1
            self.at(now if is_last else now + _BETWEEN_S, self.begin, rank)


def exchange(
    state: LinkState, name: str, num_bytes: float
) -> tuple[Callable[[Sequence[float]], list[float]], list[float]]:
    """Return a function from starts to ends of each rank, and the bytes each sends."""
    num = state.num_regions
    phases = PHASES[name]
    part = num_bytes / num if name == "direct" else num_bytes
    packets = min(max(_PACKETS // (phases * num * num), 2), 32)

    def seconds_of(starts_s: Sequence[float]) -> list[float]:
        return _Exchange(state, part, phases, packets).run(starts_s)

    return seconds_of, [phases * (num - 1) * part] * num
