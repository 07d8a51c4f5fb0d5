"""Messages of syncs on their way: when they leave, and when all of them are there.

Every sync is a collective over all regions, so two under way share the links as one
resource. `sharing="fair"` gives each of k transfers 1/k of them, as TCP streams on one
bottleneck have (processor sharing); `sharing="fifo"` sends one after the other in the
order in which they became ready. Delays are not shared: a transfer gives up the links
when its last byte has left and arrives one collective's latency later. Before that its
hosts encode, copy and sum it, one message after the other.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from cocodc_jax.network.exchanges import Cost
from cocodc_jax.sync.schedules import Event

SHARINGS = ("fair", "fifo")

Times = list[tuple[float, float]]  # Seconds of a step and of a sync, in each region.


@dataclasses.dataclass
class _Transfer:
    ready_s: float
    num_bytes: float
    left: float = 1.0  # share of its transfer time still to go


class Channel:
    """Runs transfers through time, event by event."""

    def __init__(
        self,
        cost: Cost,
        change_times_s: tuple[float, ...] = (),  # When links, hence costs, change.
        sharing: str = "fair",
        host_bytes_per_s: float = math.inf,  # See `Workload`.
    ):
        if sharing not in SHARINGS:
            raise ValueError(f"sharing={sharing!r} must be one of {SHARINGS}")
        self.bytes_sent = np.zeros(())  # by each region, once something was sent
        self._cost, self._changes = cost, change_times_s
        self._host_bytes_per_s, self._host_free_s = host_bytes_per_s, 0.0
        self._is_fifo, self._now_s = sharing == "fifo", 0.0
        self._unfinished: dict[int, _Transfer] = {}  # in order of readiness
        self._arrivals_s: list[float | None] = []

    def send(self, ready_s: float, num_bytes: float) -> tuple[int, np.ndarray]:
        """Send a message; return its transfer's id and what each region sends.

        Ready times must not decrease, nor be before what was simulated already.
        """
        host_s = num_bytes / self._host_bytes_per_s
        self._host_free_s = ready_s = max(ready_s, self._host_free_s) + host_s
        last_s = max((x.ready_s for x in self._unfinished.values()), default=0.0)
        earliest_s = max(self._now_s, last_s)
        assert ready_s >= earliest_s - 1e-9, (ready_s, self._now_s, last_s)
        transfer_id = len(self._arrivals_s)
        self._arrivals_s.append(None)
        self._unfinished[transfer_id] = _Transfer(ready_s, num_bytes)
        sent = np.asarray(self._cost(ready_s, num_bytes).bytes_sent)
        self.bytes_sent = self.bytes_sent + sent
        return transfer_id, sent

    def arrived(self, transfer_id: int, time_s: float) -> bool:
        """Whether a transfer has arrived by `time_s`, which all else must have too."""
        while self._now_s < time_s and self._unfinished:
            self._advance(time_s)
        arrival = self._arrivals_s[transfer_id]
        return arrival is not None and arrival <= time_s

    def arrival_s(self, transfer_id: int) -> float:
        """Run until a transfer has arrived and return when that was, in seconds.

        Right only if whatever is sent later is ready no earlier than this.
        """
        while (arrival := self._arrivals_s[transfer_id]) is None:
            self._advance(math.inf)
        return arrival

    def _advance(self, limit_s: float) -> None:
        """Move to the next event or to `limit_s`, whichever is sooner."""
        done_s = self._completions_s()
        events = [t for t in self._changes if t > self._now_s]
        waiting = (t.ready_s for t in self._unfinished.values())
        events += [t for t in waiting if t > self._now_s][:1]
        next_s = min([limit_s, *events, *done_s.values()])
        assert next_s < math.inf, "a transfer waits for links that never come back"
        for transfer_id, end_s in done_s.items():
            if end_s <= next_s:
                transfer = self._unfinished.pop(transfer_id)
                latency_s = self._cost(end_s, transfer.num_bytes).latency_s
                self._arrivals_s[transfer_id] = end_s + latency_s
            elif end_s < math.inf:
                transfer = self._unfinished[transfer_id]
                transfer.left *= (end_s - next_s) / (end_s - self._now_s)
        self._now_s = next_s

    def _completions_s(self) -> dict[int, float]:
        """When each transfer under way ends if nothing else happens."""
        now_s = self._now_s
        active = [(i, t) for i, t in self._unfinished.items() if t.ready_s <= now_s]
        if self._is_fifo:
            active = active[:1]
        alone_s = {i: self._cost(now_s, t.num_bytes).transfer_s for i, t in active}
        return {i: now_s + len(active) * t.left * alone_s[i] for i, t in active}


@dataclasses.dataclass(eq=False)
class Flight:
    """One sync on its way."""

    start: Event  # The event of its start.
    channel: Channel  # Its way.
    times: Times  # What each region had measured as it left.
    left_s: np.ndarray  # When each region was ready to send, `[M]`.
    start_s: float  # When its first byte could leave.
    layers: list[tuple[int, int]]  # (layer, transfer id), in the order of their need.
    bytes_sent: np.ndarray  # Of each region, `[M]`.

    def arrived(self, time_s: float) -> bool:
        """Whether all of it is there; `time_s` as of `Channel.arrived`."""
        return all([self.channel.arrived(i, time_s) for _, i in self.layers])

    @property
    def arrival_s(self) -> float:
        """When all of it is there, as of `Channel.arrival_s`."""
        return max(self.channel.arrival_s(i) for _, i in self.layers)
