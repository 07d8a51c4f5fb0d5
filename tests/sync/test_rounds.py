"""Rounds that follow a rank: buckets, lengths, what is remembered, what is refused."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest

from cocodc_jax.sync import merge, methods, schedule
from cocodc_jax.sync.events import Event, ScheduleState
from cocodc_jax.sync.method import Method
from cocodc_jax.sync.rings import Rings
from cocodc_jax.sync.rounds import (
    RankedCompressors,
    RankedRounds,
    effective_rank,
    ranked_rounds,
)


def walk(rounds, measured, state=None):
    """Gives `(step, rank, steps)` of each start; `measured` are effective ranks.

    As a run does it: at the end of a round the next message leaves, then the arriving
    mean is applied, and it is observed before the round after that.
    """
    state, starts, untold = state or rounds.init(), [], []
    for value in measured:
        step = rounds.next_step(state)
        state, due = rounds.finishes(state, step)
        for seen in untold:
            state = rounds.observe(state, 0, seen, 1)
        state, event = rounds.start(state, step)
        assert event == Event("start", 0, step, rank=state.rank)
        (arrived,) = due
        untold = [value] if arrived.start_step > 0 else []
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
    """The first mean of all is zero and says nothing; the next is looked at at 24.

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
    assert state.effective_ranks == (2, 3, 4, 5, 6)


def test_the_event_of_a_message_has_the_rank_it_left_with():
    rounds = ranked_rounds(4, 4, 1)
    state, _ = walk(rounds, [0.0, 1.0])
    state = rounds.observe(state, 0, 1.0, 1)
    state, due = rounds.finishes(state, 12)
    assert due == [Event("finish", 0, 8, rank=4)]
    state, event = rounds.start(state, 12)
    assert event == Event("start", 0, 12, rank=1)
    assert rounds.finishes(state, 13)[1] == [Event("finish", 0, 12, rank=1)]


def test_nothing_happens_within_a_round():
    rounds = ranked_rounds(4, 4, 1)
    state, _ = walk(rounds, [0.0])
    for step in (5, 6, 7):
        assert not rounds.may_start(state, step)
        state, due = rounds.finishes(state, step)
        assert due == []
        assert rounds.start(state, step) == (state, None)
    assert rounds.next_step(state) == 8


@pytest.mark.parametrize("stop", range(6))
def test_a_state_from_json_has_the_same_future(stop):
    rounds, measured = ranked_rounds(8, 8, 1), [0.0, 1.3, 3.1, 2.2, 7.9, 5.5, 1.0]
    state, _ = walk(rounds, measured[:stop])
    restored = ScheduleState.from_json(json.loads(json.dumps(state.to_json())))
    assert restored == state
    rest = measured[stop:]
    assert walk(rounds, rest, restored) == walk(rounds, rest, state)


def test_a_state_without_ranks_is_restored_as_before():
    old = schedule.staggered(4).init().to_json()
    for key in ("rank", "round_steps", "effective_ranks"):
        del old[key]
    assert ScheduleState.from_json(old) == schedule.staggered(4).init()


@pytest.mark.parametrize(("rank", "min_rank"), [(4, 0), (4, 5)])
def test_a_smallest_rank_out_of_range(rank, min_rank):
    with pytest.raises(ValueError, match=f"min_rank={min_rank} must be .* rank={rank}"):
        methods.get("dilocox", rank=rank, min_rank=min_rank)


def test_effective_rank_counts_parameters():
    """exp of the entropy of the singular values, each tensor by its size."""
    rng = np.random.default_rng(0)
    tree = {"a": rng.normal(size=(6, 4)), "b": rng.normal(size=8), "c": np.zeros(2)}
    values = np.linalg.svd(tree["a"], compute_uv=False)
    p = values / values.sum()
    expected = (24 * np.exp(-np.sum(p * np.log(p))) + 8 + 2) / 34
    tree = jax.tree.map(lambda x: x.astype(np.float32), tree)
    actual = jax.jit(effective_rank)(tree)
    # A dozen roundings of float32.
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


class TestMethods:
    def test_the_adaptive_rank_has_its_parts(self):
        method = methods.get("dilocox", sync_interval=10, rank=8, min_rank=2)
        assert method.schedule == ranked_rounds(10, 8, 2)
        assert method.compressor_at(2).name == "error_feedback(low_rank(int4))"

    def test_a_fixed_rank_is_one_round_late(self):
        method = methods.get("dilocox", sync_interval=10, adaptive_rank=False)
        assert method.schedule == schedule.one_round_late(10)
        assert method.ranked_compressors is None

    def test_an_adaptive_rank_keeps_its_compressor(self):
        with pytest.raises(
            ValueError, match="compress='int8'.*'dilocox'.*adaptive_rank=False"
        ):
            methods.get("dilocox", compress="int8")
        fixed = methods.get("dilocox", compress="int8", adaptive_rank=False)
        assert fixed.compressor.name == "int8"

    def test_rings_carry_nothing_compressed(self):
        with pytest.raises(ValueError, match="compress='int8'.*partial sums"):
            methods.get("multi_ring", compress="int8")

    def test_no_rings(self):
        with pytest.raises(ValueError, match="num_rings=0 must be at least 1"):
            methods.get("multi_ring", num_rings=0)

    @pytest.mark.parametrize("name", ["data_parallel", "noloco", "muloco"])
    def test_rings_without_a_mean_to_take(self, name):
        with pytest.raises(ValueError, match=f"rings=2 .* method='{name}'"):
            dataclasses.replace(methods.get(name), rings=Rings(2))

    def test_ranks_and_compressors_go_together(self):
        ranked = RankedCompressors(lambda rank: None, lambda state, tree, rank: state)
        rounds = ranked_rounds(4, 4, 1)
        assert isinstance(rounds, RankedRounds)
        for when, what in ((rounds, None), (schedule.staggered(4), ranked)):
            with pytest.raises(ValueError, match="'odd' must have both a schedule"):
                Method(
                    "odd",
                    when,
                    merge.replace(),
                    optax.sgd(1.0),
                    ranked_compressors=what,
                )
