"""The frontier over networks: seconds to a loss, by the simulator.

Steps to the loss are those of the runs. The seconds of a step and its syncs are
simulated: the method's own schedule, the counted bytes of its messages, equal links
between all regions, and inner steps of a fixed length. The time in which hosts encode
and copy messages is left out.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from cocodc_jax.methods import Method
from cocodc_jax.network import exchanges
from cocodc_jax.network.links import Link, Topology, uniform
from cocodc_jax.network.simulator import simulate_method
from cocodc_jax.network.timeline import Timeline
from cocodc_jax.network.workload import Workload
from cocodc_jax.report.units import format_duration
from cocodc_jax.run.config.train_config import TrainConfig

from .cells import TUNED, Cell, steps_to
from .report import Report, markdown_table
from .rows import Row

MBIT = (20.0, 100.0, 500.0, 2000.0, 10_000.0)
LATENCY_MS = (10.0, 50.0, 200.0)
# Enough to see the pace; the rest goes on at that of the second half.
INTERVALS = 8
LEAST_STEPS = 40
TOP = 3  # Rows of the table of the first arrivals.


@dataclasses.dataclass(frozen=True)
class Network:
    """Equal links between all regions, with a line as fast as a link."""

    mbit: float
    latency_ms: float  # One way.

    def __str__(self) -> str:
        """Return the name in tables."""
        rate = f"{self.mbit:g} Mbit/s"
        if self.mbit >= 1000:
            rate = f"{self.mbit / 1000:g} Gbit/s"
        return f"{rate}, {self.latency_ms:g} ms"


@dataclasses.dataclass(frozen=True)
class Arrival:
    """When a column of a cell reaches the loss, on one network."""

    network: Network
    cell: Cell
    column: str  # "published" or "tuned".
    seconds: float  # To the loss, simulated.
    stall_share: float  # Share of the time that regions wait.


def networks(text: str) -> list[Network]:
    """Return the networks that a flag names."""
    if text == "all":
        return [Network(mbit, ms) for mbit in MBIT for ms in LATENCY_MS]

    networks = []
    for word in text.split(","):
        try:
            mbit, ms = (float(part) for part in word.split("x"))
            Link(mbit / 1000, ms / 1000)
        except ValueError:
            raise ValueError(
                f"networks={text!r} names {word!r}; use all, or Mbit/s x milliseconds "
                "one way, as 20x50,1000x10"
            ) from None
        networks.append(Network(mbit, ms))

    return networks


def arrivals(
    report: Report, on: Sequence[Network], step_seconds: float
) -> Iterator[Arrival]:
    """Yield the arrivals of all columns that reach the reference's last loss."""
    for cell in report.cells:
        for name, column in cell.columns.items():
            needed = steps_to(column, report.target)
            if needed is None:
                continue
            row = column.rows[0]
            method = _method_of(cell, row)
            regions = row["config"]["run"]["regions"]

            for network in on:
                link = Link(network.mbit / 1000, network.latency_ms / 1000)
                links = uniform(regions, link)
                times = (step_seconds,) * regions
                sizes = row["fragment_bytes"]
                timeline = simulated(method, links, sizes, times, row["steps"])
                seconds = timeline.seconds_until(needed.mean)
                lost = 1 - timeline.utilization()
                yield Arrival(network, cell, name, seconds, lost)


def _method_of(cell: Cell, row: Row) -> Method:
    try:
        return TrainConfig.from_json(row["config"]).method.build()
    except ValueError as error:
        raise ValueError(
            f"networks: {cell.label} is of another version ({error}); keep its rows "
            "in another folder"
        ) from error


def simulated(
    method: Method,
    topology: Topology,
    fragment_bytes: Sequence[float],
    step_time_s: Sequence[float],
    num_steps: int,
    collective: str | None = None,
) -> Timeline:
    """Simulate enough steps of a run to find its pace.

    By default messages cross as processes send them: directly, one exchange after
    another.
    """
    schedule = exchanges.schedule_of(method)
    interval = schedule.sync_interval if schedule else 1
    steps = min(num_steps, max(INTERVALS * interval, LEAST_STEPS))
    sizes = tuple(map(float, fragment_bytes)) or (1.0,) * method.num_fragments
    work = Workload(sizes, tuple(step_time_s))

    way = None
    if exchanges.own_crossing(method) is None:
        direct = "direct_gather" if exchanges.is_gathered(method) else "direct"
        way = collective or direct

    return simulate_method(topology, work, method, steps, way, sharing="fifo")


def markdown(report: Report, arrivals: Sequence[Arrival], step_seconds: float) -> str:
    """Return the table of the first arrivals."""
    heads = ["network", *(f"{i}." for i in range(1, TOP + 1)), "the reference"]
    by_network: dict[Network, list[Arrival]] = {}
    for arrival in sorted(arrivals, key=lambda arrival: arrival.seconds):
        by_network.setdefault(arrival.network, []).append(arrival)

    lines = []
    for network in dict.fromkeys(arrival.network for arrival in arrivals):
        line = [str(network)]
        arrived = by_network[network]
        for arrival in arrived[:TOP]:
            which = "" if arrival.column == TUNED else ", published"
            seconds = format_duration(arrival.seconds)
            line.append(f"{arrival.cell.label}{which}: {seconds}")

        line += ["-"] * (TOP - len(arrived))
        of_reference = [
            arrival
            for arrival in arrived
            if arrival.cell is report.reference
            and arrival.column == report.reference_column
        ]
        line.append(format_duration(of_reference[0].seconds) if of_reference else "-")
        lines.append(line)

    return (
        f"Seconds to the reference's last loss, simulated: inner steps of "
        f"{step_seconds:g} s, equal links between all regions, the bytes that the runs "
        f"counted.\n\n{markdown_table(heads, lines)}\n"
    )


def to_json(arrivals: Sequence[Arrival], step_seconds: float) -> dict[str, Any]:
    """Return plain values."""
    return {
        "step_seconds": step_seconds,
        "arrivals": [
            {
                **dataclasses.asdict(a.network),
                "cell": a.cell.label,
                "column": a.column,
                "seconds": a.seconds if math.isfinite(a.seconds) else None,
                "stall_share": a.stall_share,
            }
            for a in arrivals
        ],
    }
