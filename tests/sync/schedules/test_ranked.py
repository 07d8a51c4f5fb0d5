"""Rounds that follow a rank: buckets, lengths, memory and errors."""

import pytest

from cocodc_jax.sync.schedules import FINISH, START, Event, ranked_rounds
from tests.sync.schedules import walks


def walk(rounds, measured, state=None):
    """Gives `(step, rank, steps)` of each start; `measured` are effective ranks.

    As in a run: at the end of a round the next message leaves, then the arriving mean
    is applied, and the schedule learns of it before the round after that.
    """
    state = state or rounds.init()
    starts = []
    for value in measured:
        step = rounds.next_step(state)
        seen = {"effective_rank": value}
        (only_step,) = walks.walk(
            rounds, state, step, lambda *_, s=seen: (1, s), learns=True
        )
        _, state, (start, finish) = only_step

        assert start == Event(START, 0, step, finish.start_step, rank=state.rank)
        assert finish.kind == FINISH
        starts.append((step, state.rank, state.round_steps))
    return state, starts


@pytest.mark.parametrize(
    ("rank", "min_rank", "ranks"),
    [
        (64, 4, (64, 32, 16, 8, 4)),
        (48, 5, (48, 24, 12, 6, 5)),
        (7, 7, (7,)),
        (3, 1, (3, 1)),
    ],
)
def test_buckets_are_halves(rank, min_rank, ranks):
    assert ranked_rounds(10, rank, min_rank).ranks == ranks


def test_a_round_is_long_enough_for_its_rank():
    rounds = ranked_rounds(125, 64, 4)
    assert [rounds.steps_of(r) for r in rounds.ranks] == [125, 63, 32, 16, 8]
    assert ranked_rounds(2, 64, 1).steps_of(1) == 1


def test_ranks_and_lengths_by_hand():
    """The first mean is zero and counts for nothing; the next is observed at 24.

    Then 2, (2 + 4) / 2 = 3, (2 + 4 + 9) / 3 = 5: buckets 2, 4, 8.
    """
    _, starts = walk(ranked_rounds(8, 8, 2), [0.0, 2.0, 4.0, 9.0, 9.0])
    assert starts == [(8, 8, 8), (16, 8, 8), (24, 2, 2), (26, 4, 4), (30, 8, 8)]


def test_a_rank_above_the_first_is_the_first():
    _, starts = walk(ranked_rounds(8, 8, 2), [0.0, 99.0, 99.0])
    assert [rank for _, rank, _ in starts] == [8, 8, 8]


def test_only_the_last_means_count():
    rounds = ranked_rounds(8, 8, 1)
    state, _ = walk(rounds, [0.0, *range(1, 8)])
    assert state.effective_ranks == (3, 4, 5, 6, 7)


def test_the_event_of_a_message_has_the_rank_it_left_with():
    rounds = ranked_rounds(4, 4, 1)
    state, _ = walk(rounds, [0.0, 1.0])

    state, event = rounds.next_event(state, 12)
    assert event == Event(START, 0, 12, 8, rank=1)
    state, event = rounds.next_event(state, 12)
    assert event == Event(FINISH, 0, 8, rank=4)

    state, event = rounds.next_event(state, 13)
    assert event == Event(START, 0, 13, 12, rank=1)
    assert rounds.next_event(state, 13)[1] == Event(FINISH, 0, 12, rank=1)


@pytest.mark.parametrize(
    ("rank", "min_rank", "message"),
    [(4, 0, "at least 1"), (4, 5, "at most rank=4"), (4, 1.5, "a whole number")],
)
def test_a_min_rank_out_of_range_is_refused(rank, min_rank, message):
    with pytest.raises(ValueError, match=f"min_rank={min_rank} must be {message}"):
        ranked_rounds(8, rank, min_rank)
