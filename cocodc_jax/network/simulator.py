"""Timeline of a training run over a network, event by event.

Each region computes; at the steps its schedule names, fragments enter the network
(`channel.Channel`), and at their merge a region that reaches it before the fragment
has come waits: that is the stall. A collective starts when the last region is ready and
arrives everywhere at once. Seconds here are simulated (`sim_s`), never measured.

With `num_layers` = 1 a sync leaves at the end of a step and is needed at the start of
one, as in this package's runtime. With more, a step is a forward pass (a third of it)
and a backward pass (two thirds) over equal layers, and layer l of L travels alone: it
is ready when its part of the backward pass is done, l/L of the backward pass before the
step ends, and is needed l/L of the forward pass after the merging step begins. That is
the model behind the utilization table of Streaming DiLoCo (arXiv 2501.18512).
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from cocodc_jax.network.channel import Channel
from cocodc_jax.network.collectives import CollectiveCost, collective_cost
from cocodc_jax.network.links import Topology
from cocodc_jax.network.orders import best_order
from cocodc_jax.network.syncs import AUTO, Schedule
from cocodc_jax.network.timeline import SyncRecord, Timeline

Cost = Callable[[float, float], CollectiveCost]  # of (seconds, bytes)

FORWARD_SHARE = 1 / 3  # a backward pass costs two forward passes


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is computed and sent.

    Attributes:
      fragment_bytes: bytes of one region's message for each fragment, as encoded.
      step_time_s: seconds of an inner step, one number per region.
      num_layers: 1 sends at step boundaries; L > 1 lets each layer travel alone. Layers
        are dealt to fragments in turn (strided).
      host_bytes_per_s: bytes of messages that hosts encode, copy and sum in a second,
        one message after the other, before they enter the network.
    """

    fragment_bytes: tuple[float, ...]
    step_time_s: tuple[float, ...]
    num_layers: int = 1
    host_bytes_per_s: float = np.inf

    def __post_init__(self):
        for name in ("fragment_bytes", "step_time_s"):
            values = getattr(self, name)
            if not values or not all(0 < v < np.inf for v in values):
                raise ValueError(f"{name}={values!r} must be positive numbers")
        if not self.host_bytes_per_s > 0:
            raise ValueError(
                f"host_bytes_per_s={self.host_bytes_per_s!r} must be positive"
            )
        if self.num_layers != 1 and self.num_layers < len(self.fragment_bytes):
            raise ValueError(
                f"num_layers={self.num_layers} must be 1 or at least the number of "
                f"fragments, {len(self.fragment_bytes)}"
            )

    def messages(self, fragments: Sequence[int]) -> list[tuple[int, float]]:
        """Returns (layer, bytes) of a sync's messages, in the order they are ready."""
        if self.num_layers == 1:
            return [(0, sum(self.fragment_bytes[p] for p in fragments))]
        num = len(self.fragment_bytes)
        out = []
        for p in fragments:
            layers = range(p, self.num_layers, num)
            out += [(layer, self.fragment_bytes[p] / len(layers)) for layer in layers]
        return sorted(out, reverse=True)


@dataclasses.dataclass
class _InFlight:
    fragments: tuple[int, ...]
    start_step: int
    start_s: float
    layers: list[tuple[int, int]]  # (layer, transfer id)
    bytes_sent: np.ndarray


def link_costs(
    topology: Topology, collective: str, order: Sequence[int] | None, num_bytes: float
) -> Cost:
    """Returns (seconds, bytes) -> CollectiveCost over links that change with time.

    Args:
      topology: regions and links.
      collective: one of `collectives.COLLECTIVES`.
      order: order of the regions; None finds the best for the links at time 0.
      num_bytes: size of message the order is chosen for.
    """
    if order is None:
        order = best_order(topology.at(), collective, num_bytes)
    times = topology.change_times_s

    @cache
    def cost_in_period(period: int, size: float) -> CollectiveCost:
        state = topology.at(times[period - 1] if period else 0.0)
        return collective_cost(state, collective, size, order)

    def cost(time_s: float, size: float) -> CollectiveCost:
        return cost_in_period(int(np.searchsorted(times, time_s, "right")), size)

    return cost


def simulate(
    topology: Topology,
    workload: Workload,
    schedule: Schedule,
    num_steps: int,
    collective: str = "ring",
    order: Sequence[int] | None = None,
    sharing: str = "fair",
) -> Timeline:
    """Simulates `num_steps` inner steps of every region.

    Args:
      topology: M regions and their links.
      workload: bytes and step times; step_time_s has M entries, fragment_bytes K.
      schedule: what is sent when.
      num_steps: inner steps per region.
      collective: how a mean crosses regions, one of `collectives.COLLECTIVES`.
      order: order of the regions in it; None finds the best for the links at time 0.
      sharing: how syncs under way together share the links: "fair" or "fifo". Gloo's
        collectives are "fifo": a process does one after the other.

    Raises:
      ValueError: if the counts of regions or fragments do not match, or a name is
        unknown.
    """
    _check_sizes(topology, workload, schedule, num_steps)
    sizes = [
        b for p in range(schedule.num_fragments) for _, b in workload.messages([p])
    ]
    cost = link_costs(topology, collective, order, max(sizes))
    channel = Channel(cost, topology.change_times_s, sharing)
    run = _Run(topology.regions, workload, schedule, channel, cost)
    return run.run(num_steps)


def _check_sizes(
    topology: Topology, workload: Workload, schedule: Schedule, num_steps: int
) -> None:
    pairs = (
        ("step_time_s", workload.step_time_s, topology.num_regions),
        ("fragment_bytes", workload.fragment_bytes, schedule.num_fragments),
    )
    for name, values, expected in pairs:
        if len(values) != expected:
            raise ValueError(
                f"{name}={values!r} has {len(values)} entries; {expected} are needed"
            )
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} must be at least 1")


class _Run:
    """The state of one simulation: clocks of the regions and syncs in flight."""

    def __init__(
        self,
        regions: tuple[str, ...],
        workload: Workload,
        schedule: Schedule,
        channel: Channel,
        cost: Cost,
    ):
        self.regions = regions
        self.workload, self.schedule = workload, schedule
        self.channel, self.cost = channel, cost
        self.step_s = np.asarray(workload.step_time_s)
        self.clocks = np.zeros_like(self.step_s)
        self.bytes_sent = np.zeros_like(self.step_s)
        self.stall_s = np.zeros_like(self.step_s)
        self.host_free_s = 0.0
        self.in_flight: list[_InFlight] = []
        self.last_sent = [-1] * schedule.num_fragments
        self.records: list[SyncRecord] = []

    def run(self, num_steps: int) -> Timeline:
        step, marks = 0, [(0, tuple(self.clocks.tolist()))]
        while step < num_steps:
            next_step = self.next_event(step, num_steps)
            self.clocks = self.clocks + (next_step - step) * self.step_s
            step = next_step
            # Start before merging: the start needs only the backward pass just done,
            # and must not wait for a fragment that is late.
            self.start_all(step)
            self.merge_due(step)
            marks.append((step, tuple(self.clocks.tolist())))
        return Timeline(
            self.regions,
            tuple(self.records),
            num_steps,
            self.workload.step_time_s,
            tuple(marks),
            tuple(self.stall_s.tolist()),
            tuple(self.bytes_sent.tolist()),
        )

    def next_event(self, step: int, num_steps: int) -> int:
        if self.schedule.delay_steps == AUTO and self.in_flight:
            return step + 1
        merges = [f.start_step + self.schedule.max_delay for f in self.in_flight]
        last = min([num_steps, *merges])
        starts = (t for t in range(step + 1, last) if self.schedule.is_start(t))
        return next(starts, last)

    def start_all(self, step: int) -> None:
        if not self.schedule.is_start(step):
            return
        busy = {p for sync in self.in_flight for p in sync.fragments}
        starts = self.schedule.starts(step, busy, self.last_sent)
        now = float(np.max(self.clocks))
        syncs = [_InFlight(f, step, now, [], self.bytes_sent * 0) for f in starts]
        messages = [
            (layer, num_bytes, sync)
            for sync in syncs
            for layer, num_bytes in self.workload.messages(sync.fragments)
        ]
        # The backward pass ends with layer 0, so the deepest layer is ready first.
        for layer, num_bytes, sync in sorted(messages, key=lambda m: -m[0]):
            self.send(sync, layer, num_bytes)
        for sync in syncs:
            self.in_flight.append(sync)
            self.bytes_sent = self.bytes_sent + sync.bytes_sent
            for p in sync.fragments:
                self.last_sent[p] = step

    def send(self, sync: _InFlight, layer: int, num_bytes: float) -> None:
        lead = (1 - FORWARD_SHARE) * layer / self.workload.num_layers
        ready_s = float(np.max(self.clocks - lead * self.step_s))
        sync.start_s = min(sync.start_s, ready_s)
        host_s = num_bytes / self.workload.host_bytes_per_s
        self.host_free_s = enters_s = max(ready_s, self.host_free_s) + host_s
        # Layer 0 is needed first, hence the front.
        sync.layers.insert(0, (layer, self.channel.submit(enters_s, num_bytes)))
        sync.bytes_sent = sync.bytes_sent + self.cost(enters_s, num_bytes).bytes_sent

    def merge_due(self, step: int) -> None:
        for sync in list(self.in_flight):
            if self.is_due(sync, step):
                self.in_flight.remove(sync)
                self.merge(sync, step)

    def is_due(self, sync: _InFlight, step: int) -> bool:
        if step >= sync.start_step + self.schedule.max_delay:
            return True
        now = float(np.min(self.clocks))
        return self.schedule.delay_steps == AUTO and all(
            self.channel.arrived(transfer, now) for _, transfer in sync.layers
        )

    def merge(self, sync: _InFlight, step: int) -> None:
        stall, arrivals = np.zeros_like(self.clocks), []
        for layer, transfer in sync.layers:
            lag = FORWARD_SHARE * layer / self.workload.num_layers * self.step_s
            arrivals.append(self.channel.arrival_s(transfer))
            reached = self.clocks + stall + lag
            stall = stall + np.maximum(0.0, arrivals[-1] - reached)
        self.clocks = self.clocks + stall
        self.stall_s = self.stall_s + stall
        self.records.append(
            SyncRecord(
                sync.fragments,
                sync.start_step,
                step,
                sync.start_s,
                max(arrivals),
                float(np.max(self.clocks)),
                float(np.max(stall)),
                float(np.mean(stall)),
                tuple(sync.bytes_sent.tolist()),
            )
        )
