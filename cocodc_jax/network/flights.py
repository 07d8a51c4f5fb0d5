"""Messages of syncs on the network: when they leave, and when they have arrived.

Every sync is a collective over all regions, so two syncs share the links as one
resource. `sharing="fair"` gives each of k transfers 1/k of the links, as TCP streams on
one bottleneck get (processor sharing); `sharing="fifo"` sends one after another in the
order in which they became ready. Delays are not shared: a transfer frees the links when
its last byte has left, and arrives one collective's latency later. Before it leaves,
its hosts encode, copy and sum it, one message after another.
"""

import dataclasses
import math

import numpy as np

from cocodc_jax.network.exchanges import Cost
from cocodc_jax.sync.schedules import Event

SHARINGS = ("fair", "fifo")

Times = list[tuple[float, float]]  # Seconds of a step and of a sync, in each region.


@dataclasses.dataclass(eq=False)
class Transfer:
    """A message in a channel."""

    ready_s: float
    num_bytes: float
    bytes_sent: np.ndarray  # By each region, `[M]`.
    left: float = 1.0  # The share of its transfer time that remains.
    arrival_s: float = math.inf  # Infinite until it is known.


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
        self._cost = cost
        self._changes = change_times_s
        self._host_bytes_per_s = host_bytes_per_s
        self._host_free_s = 0.0
        self._is_fifo = sharing == "fifo"
        self._now_s = 0.0
        self._unfinished: list[Transfer] = []  # in order of readiness

    def send(self, ready_s: float, num_bytes: float) -> Transfer:
        """Send a message.

        Ready times must not decrease, nor be before the simulated time.
        """
        host_s = num_bytes / self._host_bytes_per_s
        self._host_free_s = ready_s = max(ready_s, self._host_free_s) + host_s
        earliest_s = max([self._now_s, *(x.ready_s for x in self._unfinished)])
        assert ready_s >= earliest_s - 1e-9, (ready_s, earliest_s)
        sent = np.asarray(self._cost(ready_s, num_bytes).bytes_sent)
        self.bytes_sent = self.bytes_sent + sent
        self._unfinished.append(Transfer(ready_s, num_bytes, sent))
        return self._unfinished[-1]

    def arrived(self, transfer: Transfer, time_s: float) -> bool:
        """Return whether a transfer has arrived by `time_s`; simulates until then.

        Everything that is sent later must be ready no earlier than `time_s`.
        """
        while self._now_s < time_s and self._unfinished:
            self._advance(time_s)
        return transfer.arrival_s <= time_s

    def arrival_s(self, transfer: Transfer) -> float:
        """Simulate until a transfer has arrived; return its time, in seconds.

        It is right only if everything that is sent later is ready no earlier than this.
        """
        while math.isinf(transfer.arrival_s):
            self._advance(math.inf)
        return transfer.arrival_s

    def _advance(self, limit_s: float) -> None:
        """Move to the next event or to `limit_s`, whichever is sooner."""
        now_s = self._now_s
        active = [x for x in self._unfinished if x.ready_s <= now_s]
        if self._is_fifo:
            active = active[:1]

        # When each ends if nothing else happens.
        alone_s = [self._cost(now_s, x.num_bytes).transfer_s for x in active]
        done_s = [
            (x, now_s + len(active) * x.left * seconds)
            for x, seconds in zip(active, alone_s, strict=True)
        ]
        events = (*self._changes, *(x.ready_s for x in self._unfinished))
        later = (time_s for time_s in events if time_s > now_s)
        self._now_s = min([limit_s, *later, *(end_s for _, end_s in done_s)])
        assert self._now_s < math.inf, "links that a transfer needs never come back"

        for transfer, end_s in done_s:
            if end_s <= self._now_s:
                self._unfinished.remove(transfer)
                latency_s = self._cost(end_s, transfer.num_bytes).latency_s
                transfer.arrival_s = end_s + latency_s
            elif end_s < math.inf:
                transfer.left *= (end_s - self._now_s) / (end_s - now_s)


@dataclasses.dataclass(eq=False)
class Flight:
    """A sync on the network."""

    start: Event  # The event of its start.
    channel: Channel  # Which carries it.
    times: Times  # Measured by each region when it left.
    left_s: np.ndarray  # When each region was ready to send, `[M]`.
    start_s: float  # When its first byte could leave.
    layers: list[tuple[int, Transfer]]  # By layer, in the order in which they are used.

    def arrived(self, time_s: float) -> bool:
        """Return whether all of it has arrived, see `Channel.arrived`."""
        return all([self.channel.arrived(x, time_s) for _, x in self.layers])

    @property
    def arrival_s(self) -> float:
        """When all of it has arrived, see `Channel.arrival_s`."""
        return max(self.channel.arrival_s(x) for _, x in self.layers)
