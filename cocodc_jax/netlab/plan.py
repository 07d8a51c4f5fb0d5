"""A run of the lab: its regions, their command, and the links' conditions over time."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cocodc_jax.files import read_regular
from cocodc_jax.netlab.shaper import Conditions

if TYPE_CHECKING:  # The lab's processes read plans, and load no NumPy.
    from cocodc_jax.network.links import Topology

_INTERNET_MTU_BYTES = 1500
_LARGEST_MTU_BYTES = 65000
_PACKET_S = 0.001
_SHORTEST_S = 0.2  # The shortest round trip that windows are made for.
_LARGEST_WINDOW_BYTES = 2**28


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run of the lab.

    Attributes:
      regions: names, one per region.
      command: program and arguments; `{region}` becomes the region's number.
      logdir: folder for region_N.log, region_N.hosts and traffic.json.
      conditions: of the links, over time.
      mtu_bytes: largest packet.
      window_bytes: the most that TCP may have under way in each connection.
      buffer_s: longest wait in a queue of the relay.
      congestion_control: the kernel's name of TCP's algorithm.
      restarts_slowly: whether TCP begins with a small window again after idle time.
      seed: of loss and jitter.
      grace_s: between asking a command to end and killing it.
      changes_path: a file from whose creation the times of the conditions count; None
        counts from the lab's start.
    """

    regions: tuple[str, ...]
    command: tuple[str, ...]
    logdir: pathlib.Path
    conditions: tuple[Conditions, ...]
    mtu_bytes: int
    window_bytes: int
    buffer_s: float = math.inf
    congestion_control: str = "reno"
    restarts_slowly: bool = False
    seed: int = 0
    grace_s: float = 5.0
    changes_path: pathlib.Path | None = None

    def region_command(self, region_id: int) -> list[str]:
        """Return the command of one region."""
        return [word.replace("{region}", str(region_id)) for word in self.command]

    def log_path(self, region_id: int) -> pathlib.Path:
        """Where a region's output goes."""
        return self.logdir / f"region_{region_id}.log"

    @property
    def traffic_path(self) -> pathlib.Path:
        """Where the relay's counters go."""
        return self.logdir / "traffic.json"

    def summary(self) -> str:
        """Return the relay's counts, on one line."""
        try:
            traffic = json.loads(read_regular(self.traffic_path))
        except FileNotFoundError:
            return "wan: nothing was counted"

        sent = sum(sum(row) for row in traffic["sent_bytes"])
        delivered = sum(sum(row) for row in traffic["delivered_bytes"])
        return (
            f"wan: {traffic['wall_s']:.1f} s, {sent / 1e6:.3f} MB sent, "
            f"{delivered / 1e6:.3f} MB delivered, relay busy "
            f"{traffic['relay_cpu_s'] / traffic['wall_s']:.0%} of a core, packets late "
            f"by {traffic['mean_late_s'] * 1000:.1f} ms, at most "
            f"{traffic['max_late_s'] * 1000:.1f}"
        )


def make_plan(
    topology: Topology,
    command: Sequence[str],
    logdir: pathlib.Path,
    *,
    region_bps: float = math.inf,
    mtu_bytes: int | None = None,
    **settings: Any,
) -> Plan:
    """Plan a run over a network, with sizes that suit its links without changes.

    Args:
      topology: links and their changes.
      command: program and arguments, see `Plan`.
      logdir: folder for logs and counters.
      region_bps: bits per second that a region can send, and receive, in all.
      mtu_bytes: largest packet; None is what the slowest link passes in a millisecond.
      **settings: further fields of `Plan`.
    """
    usual = conditions_over_time(topology.undisturbed, region_bps)[0]
    return Plan(
        regions=topology.regions,
        command=tuple(command),
        logdir=logdir,
        conditions=conditions_over_time(topology, region_bps),
        mtu_bytes=mtu_bytes or usual_mtu_bytes(usual),
        window_bytes=usual_window_bytes(usual),
        **settings,
    )


def conditions_over_time(
    topology: Topology, region_bps: float = math.inf
) -> tuple[Conditions, ...]:
    """Return the conditions from each moment at which a link changes.

    A change without a receiver also applies to the sending region's uplink, and one
    without a sender to the receiving region's downlink.
    """
    times = sorted({0.0, *topology.change_times_s})
    return tuple(_conditions_at(topology, time, region_bps) for time in times)


def _conditions_at(topology: Topology, time_s: float, region_bps: float) -> Conditions:
    ids = range(topology.num_regions)
    active = [c for c in topology.changes if c.start_s <= time_s < c.end_s]

    def of_links(entry: Callable[..., Any]) -> tuple[tuple[Any, ...], ...]:
        return tuple(tuple(entry(link) for link in row) for row in topology.links)

    # Rates of the link, not of one TCP stream; delays without jitter.
    plain = of_links(lambda x: dataclasses.replace(x, jitter_s=0.0, loss=0.0))
    state = dataclasses.replace(topology, links=plain).at(time_s)

    def cap(*ends: int | None) -> float:
        whole = [c for c in active if (c.source, c.target) in (ends, (None, None))]
        # Links cut a region off, not its meter: with a rate of 0 it would never end.
        factors = [c.bandwidth_factor for c in whole if c.bandwidth_factor]
        return region_bps * math.prod(factors)

    return Conditions(
        start_s=time_s,
        rate_bps=(8 * state.bytes_per_s).tolist(),
        delay_s=state.delay_s.tolist(),
        jitter_s=of_links(lambda link: link.jitter_s),
        loss=of_links(lambda link: link.loss),
        uplink_bps=tuple(cap(i, None) for i in ids),
        downlink_bps=tuple(cap(None, j) for j in ids),
    )


def usual_mtu_bytes(conditions: Conditions) -> int:
    """Return the packet size to emulate with: the bytes of the slowest meter in 1 ms.

    A packet costs the relay the same whatever its size, but a packet behind it waits.
    On lossy links it is the Internet's 1500, because packets are lost, not bytes.
    """
    if any(_between(conditions.loss)):
        return _INTERNET_MTU_BYTES
    slowest_bps = min(_between(conditions.rate_bps) + [*conditions.uplink_bps])
    # A single region may have no meter.
    size = min(slowest_bps / 8 * _PACKET_S, _LARGEST_MTU_BYTES)
    return max(int(size), _INTERNET_MTU_BYTES)


def usual_window_bytes(conditions: Conditions) -> int:
    """Return the bytes that one TCP connection may have under way.

    They fill the fastest link for a round trip, and as much again waits in queues. The
    result is four times that, because the kernel counts its own overhead and gives an
    application half.
    """
    fastest = max([*_between(conditions.rate_bps), 0.0])
    delay_s = conditions.delay_s
    ids = range(conditions.num_regions)
    pairs = itertools.combinations(ids, 2)
    round_trips_s = [delay_s[i][j] + delay_s[j][i] for i, j in pairs]
    seconds = max(_SHORTEST_S, 2 * max(round_trips_s, default=0.0))
    return min(int(4 * fastest / 8 * seconds), _LARGEST_WINDOW_BYTES)


def _between(matrix) -> list[float]:
    return [x for i, row in enumerate(matrix) for j, x in enumerate(row) if i != j]
