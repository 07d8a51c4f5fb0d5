"""Which site runs which pipeline stage, on links of unequal speed.

S stages times D replicas are put on M = S D sites. The sites of one stage average their
parameters (a ring every `sync_interval` steps); site d of stage s hands activations to
site d of stage s + 1 and gets gradients back. The cost of a step, in seconds, is

    max over replicas of sum over s of 2 t(s -> s + 1)  +  max over s of ring(s) / H

after DT-FM (arXiv 2206.01288), whose cost has the same two parts. Activations and
averages are added, as if they never overlapped, which is pessimistic. Up to
`EXACT_SITES` sites every arrangement is tried; beyond that, sites are swapped from
several random starts, which finds a local optimum.

A pipeline that routes each batch anew (`swarm.py`) is as fast as its slowest stage,
that with the least sum of its sites' rates.
"""

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence

from cocodc_jax.network.collectives import (
    Order,
    best_order,
    collective_cost,
    point_to_point_s,
)
from cocodc_jax.network.links import LinkState, check
from cocodc_jax.sync.schedules.base import check_at_least

EXACT_SITES = 6

Stages = tuple[Order, ...]  # The sites of every stage.


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Message sizes of a pipelined model.

    Attributes:
      num_stages: S, pipeline stages.
      activation_bytes: bytes a stage hands on in a step, all microbatches together.
      stage_bytes: bytes of one stage's message when replicas are averaged.
      sync_interval: H, steps between averages.
    """

    num_stages: int
    activation_bytes: float
    stage_bytes: float
    sync_interval: int = 1

    def __post_init__(self):
        for name in ("num_stages", "sync_interval"):
            check_at_least(name, getattr(self, name), 1)
        check_sizes(self.activation_bytes, self.stage_bytes)


def check_sizes(activation_bytes: float, stage_bytes: float) -> None:
    """Refuse sizes of messages that are none."""
    sizes = {"activation_bytes": activation_bytes, "stage_bytes": stage_bytes}
    for name, value in sizes.items():
        check(0 <= value < math.inf, name, value, "at least 0 and finite")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Sites of every stage and what they cost."""

    stages: Stages  # stages[s][d] is the site of replica d of stage s.
    pipeline_s: float  # Seconds of activations and their gradients in a step.
    sync_s: float  # Seconds of averaging, spread over the steps of an interval.
    slowest_stage: int  # The stage whose averaging takes longest.
    is_exact: bool  # Whether every arrangement was tried.

    @property
    def seconds(self) -> float:
        """Communication of a step, in seconds."""
        return self.pipeline_s + self.sync_s


def place(
    state: LinkState, pipeline: Pipeline, num_starts: int = 8, seed: int = 0
) -> Placement:
    """Choose the sites of every stage; the number of stages divides that of sites.

    With more than `EXACT_SITES` sites a local search starts from `num_starts`
    arrangements, drawn by `seed`.
    """
    num = state.num_regions
    if num % pipeline.num_stages:
        raise ValueError(
            f"num_stages={pipeline.num_stages} must divide the number of sites, {num}"
        )

    width = num // pipeline.num_stages
    size = pipeline.activation_bytes
    hop_s = [
        [point_to_point_s(state, i, j, size) if i != j else 0.0 for j in range(num)]
        for i in range(num)
    ]

    @functools.cache
    def ring_s(sites: frozenset[int]) -> float:
        """Return the seconds of averaging among some sites, in their best ring."""
        links = state.subset(sorted(sites))
        size = pipeline.stage_bytes
        order = best_order(links, "ring", size)
        return collective_cost(links, "ring", size, order).seconds

    def split(flat: Order) -> Stages:
        return tuple(flat[i : i + width] for i in range(0, num, width))

    def parts(flat: Order) -> tuple[float, float]:
        """Return `pipeline_s` and `sync_s` of an arrangement, stage after stage."""
        stages = split(flat)
        pipeline_s = max(
            sum(hop_s[a][b] + hop_s[b][a] for a, b in itertools.pairwise(path))
            for path in zip(*stages, strict=True)
        )
        sync_s = max(ring_s(frozenset(sites)) for sites in stages)
        return pipeline_s, sync_s / pipeline.sync_interval

    def cost(flat: Order) -> tuple[float, Order]:
        return sum(parts(flat)), flat

    if num <= EXACT_SITES:
        best = min(itertools.permutations(range(num)), key=cost)
    else:
        shuffler = random.Random(seed)
        sites = range(num)
        others = (tuple(shuffler.sample(sites, num)) for _ in range(num_starts - 1))
        starts = [tuple(sites), *others]
        best = min((_descend(start, cost) for start in starts), key=cost)

    stages = split(best)
    slowest = max(range(len(stages)), key=lambda s: ring_s(frozenset(stages[s])))
    return Placement(stages, *parts(best), slowest, num <= EXACT_SITES)


def rebalanced(stages: Stages, rates: Sequence[float]) -> Stages:
    """Move sites from the fastest to the slowest stage while that helps (SWARM).

    >>> rebalanced(((0, 1, 2), (3,)), rates=[1, 1, 1, 1])
    ((1, 2), (3, 0))
    """
    while True:
        totals = [sum(rates[i] for i in sites) for sites in stages]
        source = totals.index(max(totals))
        target = totals.index(min(totals))

        site = best_move(stages, rates, source, target)
        if site is None:
            return stages
        changed = list(stages)
        changed[source] = tuple(i for i in stages[source] if i != site)
        changed[target] = (*stages[target], site)
        stages = tuple(changed)


def best_move(
    stages: Stages, rates: Sequence[float], source: int, target: int
) -> int | None:
    """Return the site whose move makes the slower of two stages fastest.

    None if no move makes it faster, or if a stage would be left without a site.
    """

    def pace(moved: float) -> float:
        of_source = sum(rates[i] for i in stages[source])
        of_target = sum(rates[i] for i in stages[target])
        return min(of_source - moved, of_target + moved)

    if source == target or len(stages[source]) < 2:
        return None
    site = max(stages[source], key=lambda i: pace(rates[i]))
    return site if pace(rates[site]) > pace(0) * (1 + 1e-9) else None


def _descend(flat: Order, cost: Callable[[Order], tuple[float, Order]]) -> Order:
    """Take the best swap of two sites until none helps."""
    pairs = [(0, 0), *itertools.combinations(range(len(flat)), 2)]

    def swapped(i: int, j: int) -> Order:
        out = list(flat)
        out[i], out[j] = out[j], out[i]
        return tuple(out)

    while True:
        best = min((swapped(i, j) for i, j in pairs), key=cost)
        if cost(best)[0] >= cost(flat)[0]:
            return flat
        flat = best
