"""Rounds whose length follows the rank of the messages that they hide.

A round is as long as its message is on its way. A message of rank r is r / r_1 as long
as one of rank r_1, so it needs that part of the steps; and the rank is what the
updates of late turned out to need:

    r_t = the smallest bucket that holds mean(effective ranks of the last five means)
    H_t = ceil(H_1 r_t / r_1)

The message that leaves at the start of round t has rank r_t, and is applied H_t steps
later, as the next one leaves (`Schedule.sends_first`). A mean is measured when it is
applied and looked at when the next message leaves, so nothing waits for it. Ranks come
in buckets, as every rank has programs of its own.

Every region must choose alike: an effective rank is that of a reduced mean.

Source: DiLoCoX (arXiv 2506.21263), from memory; algorithms.md section 7. The buckets,
their rounding upwards, and the weights in `effective_rank` are ours.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cocodc_jax.sync.events import Event, ScheduleState
from cocodc_jax.sync.schedule import Schedule
from cocodc_jax.transforms import low_rank
from cocodc_jax.transforms.compressor import Compressor

PyTree = Any


@dataclasses.dataclass(frozen=True)
class RankedCompressors:
    """Compressors that differ in their rank alone.

    Attributes:
      of: `of(rank) -> Compressor`.
      resize: `resize(state, tree, rank) -> state`: of a state of `of(any rank)` one of
        `of(rank)`, for a `tree` of these shapes.
    """

    of: Callable[[int], Compressor]
    resize: Callable[[PyTree, PyTree, int], PyTree]


@dataclasses.dataclass(frozen=True)
class RankedRounds(Schedule):
    """A schedule of the whole model, one round late; `sync_interval` is H_1.

    Attributes:
      ranks: the buckets, descending; the first is r_1.
      window: over how many means effective ranks are averaged.
    """

    ranks: tuple[int, ...] = (1,)
    window: int = 5

    @property
    def observes(self) -> str:
        """What `observe` wants to know of an applied mean."""
        return "effective_rank"

    def init(self) -> ScheduleState:
        """The state before the first step: the first round is as long as any."""
        return dataclasses.replace(
            super().init(), rank=self.ranks[0], round_steps=self.sync_interval
        )

    def steps_of(self, rank: int) -> int:
        """H_t, the steps of a round that hides a message of this rank."""
        return -(-self.sync_interval * rank // self.ranks[0])

    def next_step(self, state: ScheduleState) -> int:
        """The end of the round that goes on."""
        return max(state.last_start[0], 0) + state.round_steps

    def may_start(self, state: ScheduleState, step: int) -> bool:
        """Whether `step` is the end of a round."""
        return step == self.next_step(state)

    def finishes(self, state, step):
        """The message that is on its way, if the round ends at `step`."""
        if not self.may_start(state, step):
            return dataclasses.replace(state, step=step), []
        due = [Event("finish", p, s, rank=state.rank) for p, s in state.in_flight]
        return dataclasses.replace(state, step=step, in_flight=()), due

    def start(self, state, step, drift=None):
        """The next round's start, with its rank and length, if one ends at `step`."""
        del drift
        if not self.may_start(state, step):
            return state, None
        rank = self._choose_rank(state.effective_ranks)
        state = dataclasses.replace(
            state,
            step=step,
            in_flight=((0, step),),
            last_start=(step,),
            interval=(state.round_steps,),
            rank=rank,
            round_steps=self.steps_of(rank),
        )
        return state, Event("start", 0, step, rank=rank)

    def observe(self, state, fragment, observed, size):
        """Tells the schedule the effective rank of the mean that was just applied."""
        del fragment, size
        newest = (*state.effective_ranks, observed)[-self.window :]
        return dataclasses.replace(state, effective_ranks=newest)

    def _choose_rank(self, effective_ranks: tuple[float, ...]) -> int:
        if not effective_ranks:
            return self.ranks[0]
        wanted = statistics.fmean(effective_ranks)
        enough = [rank for rank in self.ranks if rank >= wanted]
        return min(enough, default=self.ranks[0])


def ranked_rounds(sync_interval: int, rank: int, min_rank: int) -> RankedRounds:
    """Rounds of `sync_interval` steps at `rank`, and of fewer below.

    Args:
      sync_interval: H_1.
      rank: r_1, the largest.
      min_rank: the smallest. Between the two every bucket is half of the one above.

    Raises:
      ValueError: naming the argument, its value and what would be right.

    >>> ranked_rounds(125, 64, 4).ranks
    (64, 32, 16, 8, 4)
    """
    if not 1 <= min_rank <= rank:
        raise ValueError(
            f"min_rank={min_rank} must be at least 1 and at most rank={rank}"
        )
    ranks = [rank]
    while ranks[-1] > min_rank:
        ranks.append(max(ranks[-1] // 2, min_rank))
    return RankedRounds(
        num_fragments=1,
        sync_interval=sync_interval,
        delay_steps=sync_interval,
        slot_steps=sync_interval,
        sends_first=True,
        ranks=tuple(ranks),
    )


def effective_rank(tree: PyTree) -> jax.Array:
    """How many singular values of a tensor matter, averaged over all parameters.

    A tensor counts as often as it has parameters: stacked norms, which no factors make
    smaller, hardly do. See `low_rank.effective_rank` for one.

    Args:
      tree: a mean pseudo-gradient.

    Returns:
      float32 scalar, at least 1.
    """
    leaves = jax.tree.leaves(tree)
    total = sum(x.size for x in leaves)
    each = [x.size / total * low_rank.effective_rank(x) for x in leaves]
    return jnp.sum(jnp.stack(each))
