"""A pipeline whose batches choose, stage by stage, which site serves them.

Each stage is served by several sites with the same parameters. A batch that is done at
stage s goes to the site of stage s + 1 with the least load P, and adds to that load the
time that it expects to take there (interleaved weighted round-robin),

    i = argmin P,   P_i <- P_i + t_i,   t_i <- an exponential mean of batches' times

so sites serve in proportion to their throughput. Batches of a site that leaves are sent
again to another; a site that joins begins at the least P of its stage. Every
`rebalance_s` seconds a site moves from the stage with the fewest batches to the one
with the most, if that makes the slower of the two faster, after it has fetched the
stage's parameters from the nearest site that has them.

Source: SWARM (Ryabinin et al., arXiv 2301.11913). The wiring, the measured time (from
sending a batch until it is back) and its mean (0.1, unbiased) are read from the
authors' code; rebalancing and its period are as in digests of the paper. Differs from
it:
- a batch visits each stage once, forward and backward together, and takes activations
  and gradients over the link at that time;
- all trainers share one set of loads, and know of a failure at once;
- a move that would make the other stage the slower one is not made. Whether the paper
  has such a rule is not known; without it, two stages pass a site back and forth.
"""

import dataclasses
import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cocodc_jax.network.collectives import point_to_point_s
from cocodc_jax.network.links import LinkState, check
from cocodc_jax.network.placement import Stages, best_move, check_sizes
from cocodc_jax.transforms.numerics import check_choice

_SMOOTHING = 0.1  # Weight of the newest time in the mean of batches' times.


@dataclasses.dataclass(frozen=True)
class Failure:
    """A temporary failure of a site."""

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
    # Bytes that a stage passes on for a batch; their gradient is as large.
    activation_bytes: float = 0.0
    stage_bytes: float = 0.0  # That a site fetches before it serves another stage.

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


class Move(NamedTuple):
    """A site's move from one stage to another."""

    time_s: float
    site: int
    source: int
    target: int


@dataclasses.dataclass(frozen=True)
class SwarmRun:
    """The result of a simulation."""

    finished_s: tuple[float, ...]  # When each batch was finished, ascending.
    num_served: tuple[int, ...]  # How many parts of batches each site computed.
    moves: tuple[Move, ...]  # In order.
    stages: Stages  # The sites of every stage in the end.

    def batches_per_s(self, start_s: float, end_s: float) -> float:
        """Return the batches that were finished between two times, per second."""
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
    """Simulate a pipeline with a fixed number of batches under way."""
    check(0 < duration_s < math.inf, "duration_s", duration_s, "positive and finite")
    check(rebalance_s > 0, "rebalance_s", rebalance_s, "positive")
    check_choice("wiring", wiring, ("stochastic", "fixed"))

    sizes = {len(sites) for sites in swarm.stages}
    if wiring == "fixed" and len(sizes) > 1:
        raise ValueError(
            f"wiring='fixed' needs stages of equal size, not {swarm.stages}"
        )

    run = _State(swarm, state, wiring == "fixed", seed)
    for failure in failures:
        run.at(failure.start_s, run.leave, failure.site)
        again = [f for f in failures if f.site == failure.site]
        if not any(f.start_s < failure.end_s < f.end_s for f in again):
            run.at(failure.end_s, run.recover, failure.site)

    for k in range(1, math.ceil(duration_s / rebalance_s)):
        run.at(k * rebalance_s, run.rebalance)
    for trainer in range(batches_per_site * len(swarm.batch_s)):
        run.at(0.0, run.send, _Batch(trainer, 0, None))

    run.until(duration_s)
    return SwarmRun(
        tuple(run.finished_s), tuple(run.num_served), tuple(run.moves), run.stages
    )


@dataclasses.dataclass(eq=False)
class _Batch:
    """A batch under way: its trainer, its next stage, where it is from, since when."""

    trainer: int
    stage: int
    origin: int | None
    sent_s: float = 0.0


@dataclasses.dataclass(eq=False)
class _Site:
    """A site until it leaves; when it comes back, it is another object."""

    id: int
    # The stage that it serves; None while it is gone or fetches parameters.
    stage: int | None = None
    load: float = 0.0
    # The exponential mean of batches' times is `total_s` over `weight`.
    total_s: float = 0.0
    weight: float = 0.0
    queue: list[_Batch] = dataclasses.field(default_factory=list)


class _State:
    """The state of a simulation, which events change."""

    def __init__(self, swarm: Swarm, links: LinkState, is_fixed: bool, seed: int):
        self._swarm = swarm
        self._links = links
        self._is_fixed = is_fixed
        self._shuffler = random.Random(seed)

        self.now_s = 0.0
        self.finished_s: list[float] = []
        self.moves: list[Move] = []
        self.num_served = [0] * len(swarm.batch_s)

        self._coming = [0] * len(swarm.batch_s)
        self._home = {i: s for s, sites in enumerate(swarm.stages) for i in sites}
        self._sites = [_Site(i, s) for i, s in sorted(self._home.items())]
        self._waiting: list[list[_Batch]] = [[] for _ in swarm.stages]

        self._events: list[tuple[float, int, Callable, tuple[Any, ...]]] = []
        self._ids = itertools.count()

    @property
    def stages(self) -> Stages:
        stages = []
        for stage in range(len(self._waiting)):
            stages.append(tuple(site.id for site in self._serving(stage)))
        return tuple(stages)

    def at(self, time_s: float, happen: Callable, *arguments: Any) -> None:
        """Schedule an event at a time, after those that already have that time."""
        heapq.heappush(self._events, (time_s, next(self._ids), happen, arguments))

    def until(self, end_s: float) -> None:
        """Process all events up to a time."""
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
        batch_s = self._swarm.batch_s[site.id]
        site.load += site.total_s / site.weight if site.weight else batch_s
        self._coming[site.id] += 1
        arrival_s = self.now_s + self._transfer_s(batch.origin, site.id)
        self.at(arrival_s, self._arrive, batch, site)

    def _choose(self, batch: _Batch) -> _Site | None:
        if self._is_fixed:
            sites = self._swarm.stages[batch.stage]
            site = self._sites[sites[batch.trainer % len(sites)]]
            return site if site.stage is not None else None
        sites = self._serving(batch.stage)
        ties = [(site.load, self._shuffler.random()) for site in sites]
        return sites[ties.index(min(ties))] if sites else None

    def _arrive(self, batch: _Batch, site: _Site) -> None:
        self._coming[site.id] -= 1
        if self._is_gone(site):
            self.send(batch)
            return
        site.queue.append(batch)
        if len(site.queue) == 1:
            self._serve(site)

    def _is_gone(self, site: _Site) -> bool:
        return self._sites[site.id] is not site

    def _serve(self, site: _Site) -> None:
        self.at(self.now_s + self._swarm.batch_s[site.id], self._finish, site)

    def _finish(self, site: _Site) -> None:
        if self._is_gone(site):
            return
        batch = site.queue.pop(0)
        self.num_served[site.id] += 1
        keep = 1 - _SMOOTHING
        took_s = self.now_s - batch.sent_s
        site.total_s = keep * site.total_s + _SMOOTHING * took_s
        site.weight = keep * site.weight + _SMOOTHING

        if site.queue:
            self._serve(site)
        if batch.stage + 1 < len(self._waiting):
            self.send(_Batch(batch.trainer, batch.stage + 1, site.id))
        else:
            self.finished_s.append(self.now_s)
            self.send(_Batch(batch.trainer, 0, None))

    def recover(self, site: int) -> None:
        """Return a site to its stage, or to the most loaded one if sites may move."""
        most_loaded = max(range(len(self._waiting)), key=self._load)
        self._join_later(site, self._home[site] if self._is_fixed else most_loaded)

    def rebalance(self) -> None:
        """Move a site from the stage with the fewest batches to that with the most."""
        stages = self.stages
        loads = [self._load(s) for s in range(len(stages))]
        target = loads.index(max(loads))
        source = loads.index(min(loads))
        rates = [1 / seconds for seconds in self._swarm.batch_s]

        site = best_move(stages, rates, source, target)
        if site is not None:
            self.moves.append(Move(self.now_s, site, source, target))
            self.leave(site)
            self._join_later(site, target)

    def leave(self, site: int) -> None:
        """Remove a site; the batches that it had are sent again."""
        left = self._sites[site]
        self._sites[site] = _Site(site)
        for batch in left.queue:
            self.send(batch)

    def _join_later(self, site: int, stage: int) -> None:
        size = self._swarm.stage_bytes
        peers = [peer.id for peer in self._serving(stage) if peer.id != site]
        fetch_s = (point_to_point_s(self._links, i, site, size) for i in peers)
        # The last one of a stage has its parameters itself.
        ready_s = self.now_s + min(fetch_s, default=0.0)
        self.at(ready_s, self._join, self._sites[site], stage)

    def _join(self, site: _Site, stage: int) -> None:
        if self._is_gone(site):  # Gone again meanwhile.
            return
        site.load = min((peer.load for peer in self._serving(stage)), default=0.0)
        site.total_s = site.weight = 0.0
        site.stage = stage
        waiting = self._waiting[stage]
        self._waiting[stage] = []
        for batch in waiting:
            self.send(batch)

    def _serving(self, stage: int) -> list[_Site]:
        return [site for site in self._sites if site.stage == stage]

    def _load(self, stage: int) -> int:
        sites = self._serving(stage)
        there = sum(len(site.queue) + self._coming[site.id] for site in sites)
        return there + len(self._waiting[stage])

    def _transfer_s(self, origin: int | None, site: int) -> float:
        if origin is None or origin == site:
            return 0.0
        size = self._swarm.activation_bytes
        links = self._links
        there = point_to_point_s(links, origin, site, size)
        return there + point_to_point_s(links, site, origin, size)
