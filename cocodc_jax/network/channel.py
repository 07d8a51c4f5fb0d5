"""The network as one shared resource: transfers that are under way at the same time.

Every sync is a collective over all regions, so two syncs under way use the same links.
`sharing="fair"` gives each of k transfers 1/k of the links, as TCP streams on one
bottleneck do (processor sharing); `sharing="fifo"` sends them one after the other in
the order in which they became ready. Delays are not shared: a transfer gives up the
links when its last byte has left and arrives one collective's latency later.
"""

import dataclasses
import math
from collections.abc import Callable

from cocodc_jax.network.collectives import CollectiveCost

SHARINGS = ("fair", "fifo")


@dataclasses.dataclass
class _Transfer:
    ready_s: float
    num_bytes: float
    left: float = 1.0  # share of its transfer time still to go


class Channel:
    """Runs transfers through time, event by event.

    Args:
      cost: (seconds, bytes) -> cost of the collective with the links of that moment.
      change_times_s: moments at which the links, hence the costs, change.
      sharing: "fair" or "fifo".
    """

    def __init__(
        self,
        cost: Callable[[float, float], CollectiveCost],
        change_times_s: tuple[float, ...] = (),
        sharing: str = "fair",
    ):
        if sharing not in SHARINGS:
            raise ValueError(f"sharing={sharing!r} must be one of {SHARINGS}")
        self._cost = cost
        self._changes = change_times_s
        self._is_fifo = sharing == "fifo"
        self._now_s = 0.0
        self._unfinished: dict[int, _Transfer] = {}  # in order of readiness
        self._arrivals_s: list[float | None] = []

    def submit(self, ready_s: float, num_bytes: float) -> int:
        """Add a transfer and return its id.

        Transfers are submitted in the order of their ready times, none before a moment
        that the simulation has already passed.
        """
        last = (
            next(reversed(self._unfinished.values())).ready_s
            if self._unfinished
            else 0.0
        )
        assert ready_s >= max(self._now_s, last) - 1e-9, (ready_s, self._now_s, last)
        transfer_id = len(self._arrivals_s)
        self._arrivals_s.append(None)
        self._unfinished[transfer_id] = _Transfer(ready_s, num_bytes)
        return transfer_id

    def arrived(self, transfer_id: int, time_s: float) -> bool:
        """Whether a transfer has arrived by `time_s`, which all else must have too."""
        while self._now_s < time_s and self._unfinished:
            self._advance(time_s)
        arrival = self._arrivals_s[transfer_id]
        return arrival is not None and arrival <= time_s

    def arrival_s(self, transfer_id: int) -> float:
        """Run until a transfer has arrived and return when that was, in seconds.

        Right only if whatever is submitted later is ready no earlier than this.
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
                self._finish(transfer_id, end_s)
            elif end_s < math.inf:
                transfer = self._unfinished[transfer_id]
                transfer.left *= (end_s - next_s) / (end_s - self._now_s)
        self._now_s = next_s

    def _completions_s(self) -> dict[int, float]:
        """When each transfer under way ends if nothing else happens."""
        active = [i for i, t in self._unfinished.items() if t.ready_s <= self._now_s]
        sharers = 1 if self._is_fifo else len(active)
        return {
            i: self._now_s
            + sharers
            * self._unfinished[i].left
            * self._cost(self._now_s, self._unfinished[i].num_bytes).transfer_s
            for i in (active[:1] if self._is_fifo else active)
        }

    def _finish(self, transfer_id: int, end_s: float) -> None:
        transfer = self._unfinished.pop(transfer_id)
        latency = self._cost(end_s, transfer.num_bytes).latency_s
        self._arrivals_s[transfer_id] = end_s + latency
