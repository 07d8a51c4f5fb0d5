"""Timeline of a training run over a network, event by event.

The events are those of a schedule, in its order. At a start a message enters the
network (`flights.Channel`). At its finish, a region that gets there before the message
waits: that is the stall. A collective starts when the last region that takes part is
ready, and arrives at all regions at once. All seconds are simulated.

If regions come one by one (`is_by_region`), steps are those of the fastest region, each
region has its own clock, and its message goes to region 0, which is assumed to have the
outer model, and is answered over the links of that pair. Messages of others at the same
time do not slow it down.

With `num_layers` = 1 a sync leaves at the end of a step and is needed at the start of
one, as in this package's runtime. With more, a step is a forward pass (a third of it)
and a backward pass (two thirds) over equal layers, and layer l of L travels alone: it
is ready when its part of the backward pass is done, l/L of the backward pass before the
step ends, and is needed l/L of the forward pass after the merging step begins. So a
message that leaves at a step waits for none that arrives there, whichever comes first.
That is the model behind the utilization table of Streaming DiLoCo (arXiv 2501.18512).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cocodc_jax.network import exchanges
from cocodc_jax.network.flights import Channel, Flight, Times
from cocodc_jax.network.links import Topology
from cocodc_jax.network.timeline import SyncRecord, Timeline
from cocodc_jax.network.workload import FORWARD_SHARE, Workload
from cocodc_jax.sync.method import Method
from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.schedules import FINISH, START, Applied, Event, Schedule, events_at
from cocodc_jax.sync.schedules.base import check_at_least


def simulate(
    topology: Topology,
    workload: Workload,
    schedule: Schedule | None,
    num_steps: int,
    collective: str | exchanges.Crossing = "ring",
    order: Sequence[int] | None = None,
    sharing: str = "fair",
    effective_rank: float | None = None,
) -> Timeline:
    """Simulate `num_steps` inner steps of every region.

    Args:
      topology: M regions and their links.
      workload: bytes and step times; step_time_s has M entries, fragment_bytes K.
      schedule: what is sent when; None sends nothing.
      num_steps: inner steps per region; of the fastest, if regions come one by one.
      collective: how a mean crosses regions, one of `collectives.COLLECTIVES` or any
        crossing; not used if regions come one by one.
      order: order of the regions in it; None finds the best for the links at time 0.
      sharing: how simultaneous syncs share the links: "fair" or "fifo". Gloo's
        collectives are "fifo": a process does one after another.
      effective_rank: of the means, for schedules whose ranks follow it; None keeps the
        first rank.

    Raises:
      ValueError: if the counts of regions or fragments do not match, or a name is
        unknown.
    """
    wanted = {"step_time_s": topology.num_regions}
    if schedule is not None:
        wanted["fragment_bytes"] = schedule.num_fragments
    for name, expected in wanted.items():
        values = getattr(workload, name)
        if len(values) != expected:
            raise ValueError(
                f"{name}={values!r} has {len(values)} entries; {expected} are needed"
            )

    check_at_least("num_steps", num_steps, 1)
    if schedule is None:
        zeros = (0.0,) * topology.num_regions
        ends = tuple(num_steps * seconds for seconds in workload.step_time_s)
        marks = ((0, zeros), (num_steps, ends))
        steps_s = workload.step_time_s
        return Timeline(
            regions=topology.regions,
            syncs=(),
            num_steps=num_steps,
            step_time_s=steps_s,
            marks=marks,
            stall_s=zeros,
            bytes_sent=zeros,
        )

    # The crossing of all messages, or one for each region that comes alone.
    ways: list[Any] = [collective]
    if schedule.is_by_region:
        ways = [
            exchanges.answered(region, workload.answer_share)
            for region in range(topology.num_regions)
        ]
    elif isinstance(collective, str):
        largest = max(
            size
            for fragment in range(schedule.num_fragments)
            for _, size in workload.messages([fragment])
        )
        ways = [exchanges.collective(topology, collective, order, largest)]

    costs = [exchanges.over_time(topology, way) for way in ways]
    times_s = topology.change_times_s
    host_bytes_per_s = workload.host_bytes_per_s
    channels = [Channel(cost, times_s, sharing, host_bytes_per_s) for cost in costs]
    fastest = min(workload.step_time_s)
    ratios = tuple(seconds / fastest for seconds in workload.step_time_s)
    bound = schedule.bind(Regions(ratios, (1,) * len(ratios)))
    run = _Run(workload, bound, channels, effective_rank)
    run.run(num_steps)
    bytes_sent = np.zeros(topology.num_regions) + sum(x.bytes_sent for x in channels)

    return Timeline(
        regions=topology.regions,
        syncs=tuple(run.records),
        num_steps=num_steps,
        step_time_s=tuple(run.step_s.tolist()),
        marks=tuple(run.marks),
        stall_s=tuple(run.stall_s.tolist()),
        bytes_sent=tuple(bytes_sent.tolist()),
    )


def simulate_method(
    topology: Topology,
    workload: Workload,
    method: Method,
    num_steps: int,
    collective: str | None = None,
    **settings: Any,
) -> Timeline:
    """Simulate a method; `settings` are further arguments of `simulate`.

    Raises:
      ValueError: as `simulate`, if the method is for another number of regions, or if
        it fixes the collective.
    """
    num = topology.num_regions
    least = method.min_regions
    if method.num_regions not in (None, num) or num < least:
        wanted = method.num_regions or f"at least {least}"
        raise ValueError(f"regions={num} must be {wanted} for method={method.name!r}")
    schedule = exchanges.schedule_of(method)
    way = exchanges.crossing(method, collective)
    return simulate(
        topology, workload, schedule, num_steps=num_steps, collective=way, **settings
    )


class _Run:
    """The state of one simulation: clocks of the regions and syncs in flight."""

    def __init__(
        self,
        workload: Workload,
        schedule: Schedule,
        channels: Sequence[Channel],
        effective_rank: float | None,
    ):
        self.workload = workload
        self.schedule = schedule
        self.channels = channels
        self.step_s = np.asarray(workload.step_time_s)

        if schedule.is_by_region:
            self.step_s = np.full_like(self.step_s, self.step_s.min())
        self.clocks = np.zeros_like(self.step_s)
        self.stall_s = np.zeros_like(self.step_s)
        self.marks = [(0, tuple(self.clocks.tolist()))]
        self.records: list[SyncRecord] = []
        self.first_rank = schedule.init().rank
        self.effective_rank = np.inf if effective_rank is None else effective_rank
        self.last_start = [0] * schedule.num_fragments
        self.new: list[Applied] = []  # what the schedule has not asked about yet
        self.in_flight: dict[tuple[int, int], Flight] = {}
        self.due: list[Flight] = []  # at this step, once what leaves there has left
        self.unseen: list[Flight] = []  # not measured yet
        self.sync_s = np.zeros_like(self.step_s)  # of the last one that is

    def run(self, num_steps: int) -> None:
        state = self.schedule.init()
        while (step := self.schedule.next_step(state)) <= num_steps:
            self.advance(step)
            for after, event in events_at(self.schedule, state, step, self.observe):
                state = after
                if event is not None:
                    self.carry_out(event, step)
            for flight in self.due:
                self.merge(flight, step)
            self.due = []
            self.marks.append((step, tuple(self.clocks.tolist())))

        if self.marks[-1][0] < num_steps:
            self.advance(num_steps)
            self.marks.append((num_steps, tuple(self.clocks.tolist())))

    def advance(self, step: int) -> None:
        self.clocks = self.clocks + (step - self.marks[-1][0]) * self.step_s
        self.step = step

    def observe(self, name: str) -> Any:
        """Return an observation of a schedule, see `Schedule.next_event`.

        A network model does not know how fast fragments change. It assumes that all
        change equally fast, per parameter and step, so the one that has waited longest
        is served. Times of syncs and steps are reported as in a run: each message
        carries those that were measured when it left.
        """
        if name == "applied":
            new = self.new
            self.new = []
            return new
        if name in ("drift", "distance", "tokens"):
            power = 2 if name == "distance" else 1
            return [float(self.step - x) ** power for x in self.last_start]
        raise ValueError(f"the schedule needs {name!r}, which no network model knows")

    def carry_out(self, event: Event, step: int) -> None:
        sync_id = (event.fragment_id, event.start_step)
        if event.kind == START:
            self.in_flight[sync_id] = self.start(event)
        # A message of zero, as if sent before the first step, was never on its way.
        elif event.kind == FINISH and sync_id in self.in_flight:
            flight = self.in_flight.pop(sync_id)
            # As one parameter, which moved the more the longer it was gathered.
            norm = float(flight.start.start_step - flight.start.since_step)
            rank = self.effective_rank
            times = flight.times
            seen = {"norm": norm, "effective_rank": rank, "times": times}
            self.new.append(Applied(event.fragment_id, 1, seen))

            if self.workload.is_layered:
                self.due.append(flight)
            else:
                self.merge(flight, step)

    def start(self, event: Event) -> Flight:
        """Send a sync's messages, each as soon as the last region taking part is ready.

        The backward pass ends with layer 0, so the deepest layer is ready first.
        """
        self.last_start[event.fragment_id] = event.start_step
        channel = self.channels[0]
        who = slice(None)
        if event.participating is not None:
            who = list(event.participating)
            if self.schedule.is_by_region:
                channel = self.channels[who[0]]

        scale = event.rank / self.first_rank if event.rank else 1.0
        times = self.measured() if self.schedule.is_measured else []
        flight = Flight(
            start=event,
            channel=channel,
            times=times,
            left_s=self.clocks,
            start_s=np.inf,
            layers=[],
        )

        for layer, num_bytes in self.workload.messages((event.fragment_id,)):
            lead = (1 - FORWARD_SHARE) * layer / self.workload.num_layers
            ready_s = float(np.max((self.clocks - lead * self.step_s)[who]))
            flight.start_s = min(flight.start_s, ready_s)
            flight.layers.insert(0, (layer, channel.send(ready_s, num_bytes * scale)))

        if self.schedule.is_measured:
            self.unseen.append(flight)
        return flight

    def measured(self) -> Times:
        """Return seconds of a step and of the last sync to arrive (0: none has)."""
        # The first layer leaves no more than a backward pass before a step's end.
        lead = 1 - FORWARD_SHARE if self.workload.is_layered else 0.0
        now = float(np.max(self.clocks - lead * self.step_s))
        seen = [flight for flight in self.unseen if flight.arrived(now)]
        for flight in sorted(seen, key=lambda flight: flight.arrival_s):
            self.sync_s = flight.arrival_s - flight.left_s
            self.unseen.remove(flight)
        return list(zip(self.step_s.tolist(), self.sync_s.tolist(), strict=True))

    def merge(self, flight: Flight, step: int) -> None:
        stall = self.stall(flight)
        merging = np.ones(len(stall), bool)
        if self.schedule.is_by_region:
            merging[:] = False
            merging[list(flight.start.participating or ())] = True
            stall = np.where(merging, stall, 0.0)

        self.clocks = self.clocks + stall
        self.stall_s = self.stall_s + stall
        sent = [transfer.bytes_sent for _, transfer in flight.layers[::-1]]
        waited_longest = merging & (stall == np.max(stall))
        record = SyncRecord(
            fragments=(flight.start.fragment_id,),
            start_step=flight.start.start_step,
            merge_step=step,
            start_s=flight.start_s,
            arrival_s=flight.arrival_s,
            merge_s=float(np.max(self.clocks[waited_longest])),
            stalls_s=tuple(stall.tolist()),
            bytes_sent=tuple(np.sum(sent, axis=0).tolist()),
        )
        self.records.append(record)

    def stall(self, flight: Flight) -> np.ndarray:
        """Return how long each region waits for a sync that it merges now, `[M]`.

        Layer l of L is needed l/L of the forward pass later.
        """
        waited = np.zeros_like(self.clocks)
        for layer, transfer in flight.layers:
            lag = FORWARD_SHARE * layer / self.workload.num_layers * self.step_s
            arrival_s = flight.channel.arrival_s(transfer)
            waited = waited + np.maximum(0.0, arrival_s - (self.clocks + waited + lag))
        return waited
