"""A pipeline whose batches choose, stage by stage, which site serves them.

Each stage is served by several sites with the same parameters. A batch that is done at
stage s goes to the site of stage s + 1 with the least load P, and adds to it what it
expects to take there (interleaved weighted round-robin),

    i = argmin P,   P_i <- P_i + t_i,   t_i <- an exponential mean of what batches took

so that sites serve in proportion to their throughput. Batches of a site that is gone
are sent again to another; one that joins begins at the least P of its stage. Every
`rebalance_s` seconds a site moves from the stage with the fewest batches to the one
with the most, if the slower of the two gets faster by it, after fetching the stage's
parameters from the nearest site that has them.

Source: SWARM (Ryabinin et al., arXiv 2301.11913). The wiring, with what is measured
(from sending a batch to having it back) and its mean (0.1, unbiased), as read from the
authors' code; rebalancing and its period as in digests of the paper. Differs from it:
- a batch visits each stage once, forward and backward together, and takes activations
  and gradients over the link at that time;
- all trainers share one set of loads, and learn of a failure at once;
- a move that would make the other stage the slower one is not made (whether the paper
  has such a rule is not known; without it two stages hand a site to and fro).
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from cocodc_jax.network.collectives import point_to_point_s
from cocodc_jax.network.links import LinkState, check
from cocodc_jax.network.placement import Stages, best_move, check_sizes
from cocodc_jax.transforms.numerics import check_choice

_SMOOTHING = 0.1  # weight of the newest in the mean of what batches took


@dataclasses.dataclass(frozen=True)
class Failure:
    """A site that is gone for a while."""

    site: int
    start_s: float  # In simulated seconds.
    end_s: float = math.inf

    def __post_init__(self):
        rule = f"at least 0 and before end_s={self.end_s}"
        check(0 <= self.start_s < self.end_s, "start_s", self.start_s, rule)


@dataclasses.dataclass(frozen=True)
class Swarm:
    """Sites that serve the stages of a pipeline."""

    stages: Stages  # stages[s] are the sites of stage s, at the start.
    # Seconds that each site takes for one stage's part of a batch.
    batch_s: tuple[float, ...]
    # What a stage hands on of a batch; its gradient is as large.
    activation_bytes: float = 0.0
    stage_bytes: float = 0.0  # What a site fetches before it serves another stage.

    def __post_init__(self):
        sites = sorted(itertools.chain(*self.stages))
        if sites != list(range(len(self.batch_s))) or not all(self.stages):
            raise ValueError(
                f"stages={self.stages} must have each of the {len(self.batch_s)} sites "
                "of batch_s once, and no stage without any"
            )
        are_positive = all(0 < seconds < math.inf for seconds in self.batch_s)
        check(are_positive, "batch_s", self.batch_s, "positive")
        check_sizes(self.activation_bytes, self.stage_bytes)


@dataclasses.dataclass(frozen=True)
class Move:
    """A site that went from one stage to another."""

    time_s: float
    site: int
    source: int
    target: int


@dataclasses.dataclass(frozen=True)
class SwarmRun:
    """What was simulated."""

    finished_s: tuple[float, ...]  # When each batch was through, ascending.
    num_served: tuple[int, ...]  # Parts of batches that each site did.
    moves: tuple[Move, ...]  # In order.
    stages: Stages  # The sites of every stage in the end.

    def batches_per_s(self, start_s: float, end_s: float) -> float:
        """Return the batches that were through between two times, per second."""
        done = sum(start_s < time_s <= end_s for time_s in self.finished_s)
        return done / (end_s - start_s)


def simulate_swarm(
    swarm: Swarm,
    state: LinkState,
    duration_s: float,
    batches_per_site: int = 4,
    wiring: str = "stochastic",
    rebalance_s: float = math.inf,
    failures: Sequence[Failure] = (),
    seed: int = 0,
) -> SwarmRun:
    """Simulate a pipeline with so many batches under way."""
    check(0 < duration_s < math.inf, "duration_s", duration_s, "positive and finite")
    check(rebalance_s > 0, "rebalance_s", rebalance_s, "positive")
    check_choice("wiring", wiring, ("stochastic", "fixed"))
    sizes = {len(sites) for sites in swarm.stages}
    if wiring == "fixed" and len(sizes) > 1:
        raise ValueError(
            f"wiring='fixed' needs stages of equal size, not {swarm.stages}"
        )
    run = _State(swarm, state, wiring == "fixed", random.Random(seed))
    for failure in failures:
        run.at(failure.start_s, run.leave, failure.site)
        run.at(failure.end_s, run.recover, failure.site)
    for k in range(1, math.ceil(duration_s / rebalance_s)):
        run.at(k * rebalance_s, run.rebalance)
    for trainer in range(batches_per_site * len(swarm.batch_s)):
        run.at(0.0, run.send, _Batch(trainer, 0, None))
    run.until(duration_s)
    return SwarmRun(
        tuple(run.finished_s), tuple(run.num_served), tuple(run.moves), run.stages
    )


def _home(stages: Stages, site: int) -> int:
    return next(s for s, sites in enumerate(stages) if site in sites)


@dataclasses.dataclass(eq=False)
class _Batch:
    """A batch on its way: who follows it, to which stage, from where, since when."""

    trainer: int
    stage: int
    origin: int | None
    sent_s: float = 0.0


class _State:
    """The state of a simulation, and what happens in it, event by event."""

    def __init__(
        self, swarm: Swarm, links: LinkState, is_fixed: bool, shuffler: random.Random
    ):
        num = len(swarm.batch_s)
        self._swarm, self._links, self._is_fixed = swarm, links, is_fixed
        self._shuffler, self.now_s = shuffler, 0.0
        self.finished_s: list[float] = []
        self.moves: list[Move] = []
        self.num_served = [0] * num
        self._events: list[tuple[float, int, Callable, tuple[Any, ...]]] = []
        self._ids = itertools.count()
        # Where each site serves; None while it is gone, or fetches parameters.
        self._stage_of: list[int | None] = [
            _home(swarm.stages, site) for site in range(num)
        ]
        self._queues = [collections.deque[_Batch]() for _ in range(num)]
        self._coming = [0] * num
        self._loads = [0.0] * num
        # Sums of the exponential mean and of its weights, see `_expected_s`.
        self._means = [(0.0, 0.0)] * num
        self._epochs = [0] * num
        self._waiting: list[list[_Batch]] = [[] for _ in swarm.stages]

    @property
    def stages(self) -> Stages:
        return tuple(tuple(self._serving(s)) for s in range(len(self._waiting)))

    def at(self, time_s: float, happen: Callable, *arguments: Any) -> None:
        """Have something happen at a time, after what was to happen then already."""
        heapq.heappush(self._events, (time_s, next(self._ids), happen, arguments))

    def until(self, end_s: float) -> None:
        """Let happen what happens up to a time."""
        while self._events and self._events[0][0] <= end_s:
            self.now_s, _, happen, arguments = heapq.heappop(self._events)
            happen(*arguments)

    def send(self, batch: _Batch) -> None:
        """Choose the site that serves a batch next, and send it there."""
        site = self._choose(batch)
        if site is None:
            self._waiting[batch.stage].append(batch)
            return
        batch.sent_s = self.now_s
        self._loads[site] += self._expected_s(site)
        self._coming[site] += 1
        arrival_s = self.now_s + self._transfer_s(batch.origin, site)
        self.at(arrival_s, self._arrive, batch, site, self._epochs[site])

    def _choose(self, batch: _Batch) -> int | None:
        if self._is_fixed:
            sites = self._swarm.stages[batch.stage]
            site = sites[batch.trainer % len(sites)]
            return site if self._stage_of[site] is not None else None
        sites = self._serving(batch.stage)
        ties = {site: (self._loads[site], self._shuffler.random()) for site in sites}
        return min(ties, key=ties.__getitem__, default=None)

    def _arrive(self, batch: _Batch, site: int, epoch: int) -> None:
        self._coming[site] -= 1
        if epoch != self._epochs[site]:
            self.send(batch)
            return
        self._queues[site].append(batch)
        if len(self._queues[site]) == 1:
            self._serve(site)

    def _serve(self, site: int) -> None:
        done_s = self.now_s + self._swarm.batch_s[site]
        self.at(done_s, self._finish, site, self._epochs[site])

    def _finish(self, site: int, epoch: int) -> None:
        if epoch != self._epochs[site]:
            return
        batch = self._queues[site].popleft()
        self.num_served[site] += 1
        (total, weight), keep = self._means[site], 1 - _SMOOTHING
        total = keep * total + _SMOOTHING * (self.now_s - batch.sent_s)
        self._means[site] = total, keep * weight + _SMOOTHING
        if self._queues[site]:
            self._serve(site)
        if batch.stage + 1 < len(self._waiting):
            self.send(_Batch(batch.trainer, batch.stage + 1, site))
        else:
            self.finished_s.append(self.now_s)
            self.send(_Batch(batch.trainer, 0, None))

    def recover(self, site: int) -> None:
        """Give a site back to its stage, or where sites choose to the most loaded."""
        most_loaded = max(range(len(self._waiting)), key=self._load)
        home = _home(self._swarm.stages, site)
        self._join_later(site, home if self._is_fixed else most_loaded)

    def rebalance(self) -> None:
        """Move a site from the stage with the fewest batches to that with the most."""
        stages = self.stages
        loads = [self._load(s) for s in range(len(stages))]
        target, source = loads.index(max(loads)), loads.index(min(loads))
        rates = [1 / seconds for seconds in self._swarm.batch_s]
        site = best_move(stages, rates, source, target)
        if site is not None:
            self.moves.append(Move(self.now_s, site, source, target))
            self.leave(site)
            self._join_later(site, target)

    def leave(self, site: int) -> None:
        """Take a site away; what was with it is sent again."""
        self._epochs[site] += 1
        self._stage_of[site] = None
        left, self._queues[site] = self._queues[site], collections.deque()
        for batch in left:
            self.send(batch)

    def _join_later(self, site: int, stage: int) -> None:
        peers = [i for i in self._serving(stage) if i != site]
        size = self._swarm.stage_bytes
        fetch_s = (point_to_point_s(self._links, i, site, size) for i in peers)
        # The last one of a stage has its parameters itself.
        ready_s = self.now_s + min(fetch_s, default=0.0)
        self.at(ready_s, self._join, site, stage, self._epochs[site])

    def _join(self, site: int, stage: int, epoch: int) -> None:
        if epoch != self._epochs[site]:  # Gone again meanwhile.
            return
        peers = self._serving(stage)
        self._loads[site] = min((self._loads[i] for i in peers), default=0.0)
        self._means[site] = (0.0, 0.0)
        self._stage_of[site] = stage
        waiting, self._waiting[stage] = self._waiting[stage], []
        for batch in waiting:
            self.send(batch)

    def _serving(self, stage: int) -> list[int]:
        return [i for i, s in enumerate(self._stage_of) if s == stage]

    def _load(self, stage: int) -> int:
        sites = self._serving(stage)
        there = sum(len(self._queues[i]) + self._coming[i] for i in sites)
        return there + len(self._waiting[stage])

    def _expected_s(self, site: int) -> float:
        total, weight = self._means[site]
        return total / weight if weight else self._swarm.batch_s[site]

    def _transfer_s(self, origin: int | None, site: int) -> float:
        if origin is None or origin == site:
            return 0.0
        size, links = self._swarm.activation_bytes, self._links
        there = point_to_point_s(links, origin, site, size)
        return there + point_to_point_s(links, site, origin, size)
