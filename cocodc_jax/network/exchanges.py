"""What a method sends over a network: when, how many bytes, and by which collective.

All of it is derived from a `cocodc_jax.sync.method.Method`. A *crossing* gives the cost
of one exchange over links in a fixed state, a `Cost` that over links that change with
time.
"""

import collections
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from cocodc_jax.network import collectives
from cocodc_jax.network.collectives import CollectiveCost, collective_cost, cost_of
from cocodc_jax.network.links import LinkState, Topology
from cocodc_jax.sync.method import Method
from cocodc_jax.sync.outer import RegionalOuter
from cocodc_jax.sync.regions import matchings
from cocodc_jax.sync.schedules import Schedule, staggered
from cocodc_jax.sync.summed import ByRings
from cocodc_jax.transforms.compressor import identity, message_bytes

Crossing = Callable[[LinkState, float], CollectiveCost]  # of (links, bytes)
Cost = Callable[[float, float], CollectiveCost]  # of (seconds, bytes)

# Message sizes are measured on these shapes: matrices and norms of a transformer block.
WIDTH = 1024
BLOCK = {
    "blocks/attention": (4, WIDTH, WIDTH),
    "blocks/up": (1, WIDTH, 4 * WIDTH),
    "blocks/down": (1, 4 * WIDTH, WIDTH),
    "blocks/norms": (2, WIDTH),
}


def schedule_of(method: Method) -> Schedule | None:
    """Return the schedule of a method's exchanges; None if it has none.

    An exchange at every step is a blocking sync of all parameters at every step.
    """
    return staggered(1) if method.per_step else method.schedule


def is_gathered(method: Method) -> bool:
    """Return whether each region receives every message, rather than their sum."""
    if method.per_step:
        return method.per_step.receive is not None
    if method.sync is None or method.schedule is None or method.schedule.is_by_region:
        return False
    outer = method.sync.outer
    if isinstance(outer, RegionalOuter) and outer.group != "all":
        return False
    return method.sync.message.compressor() is not None


def message_share(method: Method) -> float:
    """Return the bytes of one region's message over those of float32 parameters.

    They are those of a transformer block, with the first rank where ranks change, and
    include the moments' average over the syncs.
    """
    shapes = {name: jax.ShapeDtypeStruct(s, "float32") for name, s in BLOCK.items()}
    if method.per_step:
        num_bytes = method.per_step.num_bytes(shapes)
    elif method.sync is None or isinstance(method.sync.message, ByRings):
        return 1.0  # `by_rings` counts what they pass on.
    elif isinstance(method.sync.outer, RegionalOuter):
        compressor = method.sync.message.compressor() or identity()
        num_bytes = method.sync.outer.num_bytes(shapes, compressor)
    else:
        num_bytes = method.sync.message.num_bytes(shapes, 1)

    share = num_bytes / message_bytes(shapes)
    if moments := method.sync and method.sync.moments:
        num_first = 2 if method.inner.optimizer == "mt_adam" else 1
        every = ((num_first, moments.first), (1, moments.second))
        share += sum(count / n for count, n in every if n)

    return share


def own_crossing(method: Method) -> str | Crossing | None:
    """Return the crossing that the method fixes; None if any collective will do."""
    if method.sync is None:
        return None
    outer = method.sync.outer
    message = method.sync.message
    if method.sync.schedule.is_by_region:
        return "ring"  # A placeholder: messages of one region use no collective.
    if isinstance(outer, RegionalOuter) and outer.group != "all":
        return in_pairs if outer.group == "pairs" else to_neighbours
    return by_rings(message.num) if isinstance(message, ByRings) else None


def crossing(method: Method, collective: str | None = None) -> str | Crossing:
    """Return how messages cross; refuse `collective` if the method fixes it."""
    fixed = own_crossing(method)
    if fixed is None:
        return collective or ("gather" if is_gathered(method) else "ring")
    if collective is not None:
        raise ValueError(
            f"collective={collective!r} has no meaning for method={method.name!r}, "
            "whose messages have a way of their own; leave it out"
        )
    return fixed


def over_time(topology: Topology, crossing: Crossing) -> Cost:
    """Return (seconds, bytes) -> cost over links that change with time."""
    times = topology.change_times_s

    @functools.cache
    def cost_in_period(period: int, size: float) -> CollectiveCost:
        return crossing(topology.at(times[period - 1] if period else 0.0), size)

    def cost(time_s: float, size: float) -> CollectiveCost:
        return cost_in_period(int(np.searchsorted(times, time_s, "right")), size)

    return cost


def collective(
    topology: Topology, name: str, order: Sequence[int] | None, num_bytes: float
) -> Crossing:
    """Return the crossing of a collective among all regions.

    Args:
      topology: of the links between regions.
      name: of the collective.
      order: of the regions on the ring; None is the best one for `num_bytes`.
      num_bytes: of a message.
    """
    if order is None:
        order = collectives.best_order(topology.at(), name, num_bytes)
    return lambda state, size: collective_cost(state, name, size, order)


def in_pairs(state: LinkState, num_bytes: float) -> CollectiveCost:
    """Return the expected cost of an exchange in pairs (NoLoCo).

    The regions of a pair send each other `num_bytes`, and the slowest pair sets the
    time. Each matching of `sync.regions` is drawn equally often, so the cost is their
    mean.
    """
    costs = []
    for partners in matchings(state.num_regions).tolist():
        sends = [(i, j, num_bytes) for i, j in enumerate(partners) if i != j]
        costs.append(cost_of(state, [sends]))

    return CollectiveCost(
        float(np.mean([cost.seconds for cost in costs])),
        float(np.mean([cost.latency_s for cost in costs])),
        tuple(np.mean([cost.bytes_sent for cost in costs], axis=0).tolist()),
    )


def to_neighbours(state: LinkState, num_bytes: float) -> CollectiveCost:
    """Return the cost of a message to both neighbours on a ring of regions (lt_admm).

    A region's line carries its messages one after the other, without a pause.
    """
    num = state.num_regions
    steps = {by % num for by in (1, -1)} - {0}  # Of two regions, both are the other.
    sends = [(m, (m + by) % num, num_bytes) for by in steps for m in range(num)]
    return cost_of(state, [sends])


def by_rings(num_rings: int) -> Crossing:
    """Return an all-reduce by several rings at once, see `sync.summed`.

    Rings of different strides use different links; a region's line carries all of them.
    """

    def cross(state: LinkState, size: float) -> CollectiveCost:
        num = state.num_regions
        shares = collections.Counter(ByRings(num_rings).strides(num))
        rings = []

        for stride, count in shares.items():
            order = [place * stride % num for place in range(num)]
            part = size * count / num_rings
            rings.append(collective_cost(state, "ring", part, order if stride else [0]))

        sent = np.sum([ring.bytes_sent for ring in rings], axis=0)
        latency = max(ring.latency_s for ring in rings)
        busy = max(ring.transfer_s for ring in rings)
        busy = max(busy, float(sent.max()) / state.line_bytes_per_s)

        return CollectiveCost(latency + busy, latency, tuple(sent.tolist()))

    return cross


def answered(region: int, answer_share: float = 1.0) -> Crossing:
    """Return the crossing of a region's message to region 0, and its answer.

    Args:
      region: which sends.
      answer_share: bytes of the answer over those of the message.
    """
    if region == 0:
        return lambda state, size: cost_of(state, [])
    return lambda state, size: cost_of(
        state, [[(region, 0, size)], [(0, region, size * answer_share)]]
    )
