"""Messages of syncs on their way: when they leave, and when all of them are there."""

from __future__ import annotations

import dataclasses

import numpy as np

from cocodc_jax.network.channel import Channel
from cocodc_jax.network.crossings import Cost
from cocodc_jax.network.observed import Times
from cocodc_jax.network.timeline import SyncRecord
from cocodc_jax.network.workload import FORWARD_SHARE, Workload
from cocodc_jax.sync.schedules import Event


class Route:
    """A way across the network, with the hosts before it."""

    def __init__(
        self, channel: Channel, cost: Cost, host_bytes_per_s: float, num_regions: int
    ):
        """Begin with nothing on the way."""
        self.channel = channel
        self.bytes_sent = np.zeros(num_regions)
        self._cost, self._host_bytes_per_s = cost, host_bytes_per_s
        self._host_free_s = 0.0

    def send(self, ready_s: float, num_bytes: float) -> tuple[int, np.ndarray]:
        """Send one message; return its transfer's id and what each region sends."""
        host_s = num_bytes / self._host_bytes_per_s
        self._host_free_s = enters_s = max(ready_s, self._host_free_s) + host_s
        sent = np.asarray(self._cost(enters_s, num_bytes).bytes_sent)
        self.bytes_sent = self.bytes_sent + sent
        return self.channel.submit(enters_s, num_bytes), sent


@dataclasses.dataclass(eq=False)
class Flight:
    """One sync on its way.

    Attributes:
      start: the event of its start.
      route: its way.
      times: seconds of a step and of a sync that each region had measured as it left.
      left_s: when each region was ready to send, `[M]`.
      start_s: when its first byte could leave.
      layers: (layer, transfer id), the one that is needed first in front.
      bytes_sent: of each region, `[M]`.
    """

    start: Event
    route: Route
    times: Times
    left_s: np.ndarray
    start_s: float
    layers: list[tuple[int, int]]
    bytes_sent: np.ndarray

    def arrived(self, time_s: float) -> bool:
        """Whether all of it is there; `time_s` as of `Channel.arrived`."""
        channel = self.route.channel
        return all([channel.arrived(transfer, time_s) for _, transfer in self.layers])

    @property
    def arrival_s(self) -> float:
        """When all of it is there, as of `Channel.arrival_s`."""
        return max(self.route.channel.arrival_s(i) for _, i in self.layers)

    def record(self, step: int, merge_s: float, stall_s: np.ndarray) -> SyncRecord:
        """Return what is reported of it after its merge."""
        return SyncRecord(
            (self.start.fragment_id,),
            self.start.start_step,
            step,
            self.start_s,
            self.arrival_s,
            merge_s,
            float(np.max(stall_s)),
            float(np.mean(stall_s)),
            tuple(self.bytes_sent.tolist()),
        )


def depart(
    start: Event,
    scale: float,
    workload: Workload,
    route: Route,
    clocks: np.ndarray,
    step_s: np.ndarray,
    times: Times,
) -> Flight:
    """Send a sync's messages, each as soon as the last region that takes part is ready.

    The backward pass ends with layer 0, so the deepest layer is ready first.
    """
    who = slice(None) if start.participating is None else list(start.participating)
    flight = Flight(start, route, times, clocks, np.inf, [], np.zeros_like(clocks))
    for layer, num_bytes in workload.messages((start.fragment_id,)):
        lead = (1 - FORWARD_SHARE) * layer / workload.num_layers
        ready_s = float(np.max((clocks - lead * step_s)[who]))
        flight.start_s = min(flight.start_s, ready_s)
        transfer, sent = route.send(ready_s, num_bytes * scale)
        flight.layers.insert(0, (layer, transfer))
        flight.bytes_sent = flight.bytes_sent + sent
    return flight


def stall(
    flight: Flight, workload: Workload, clocks: np.ndarray, step_s: np.ndarray
) -> np.ndarray:
    """Return how long each region waits for a sync that it merges now, `[M]`.

    Args: as of `depart`; layer l of L is needed l/L of the forward pass later.
    """
    waited = np.zeros_like(clocks)
    for layer, transfer in flight.layers:
        lag = FORWARD_SHARE * layer / workload.num_layers * step_s
        arrival_s = flight.route.channel.arrival_s(transfer)
        waited = waited + np.maximum(0.0, arrival_s - (clocks + waited + lag))
    return waited


class Watch:
    """What regions have measured of syncs by the time that they send the next one."""

    def __init__(self, num_regions: int, is_layered: bool):
        """Begin with nothing measured."""
        self._sync_s = np.zeros(num_regions)
        # The first layer leaves no more than a backward pass before a step's end.
        self._lead = 1 - FORWARD_SHARE if is_layered else 0.0
        self.unseen: list[Flight] = []

    def times(self, clocks: np.ndarray, step_s: np.ndarray) -> Times:
        """Return seconds of a step and of the last sync to arrive (0: none has)."""
        now = float(np.max(clocks - self._lead * step_s))
        seen = [flight for flight in self.unseen if flight.arrived(now)]
        for flight in sorted(seen, key=lambda flight: flight.arrival_s):
            self._sync_s = flight.arrival_s - flight.left_s
            self.unseen.remove(flight)
        return list(zip(step_s.tolist(), self._sync_s.tolist(), strict=True))
