"""A pipeline whose batches choose, stage by stage, which site serves them.

Each stage is served by several sites with the same parameters. A batch that is done at
stage s goes to the site of stage s + 1 with the least load P, and adds to it what it
expects to take there (interleaved weighted round-robin),

    i = argmin P,   P_i <- P_i + t_i,   t_i <- an exponential mean of what batches took

so that sites serve in proportion to their throughput. A site that is gone is left out,
and what was with it is sent again to another; one that joins begins at the least P of
its stage. Every `rebalance_s` seconds a site moves from the stage with the fewest
batches to the one with the most, if the slower of the two gets faster by it, after
fetching the stage's parameters from the nearest site that has them.

Source: SWARM (Ryabinin et al., arXiv 2301.11913). The wiring, with what is measured
(from sending a batch to having it back) and its mean (0.1, unbiased), as read from the
authors' code; rebalancing and its period as in digests of the paper. Differs from it:
- a batch visits each stage once, forward and backward together, and takes activations
  and gradients over the link at that time;
- all trainers share one set of loads, and learn of a failure at once;
- a move that would make the other stage the slower one is not made (whether the paper
  has such a rule is not known; without it two stages hand a site to and fro).
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence

from cocodc_jax.network.links import LinkState
from cocodc_jax.network.placement import Stages, check_sizes
from cocodc_jax.network.swarm_state import Batch, Move, SwarmState

WIRINGS = ("stochastic", "fixed")


@dataclasses.dataclass(frozen=True)
class Failure:
    """A site that is gone for a while.

    Attributes:
      site: which.
      start_s: since when, in simulated seconds.
      end_s: until when.
    """

    site: int
    start_s: float
    end_s: float = math.inf

    def __post_init__(self):
        if not 0 <= self.start_s < self.end_s:
            raise ValueError(
                f"start_s={self.start_s} must be at least 0 and before end_s="
                f"{self.end_s}"
            )


@dataclasses.dataclass(frozen=True)
class Swarm:
    """Sites that serve the stages of a pipeline.

    Attributes:
      stages: stages[s] are the sites of stage s, at the start.
      batch_s: seconds that each site takes for one stage's part of a batch.
      activation_bytes: what a stage hands on of a batch; its gradient is as large.
      stage_bytes: what a site fetches before it serves another stage.
    """

    stages: Stages
    batch_s: tuple[float, ...]
    activation_bytes: float = 0.0
    stage_bytes: float = 0.0

    def __post_init__(self):
        sites = sorted(itertools.chain(*self.stages))
        if sites != list(range(len(self.batch_s))) or not all(self.stages):
            raise ValueError(
                f"stages={self.stages} must have each of the {len(self.batch_s)} sites "
                "of batch_s once, and no stage without any"
            )
        if not all(0 < seconds < math.inf for seconds in self.batch_s):
            raise ValueError(f"batch_s={self.batch_s} must be positive")
        check_sizes(self.activation_bytes, self.stage_bytes)


@dataclasses.dataclass(frozen=True)
class SwarmRun:
    """What was simulated.

    Attributes:
      finished_s: when each batch was through, ascending.
      num_served: parts of batches that each site did.
      moves: in order.
      stages: the sites of every stage in the end.
    """

    finished_s: tuple[float, ...]
    num_served: tuple[int, ...]
    moves: tuple[Move, ...]
    stages: Stages

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
    """Simulate a pipeline with so many batches under way.

    Raises:
      ValueError: for a wiring that is none, a fixed one of stages of unequal size, or
        seconds that are not positive.
    """
    if not 0 < duration_s < math.inf:
        raise ValueError(f"duration_s={duration_s} must be positive and finite")
    if not rebalance_s > 0:
        raise ValueError(f"rebalance_s={rebalance_s} must be positive")
    if wiring not in WIRINGS:
        raise ValueError(f"wiring={wiring!r} is unknown; use one of {WIRINGS}")
    sizes = {len(sites) for sites in swarm.stages}
    if wiring == "fixed" and len(sizes) > 1:
        raise ValueError(
            f"wiring='fixed' needs stages of equal size, not {swarm.stages}"
        )
    run = SwarmState(swarm, state, wiring == "fixed", random.Random(seed))
    for failure in failures:
        run.at(failure.start_s, run.fail, failure.site)
        run.at(failure.end_s, run.recover, failure.site)
    for k in range(1, math.ceil(duration_s / rebalance_s)):
        run.at(k * rebalance_s, run.rebalance)
    for trainer in range(batches_per_site * len(swarm.batch_s)):
        run.at(0.0, run.send, Batch(trainer, 0, None))
    run.until(duration_s)
    return SwarmRun(
        tuple(run.finished_s), tuple(run.num_served), tuple(run.moves), run.stages
    )
