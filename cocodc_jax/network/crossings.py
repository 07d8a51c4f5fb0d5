"""What it costs to bring a message across: among all regions, in pairs, there and back.

A *crossing* gives the cost of one exchange over links as they are at a moment; `Cost`
is the same over links that change.

- `collective`: a named collective among all regions (`collectives.py`).
- `in_pairs`: every region with one other, drawn anew each time (NoLoCo).
- `to_neighbours`: every region with the one before it and the one after it (lt_admm).
- `by_rings`: several rings at once, each with its share (multi_ring).
- `answered`: one region's message to the first region, where the outer model is taken
  to be, and the answer back, over the links of that pair.
"""

import collections
import functools
from collections.abc import Callable, Sequence

import numpy as np

from cocodc_jax.network.collectives import (
    CollectiveCost,
    collective_cost,
    cost_of,
)
from cocodc_jax.network.links import LinkState, Topology
from cocodc_jax.network.orders import best_order
from cocodc_jax.sync.regions import matchings
from cocodc_jax.sync.summed import ByRings

Crossing = Callable[[LinkState, float], CollectiveCost]  # of (links, bytes)
Cost = Callable[[float, float], CollectiveCost]  # of (seconds, bytes)


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
    """Return a collective among all regions."""
    chosen = best_order(topology.at(), name, num_bytes) if order is None else order

    def cross(state: LinkState, size: float) -> CollectiveCost:
        return collective_cost(state, name, size, chosen)

    return cross


def in_pairs(state: LinkState, num_bytes: float) -> CollectiveCost:
    """Return the expected cost of an exchange in pairs, of which the slowest counts.

    The two of a pair send each other `num_bytes`. Each matching of `sync.regions` is
    drawn equally often, so numbers are means over them.
    """
    costs = []
    for partner in matchings(state.num_regions).tolist():
        round_ = [(i, j, num_bytes) for i, j in enumerate(partner) if i != j]
        costs.append(cost_of(state, [round_]))
    return CollectiveCost(
        float(np.mean([cost.seconds for cost in costs])),
        float(np.mean([cost.latency_s for cost in costs])),
        tuple(np.mean([cost.bytes_sent for cost in costs], axis=0).tolist()),
    )


def to_neighbours(state: LinkState, num_bytes: float) -> CollectiveCost:
    """Return the cost of telling both neighbours on a ring of the regions.

    A region's line carries one message after the other, and nobody waits in between.
    """
    num = state.num_regions
    steps = {by % num for by in (1, -1)} - {0}  # Of two regions both are one.
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
    """Return one region's message to the first region, and the answer back."""

    def cross(state: LinkState, size: float) -> CollectiveCost:
        if region == 0:
            return cost_of(state, [])
        back = [(0, region, size * answer_share)]
        return cost_of(state, [[(region, 0, size)], back])

    return cross
