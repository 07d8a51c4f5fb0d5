"""The order of regions in a ring, tree or cube that makes a collective cheapest.

Exact by enumeration for up to `EXACT_REGIONS`; beyond that the nearest-neighbour order
from every start, improved by 2-opt (reversing a stretch) and by swaps until neither
helps, which is a local optimum and no more.
"""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from cocodc_jax.network.collectives import ROUNDS, rounds_s
from cocodc_jax.network.links import LinkState

EXACT_REGIONS = 7

Order = tuple[int, ...]


def best_order(state: LinkState, name: str, num_bytes: float) -> Order:
    """Return the cheapest order of regions for a collective."""
    if name not in ROUNDS:
        return tuple(range(state.num_regions))
    build = ROUNDS[name]

    def cost(order: Order) -> tuple[float, Order]:
        return rounds_s(state, build(order, num_bytes)), order

    num = state.num_regions
    if num <= EXACT_REGIONS:
        # A ring turned by one place is the same ring, so its first region is fixed.
        is_ring = name in ("ring", "gather")
        fixed = (0,) if is_ring else ()
        rest = itertools.permutations(range(len(fixed), num))
        return min(cost(fixed + tail) for tail in rest)[1]
    starts = (_nearest_neighbours(state, first, num_bytes) for first in range(num))
    return local_search(min(starts, key=cost), cost)


def local_search(order: Order, cost: Callable[[Order], tuple[float, Order]]) -> Order:
    """Apply the first improving reversal or swap until there is none."""
    best, improved = cost(order), True
    while improved:
        improved = False
        for candidate in _neighbours(order):
            value = cost(candidate)
            if value[0] < best[0] * (1 - 1e-12):
                order, best, improved = candidate, value, True
                break
    return order


def _neighbours(order: Order) -> Iterator[Order]:
    for i, j in itertools.combinations(range(len(order)), 2):
        yield order[:i] + order[i : j + 1][::-1] + order[j + 1 :]
        if j - i > 2:
            middle = order[i + 1 : j]
            yield (*order[:i], order[j], *middle, order[i], *order[j + 1 :])


def _nearest_neighbours(state: LinkState, first: int, num_bytes: float) -> Order:
    part = num_bytes / state.num_regions
    with np.errstate(divide="ignore"):  # a link that is out takes for ever
        seconds = part / state.bytes_per_s + state.delay_s
    order = [first]
    left = set(range(state.num_regions)) - {first}
    while left:
        row = seconds[order[-1]]
        order.append(min(left, key=lambda j: (row[j], j)))
        left.remove(order[-1])
    return tuple(order)
