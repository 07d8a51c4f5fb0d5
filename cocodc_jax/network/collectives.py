"""Seconds and bytes of collectives over links of unequal speed, and the best order.

A collective is a list of rounds, a round a list of messages `(source, target, bytes)`.
A region sends one message at a time and sends on what has reached it: the message of
round k leaves a region when its round k - 1 message has left and every message of the
earlier rounds has come in. So a fast link is not held back by a slow one until data
that crossed the slow one is needed. On equal links this gives the usual formulas, with
B bytes, bandwidth w, delay a and M regions:

    ring      2 (M - 1) (a + B / (M w))
    tree      2 log2 M (a + B / w)        M a power of two
    pairs     log2 M (a + B / w)          M a power of two; up to two more otherwise
    gather    (M - 1) (a + B / w)         each region contributes B bytes

"gloo" (all-reduce) and "gloo_gather" are not lists of rounds. They model what JAX's CPU
processes do, step by step (`gloo.py`); "direct" (all-reduce) and "direct_gather" model
this package's exchanges between processes (`direct.py`). If each pair of regions has
its own links and one region begins late, the latter take 2 (2 a + 2 B / (M w)) and
2 a + 2 B / w.

The best order of regions in a ring, tree or cube is exact for up to `EXACT_REGIONS`;
beyond that it is the best nearest-neighbour order, improved by 2-opt (reversing a
stretch) and by swaps until neither helps: a local optimum.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of collective communication
operations in MPICH", 2005 (ring, binomial tree, recursive doubling).
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cocodc_jax.network import direct, gloo
from cocodc_jax.network.links import LinkState, transfer_s

EXACT_REGIONS = 7

Round = list[tuple[int, int, float]]  # (source, target, bytes)
Order = tuple[int, ...]

_REPEATS = 10  # The most repeats of an exchange until its staggering settles.
_SETTLING = 4  # Repeats that do not count if it does not settle.


@dataclasses.dataclass(frozen=True)
class CollectiveCost:
    """Seconds and bytes of a collective."""

    seconds: float  # From the start until the last region has its result.
    # The seconds with messages of no bytes, in which the links are free for others; 0
    # for gloo's collectives, as a process does one after another.
    latency_s: float
    # Bytes each region puts on its links, one number per region.
    bytes_sent: tuple[float, ...]

    @property
    def transfer_s(self) -> float:
        """The part in which the links are busy, which transfers must share."""
        return self.seconds - self.latency_s


def gather_rounds(order: Sequence[int], num_bytes: float) -> list[Round]:
    """Ring all-gather: each region contributes `num_bytes` and ends with all M."""
    num = len(order)
    step = [(order[i], order[(i + 1) % num], num_bytes) for i in range(num)]
    return [step] * (num - 1)


def ring_rounds(order: Sequence[int], num_bytes: float) -> list[Round]:
    """Ring all-reduce: a reduce-scatter, then an all-gather, both of M parts."""
    return 2 * gather_rounds(order, num_bytes / len(order))


def tree_rounds(order: Sequence[int], num_bytes: float) -> list[Round]:
    """Binomial-tree all-reduce: sums travel to order[0], the result back."""
    up = []
    stride = 1
    while stride < len(order):
        sources = range(stride, len(order), 2 * stride)
        up.append([(order[i], order[i - stride], num_bytes) for i in sources])
        stride *= 2
    down = [[(dst, src, size) for src, dst, size in step] for step in reversed(up)]
    return up + down


def pairs_rounds(order: Sequence[int], num_bytes: float) -> list[Round]:
    """Recursive doubling: pairs at distance 1, 2, 4, ... exchange whole vectors.

    If M is not a power of two, the regions beyond the largest power below M first send
    their vector to a partner, and in the end receive the result from it.
    """
    core = 1 << (len(order).bit_length() - 1)
    extra = [(order[i], order[i - core], num_bytes) for i in range(core, len(order))]

    rounds = []
    stride = 1
    while stride < core:
        rounds.append([(order[i], order[i ^ stride], num_bytes) for i in range(core)])
        stride *= 2

    if not extra:
        return rounds
    return [extra, *rounds, [(dst, src, size) for src, dst, size in extra]]


ROUNDS: dict[str, Callable[[Sequence[int], float], list[Round]]] = {
    "ring": ring_rounds,
    "tree": tree_rounds,
    "pairs": pairs_rounds,
    "gather": gather_rounds,
}
# Models of what processes do, which are not lists of rounds.
MODELS = dict.fromkeys(gloo.PHASES, gloo) | dict.fromkeys(direct.PHASES, direct)
COLLECTIVES = (*ROUNDS, *MODELS)


def rounds_s(
    state: LinkState, rounds: Sequence[Round], with_bytes: bool = True
) -> float:
    """Return the seconds until the last message of `rounds` has come in."""
    rate = state.bytes_per_s.tolist()
    delay = state.delay_s.tolist()
    has_data = [0.0] * state.num_regions
    port_free = [0.0] * state.num_regions

    for step in rounds:
        arrivals = list(has_data)
        for source, target, size in step:
            begin = max(has_data[source], port_free[source])
            busy = transfer_s(size, rate[source][target]) if with_bytes else 0.0
            port_free[source] = begin + busy
            arrival = begin + busy + delay[source][target]
            arrivals[target] = max(arrivals[target], arrival)
        has_data = arrivals

    return max(has_data)


def cost_of(state: LinkState, rounds: Sequence[Round]) -> CollectiveCost:
    """Return the cost of any list of rounds, for example of a new collective."""
    sent = [0.0] * state.num_regions
    for source, _, size in itertools.chain(*rounds):
        sent[source] += size
    seconds = rounds_s(state, rounds)
    latency = rounds_s(state, rounds, False)
    return CollectiveCost(seconds, latency, tuple(sent))


def collective_cost(
    state: LinkState, name: str, num_bytes: float, order: Sequence[int] | None = None
) -> CollectiveCost:
    """Return the cost of one collective among all regions of `state`.

    Args:
      state: the links, M regions.
      name: "ring", "tree", "pairs", "gloo" or "direct" (all-reduce), or "gather",
        "gloo_gather" or "direct_gather" (all-gather of encoded messages, which each
        region then decodes and averages).
      num_bytes: bytes of the vector to reduce, or of one region's message.
      order: a permutation of the region ids (position in the ring, tree or cube);
        None is their order in `state`.

    Raises:
      ValueError: if the name is unknown, the order is not a permutation, or the bytes
        are negative.

    >>> from cocodc_jax.network.links import Link, uniform
    >>> state = uniform(4, Link(bandwidth_gbps=8.0, latency_s=0.5)).at()
    >>> collective_cost(state, "ring", 4e9).seconds  # 6 rounds of 1 s + 0.5 s
    9.0
    """
    if name not in COLLECTIVES:
        raise ValueError(f"collective={name!r} must be one of {sorted(COLLECTIVES)}")
    if num_bytes < 0:
        raise ValueError(f"num_bytes={num_bytes!r} must not be negative")

    order = tuple(range(state.num_regions)) if order is None else tuple(order)
    if sorted(order) != list(range(state.num_regions)):
        raise ValueError(
            f"order={order!r} must be a permutation of 0..{state.num_regions - 1}"
        )
    if name in ROUNDS:
        return cost_of(state, ROUNDS[name](order, num_bytes))

    ranks = state.subset(order)  # Process k is region order[k].
    seconds_of, sent = MODELS[name].exchange(ranks, name, num_bytes)
    by_region = tuple(sent[order.index(i)] for i in range(len(order)))
    return CollectiveCost(settled_s(ranks, seconds_of), 0.0, by_region)


def settled_s(
    state: LinkState, exchange: Callable[[Sequence[float]], list[float]]
) -> float:
    """Return the seconds that ranks wait for a collective that they repeat.

    All ranks begin the next repeat equally long after they end the last one, as regions
    do that wait for each other's fragments. In the first repeat each rank begins the
    longest round trip after the rank before it. The result is the mean over ranks,
    which wait equally in the long run, and over repeats if their staggering never
    settles.

    Args:
      state: the links.
      exchange: `exchange(starts_s) -> ends_s`, of each rank.
    """
    late_s = 2 * float(state.delay_s.max())
    starts = [late_s * rank for rank in range(state.num_regions)]
    taken: list[float] = []

    for _ in range(_REPEATS):
        ends = exchange(starts)
        taken.append((sum(ends) - sum(starts)) / len(starts))
        if math.isinf(taken[-1]):
            return taken[-1]
        before = starts
        starts = [end - min(ends) for end in ends]
        if all(map(math.isclose, starts, before)):
            return taken[-1]

    return statistics.fmean(taken[_SETTLING:])


def point_to_point_s(
    state: LinkState, source: int, target: int, num_bytes: float
) -> float:
    """Return the seconds of one message between two regions."""
    return rounds_s(state, [[(source, target, num_bytes)]])


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
        fixed = (0,) if name in ("ring", "gather") else ()
        rest = itertools.permutations(range(len(fixed), num))
        return min(cost(fixed + tail) for tail in rest)[1]

    starts = (_nearest_neighbours(state, first, num_bytes) for first in range(num))
    best = min(map(cost, starts))
    while True:  # Take the first improving reversal or swap until there is none.
        enough_s = best[0] * (1 - 1e-12)
        order = best[1]
        better = (x for x in map(cost, _neighbours(order)) if x[0] < enough_s)
        if (best := next(better, None)) is None:
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
