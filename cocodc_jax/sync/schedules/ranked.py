"""Rounds whose length follows the rank of the messages that they hide.

A round is as long as its message is in flight. A message of rank r has r / r_1 times
the size of one of rank r_1, so it needs that share of the steps. The rank is the one
that recent updates turned out to need:

    r_t = the smallest bucket that holds mean(effective ranks of the last five means)
    H_t = ceil(H_1 r_t / r_1)

The message that is sent at the start of round t has rank r_t, and is applied H_t steps
later, when the next one is sent (`slotted.one_step_stale`). A mean is measured when it
is applied and read when the next message is sent, so nothing waits for it. Ranks come
in buckets, as every rank compiles its own programs.

Source: DiLoCoX (arXiv 2506.21263), from memory. Buckets, rounded up, are ours.
"""

import dataclasses
import operator
import statistics

from cocodc_jax.sync.schedules.base import (
    START,
    Applied,
    Event,
    Observe,
    Pending,
    Schedule,
    ScheduleState,
    nothing,
    set_whole_fields,
)
from cocodc_jax.transforms.numerics import check_at_least


@dataclasses.dataclass(frozen=True)
class RankedState(ScheduleState):
    """State of ranked rounds."""

    sent_rank: int  # Of the messages sent now.
    round_steps: int  # Steps of the current round.
    effective_ranks: tuple[float, ...] = ()  # Of the last applied means, newest last.

    @property
    def rank(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Rank of the messages sent now."""
        return self.sent_rank


@dataclasses.dataclass(frozen=True)
class RankedRounds(Schedule):
    """A schedule of the full model, one round late, see `ranked_rounds`."""

    sync_interval: int  # H_1, steps of a round at the first rank.
    ranks: tuple[int, ...] = (1,)  # The buckets, descending; the first is r_1.
    window: int = 5  # Number of means to average effective ranks over.

    num_fragments = 1
    needs = frozenset({"effective_rank"})

    def __post_init__(self):
        set_whole_fields(self, sync_interval=1, window=1)
        object.__setattr__(self, "ranks", tuple(map(operator.index, self.ranks)))

    @property
    def delay_steps(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The maximum of tau."""
        return self.sync_interval

    def init(self) -> RankedState:
        """Return the initial state, with a zero message in flight."""
        return self.begin_at(0)

    def begin_at(self, step: int) -> RankedState:
        """Return the state at the start of a round, with a zero message in flight."""
        first = self.ranks[0]
        steps = self.sync_interval
        flying = (Pending(0, 0, step + steps, rank=first),)
        return RankedState(
            step=step,
            in_flight=flying,
            last_start=(step or -1,),
            sent_rank=first,
            round_steps=steps,
        )

    def steps_of(self, rank: int) -> int:
        """Return H_t, the steps of a round that hides a message of this rank."""
        return -(-self.sync_interval * rank // self.ranks[0])

    def next_step(self, state: RankedState) -> int:
        """Return the end of the current round."""
        return max(state.last_start[0], 0) + state.round_steps

    def next_event(
        self, state: RankedState, step: int, observe: Observe = nothing
    ) -> tuple[RankedState, Event | None]:
        """Return the next round's start, then the arrival; see `Schedule`."""
        if step != self.next_step(state):
            return self.arrive(state, step)

        for applied in observe("applied"):
            state = self.learn(state, applied)

        rank = self.ranks[0]
        if state.effective_ranks:
            wanted = statistics.fmean(state.effective_ranks)
            rank = min((r for r in self.ranks if r >= wanted), default=rank)

        steps = self.steps_of(rank)
        pending = Pending(0, step, step + steps, rank=rank)
        event = pending.event(START, step - state.round_steps)
        return state.sent(pending, 0, sent_rank=rank, round_steps=steps), event

    def learn(self, state: RankedState, applied: Applied) -> RankedState:
        """Return the state with the effective rank of an applied mean."""
        newest = (*state.effective_ranks, applied.seen["effective_rank"])
        return dataclasses.replace(state, effective_ranks=newest[-self.window :])


def ranked_rounds(sync_interval: int, rank: int, min_rank: int) -> RankedRounds:
    """Make rounds of `sync_interval` steps at `rank`, and of fewer below.

    >>> ranked_rounds(125, 64, 4).ranks
    (64, 32, 16, 8, 4)
    """
    check_at_least("rank", rank, 1)
    check_at_least("min_rank", min_rank, 1)
    if min_rank > rank:
        raise ValueError(f"min_rank={min_rank} must be at most rank={rank}")
    ranks = [rank]
    while ranks[-1] > min_rank:
        ranks.append(max(ranks[-1] // 2, min_rank))
    return RankedRounds(sync_interval, tuple(ranks))
