"""The lab's conditions over time, from a topology and the caps of its regions."""

import itertools
import math
import pathlib

from cocodc_jax._extras import extra
from cocodc_jax.netlab.shaper import Conditions
from cocodc_jax.network.links import LinkChange, Topology
from cocodc_jax.network.world import parse_topology

with extra("train"):
    import yaml

_INTERNET_MTU_BYTES, _LARGEST_MTU_BYTES = 1500, 65000
_PACKET_S = 0.001
_SHORTEST_S = 0.2  # that windows are made for
_LARGEST_WINDOW_BYTES = 2**28


def conditions_over_time(
    topology: Topology, region_bps: float = math.inf
) -> tuple[Conditions, ...]:
    """Return the conditions from each moment at which a link changes.

    A change of all that a region sends (it names no receiver) holds for the region's
    uplink too, and one of all that it receives for its downlink.
    """
    times = sorted({0.0, *topology.change_times_s})
    return tuple(_conditions_at(topology, time, region_bps) for time in times)


def _conditions_at(topology: Topology, time_s: float, region_bps: float) -> Conditions:
    ids = range(topology.num_regions)
    active = [c for c in topology.changes if c.start_s <= time_s < c.end_s]

    def matrix(entry):
        return tuple(tuple(entry(i, j) for j in ids) for i in ids)

    def rate(i: int, j: int) -> float:
        factors = [c.bandwidth_factor for c in active if _holds(c, i, j)]
        return topology.links[i][j].bandwidth_gbps * 1e9 * math.prod(factors)

    def delay(i: int, j: int) -> float:
        extra = sum(c.extra_latency_s for c in active if _holds(c, i, j))
        return topology.links[i][j].latency_s + extra

    def cap(source: int | None, target: int | None) -> float:
        # A region that is cut off is so by its links: a meter of rate 0 has no end.
        whole = [
            c.bandwidth_factor
            for c in active
            if c.bandwidth_factor
            and (c.source, c.target) in ((source, target), (None, None))
        ]
        return region_bps * math.prod(whole)

    return Conditions(
        start_s=time_s,
        rate_bps=matrix(rate),
        delay_s=matrix(delay),
        jitter_s=matrix(lambda i, j: topology.links[i][j].jitter_s),
        loss=matrix(lambda i, j: topology.links[i][j].loss),
        uplink_bps=tuple(cap(i, None) for i in ids),
        downlink_bps=tuple(cap(None, j) for j in ids),
    )


def _holds(change: LinkChange, source: int, target: int) -> bool:
    return change.source in (None, source) and change.target in (None, target)


def load_changes(
    path: str | pathlib.Path, regions: tuple[str, ...]
) -> tuple[LinkChange, ...]:
    """Read a list of changes, written as `changes` in a file of links.

    ```yaml
    - {start_s: 20, duration_s: 5, bandwidth_factor: 0}       # outage of all links
    - {between: [region0, region2], start_s: 40, duration_s: 30, bandwidth_factor: 0.1}
    - {from: region1, start_s: 60, duration_s: 10, extra_latency_ms: 80}
    ```

    Raises:
      ValueError: naming the file and the entry that is wrong.
      OSError: if the file cannot be read.
    """
    text = pathlib.Path(path).read_text()
    try:
        changes = yaml.safe_load(text)
        if not isinstance(changes, list):
            raise ValueError(f"changes={changes!r} must be a list")
        link = {"bandwidth_gbps": 1, "latency_ms": 0}  # of no use here, but required
        table = {"regions": list(regions), "default": link, "changes": changes}
        return parse_topology(table).changes
    except (yaml.YAMLError, ValueError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{path}: {message}") from error


def usual_mtu_bytes(conditions: Conditions) -> int:
    """Return the packet size to emulate with.

    As large as the slowest meter passes within a millisecond, since a packet costs the
    relay the same whatever its size, but no larger, since a packet behind it waits. On
    lossy links it is the Internet's 1500, since losses are counted by packets.
    """
    if has_loss(conditions):
        return _INTERNET_MTU_BYTES
    # A region by itself may have no meter.
    size = min(slowest_bps(conditions) / 8 * _PACKET_S, _LARGEST_MTU_BYTES)
    return max(int(size), _INTERNET_MTU_BYTES)


def usual_window_bytes(conditions: Conditions) -> int:
    """Return what one TCP connection may have under way.

    Enough to fill the fastest link for a round trip, and as much again for what waits
    in queues; four times so much, as the kernel counts its own overhead and gives an
    application half.
    """
    fastest = max([*_between(conditions.rate_bps), 0.0])
    seconds = max(_SHORTEST_S, 2 * longest_round_trip_s(conditions))
    return min(int(4 * fastest / 8 * seconds), _LARGEST_WINDOW_BYTES)


def slowest_bps(conditions: Conditions) -> float:
    """Bits per second of the slowest meter that any packet passes."""
    return min(_between(conditions.rate_bps) + [*conditions.uplink_bps])


def longest_round_trip_s(conditions: Conditions) -> float:
    """Return the longest there-and-back delay of any pair in seconds."""
    pairs = itertools.permutations(range(conditions.num_regions), 2)
    delay_s = conditions.delay_s
    return max((delay_s[i][j] + delay_s[j][i] for i, j in pairs), default=0.0)


def has_loss(conditions: Conditions) -> bool:
    """Whether any link loses packets."""
    return any(_between(conditions.loss))


def _between(matrix) -> list[float]:
    return [x for i, row in enumerate(matrix) for j, x in enumerate(row) if i != j]
