"""Stages on sites: their placement, and the routes of batches."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax.network import placement
from cocodc_jax.network.links import LinkState
from cocodc_jax.network.placement import Pipeline, place, rebalanced
from cocodc_jax.network.swarm import Failure, Swarm, simulate_swarm
from tests.network.made_up_links import own_links, random_links

# Sites 0 and 2 are in one place, 1 and 3 in another.
CLUSTERS = ({0, 2}, {1, 3})


def two_clusters():
    rate = np.full((4, 4), 1e6)
    for cluster in CLUSTERS:
        for a, b in itertools.permutations(cluster, 2):
            rate[a, b] = 1e9
    np.fill_diagonal(rate, np.inf)
    return LinkState(rate, np.zeros((4, 4)))


def oracle_s(state, stages, pipeline):
    """Two replicas, no delays: the definition, written out."""
    rate = state.bytes_per_s
    pipeline_s = [
        sum(
            pipeline.activation_bytes * (1 / rate[a, b] + 1 / rate[b, a])
            for a, b in zip(path, path[1:], strict=False)
        )
        for path in zip(*stages, strict=True)
    ]
    sync_s = [pipeline.stage_bytes / min(rate[a, b], rate[b, a]) for a, b in stages]

    return max(pipeline_s) + max(sync_s) / pipeline.sync_interval


def test_heavy_activations_keep_a_pipeline_in_one_place():
    placed = place(two_clusters(), Pipeline(2, 1e9, 1e3))
    assert {frozenset(path) for path in zip(*placed.stages, strict=True)} == {
        frozenset(c) for c in CLUSTERS
    }
    assert placed.pipeline_s == 2.0  # 1 GB there and back at 1 GB/s
    assert placed.sync_s == pytest.approx(1e-3)  # 1 kB over the slow links
    assert placed.is_exact


def test_the_slowest_stage_is_named():
    state = two_clusters()
    state.bytes_per_s[1, 3] = 1e8
    placed = place(state, Pipeline(2, 1e3, 1e9))
    assert set(placed.stages[placed.slowest_stage]) == {1, 3}


@pytest.mark.parametrize("seed", range(4))
def test_exact_and_local_search_against_brute_force(seed, monkeypatch):
    state = random_links(6, seed)
    pipeline = Pipeline(3, 1e8, 5e8, 3)
    best = min(
        oracle_s(state, (flat[:2], flat[2:4], flat[4:]), pipeline)
        for flat in itertools.permutations(range(6))
    )

    exact = place(state, pipeline)
    assert exact.seconds == pytest.approx(best)
    assert exact.seconds == pytest.approx(oracle_s(state, exact.stages, pipeline))

    # Six sites are few enough for eight starts to find the best on these seeds.
    monkeypatch.setattr(placement, "EXACT_SITES", 1)
    local = place(state, pipeline)
    assert not local.is_exact
    assert local.seconds == pytest.approx(best)


def test_larger_searches_beat_the_order_as_given():
    state = random_links(12, 0)
    pipeline = Pipeline(4, 1e8, 5e8, 10)
    placed = place(state, pipeline, num_starts=3)
    assert sorted(itertools.chain(*placed.stages)) == list(range(12))
    again = place(state, pipeline, num_starts=1)
    assert placed.seconds <= again.seconds


def run(stages, batch_s, duration_s, *, activation_bytes=0.0, stage_bytes=0.0, **more):
    state = more.pop("state", own_links(len(batch_s), 0.0, 1e9))
    swarm = Swarm(stages, tuple(batch_s), activation_bytes, stage_bytes)
    return simulate_swarm(swarm, state, duration_s, **more)


def pace(stages, batch_s):
    return min(sum(1 / batch_s[i] for i in sites) for sites in stages)


def test_a_chain_by_hand():
    # Two batches: stage 0 takes 1 s, stage 1 takes 2 s; the second one waits for it.
    done = run(((0,), (1,)), [1.0, 2.0], 9.5, batches_per_site=1)
    assert done.finished_s == (3, 5, 7, 9)
    assert done.num_served == (5, 4)


def test_a_chain_over_a_link_by_hand():
    # 1 MB there and back at 1 MB/s with half a second each way: 3 s more a batch.
    state = own_links(2, 0.5, 1e6)
    done = run(
        ((0,), (1,)),
        [1.0, 2.0],
        13,
        batches_per_site=1,
        activation_bytes=1e6,
        state=state,
    )
    # The first arrives at 4, the second, done at 2, at 5; they begin again at 6 and 8.
    assert done.finished_s == (6, 8, 12)


def test_round_robin_by_hand():
    # Two sites of one stage, two batches. Loads grow by 1 and by 3.3: at 3 s they are 3
    # and 3.3, so site 0 takes the next, and at 3.3 s they are 4 and 3.3: site 1.
    done = run(((0, 1),), [1.0, 3.3], 12, batches_per_site=1)
    assert done.num_served == (12, 3)


FAST_AND_SLOW = (((0, 1, 2), (3, 4, 5)), [1, 1, 4, 1, 4, 4])


def test_sites_serve_in_proportion_to_their_throughput():
    stages, batch_s = FAST_AND_SLOW
    wired = run(stages, batch_s, 2000)

    # Stage 1 is the slower one: 1 + 1/4 + 1/4 batches a second.
    assert wired.batches_per_s(200, 2000) == pytest.approx(1.5, rel=0.03)
    share = np.array(wired.num_served[3:]) / sum(wired.num_served[3:])
    np.testing.assert_allclose(share, [4 / 6, 1 / 6, 1 / 6], atol=0.03)

    # Chains 0-3, 1-4, 2-5 are as fast as their slower halves.
    fixed = run(stages, batch_s, 2000, wiring="fixed")
    assert fixed.batches_per_s(200, 2000) == pytest.approx(1.5, rel=0.03)

    crossed = run(((0, 1, 2), (4, 5, 3)), batch_s, 2000, wiring="fixed")
    assert crossed.batches_per_s(200, 2000) == pytest.approx(0.75, rel=0.03)
    crossed = run(((0, 1, 2), (4, 5, 3)), batch_s, 2000)
    assert crossed.batches_per_s(200, 2000) == pytest.approx(1.5, rel=0.03)


@pytest.mark.parametrize("wiring", [{}, {"wiring": "fixed"}])
def test_while_a_site_is_gone_its_stage_has_half_the_rate(wiring):
    gone = [Failure(3, 500, 1000)]
    done = run(((0, 1), (2, 3)), [1.0] * 4, 1500, failures=gone, **wiring)

    assert done.batches_per_s(100, 500) == pytest.approx(2, rel=0.03)
    assert done.batches_per_s(550, 1000) == pytest.approx(1, rel=0.03)
    assert done.batches_per_s(1100, 1500) == pytest.approx(2, rel=0.03)


@pytest.mark.parametrize(("wiring", "rate"), [({}, 1), ({"wiring": "fixed"}, 1 / 2)])
def test_a_site_that_is_gone_is_routed_around(wiring, rate):
    """Site 1 is enough for both of the slower stage, but not behind a cut chain."""
    batch_s = [1.0, 1.0, 2.0, 2.0]
    gone = [Failure(0, 500)]
    done = run(((0, 1), (2, 3)), batch_s, 1500, failures=gone, **wiring)

    assert done.batches_per_s(600, 1500) == pytest.approx(rate, rel=0.03)


def test_a_stage_without_a_site_waits_for_one():
    gone = [Failure(1, 10.5, 100)]
    done = run(((0,), (1,)), [1.0, 1.0], 200, failures=gone)
    assert done.batches_per_s(11, 100) == 0
    assert done.batches_per_s(110, 200) == pytest.approx(1, rel=0.03)
    # With two sites in the other stage one of them comes over.
    done = run(((0, 2), (1,)), [1.0] * 3, 200, failures=gone, rebalance_s=20)
    assert [(m.time_s, m.source, m.target) for m in done.moves] == [(20, 0, 1)]
    assert done.batches_per_s(25, 100) == pytest.approx(1, rel=0.03)


UNEQUAL = ((0, 1, 2, 3, 4), (5,))


def test_stages_are_rebalanced():
    still = run(UNEQUAL, [1.0] * 6, 2000)
    moving = run(UNEQUAL, [1.0] * 6, 2000, rebalance_s=100, stage_bytes=1e9)

    assert still.batches_per_s(500, 2000) == pytest.approx(1, rel=0.03)
    assert moving.batches_per_s(500, 2000) == pytest.approx(3, rel=0.03)
    assert [(m.time_s, m.source, m.target) for m in moving.moves] == [
        (100, 0, 1),
        (200, 0, 1),
    ]
    assert pace(rebalanced(UNEQUAL, [1.0] * 6), [1.0] * 6) == 3


def test_a_site_that_fetches_a_stage_serves_no_batch():
    """50 GB at 1 GB/s."""
    slow = run(UNEQUAL, [1.0] * 6, 160, rebalance_s=100, stage_bytes=50e9)

    assert slow.moves[0].site not in slow.stages[0]
    assert slow.batches_per_s(110, 150) == pytest.approx(1, rel=0.06)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.floats(0.5, 4), min_size=6, max_size=6),
    st.integers(0, 3),
    st.sampled_from([math.inf, 40.0]),
)
def test_no_batch_is_lost_or_faster_than_the_slowest_stage(batch_s, seed, rebalance_s):
    stages = ((0, 1), (2, 3), (4, 5))
    done = run(stages, batch_s, 300, seed=seed, rebalance_s=rebalance_s)
    finished = len(done.finished_s)
    served = sum(done.num_served)
    # Every batch passed three stages; at most those sent are unfinished.
    assert 3 * finished <= served <= 3 * (finished + 24)

    if rebalance_s == math.inf:
        assert finished <= 300 * pace(stages, batch_s) + 24
        assert finished >= 0.9 * 300 * pace(stages, batch_s) - 24

    balanced = rebalanced(stages, [1 / s for s in batch_s])
    assert sorted(sum(balanced, ())) == list(range(6))
    assert pace(balanced, batch_s) >= pace(stages, batch_s)
    assert run(stages, batch_s, 300, seed=seed, rebalance_s=rebalance_s) == done


CHAIN = ((0,), (1,))
PAIR_S = (1.0, 1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: place(two_clusters(), Pipeline(3, 1.0, 1.0)),
            "num_stages=3 must divide the number of sit",
        ),
        (lambda: Pipeline(0, 1.0, 1.0), "num_stages=0 must be at least 1"),
        (lambda: Pipeline(1, 1.0, -1), "stage_bytes=-1 must be at least 0 and fin"),
        (
            lambda: Pipeline(1, math.nan, 1.0),
            "activation_bytes=nan must be at least 0 an",
        ),
        (lambda: Failure(0, 5, 5), "start_s=5 must be .* before end_s=5"),
        (lambda: Swarm(((0,), (0,)), PAIR_S), "must have each of the 2 sites of batch"),
        (lambda: Swarm(CHAIN, (1.0, 0.0)), r"batch_s=\(1.0, 0.0\) must be positive"),
        (
            lambda: Swarm(CHAIN, PAIR_S, activation_bytes=math.nan),
            "activation_bytes=nan must be at least 0 an",
        ),
        (lambda: run(CHAIN, PAIR_S, 1, wiring="star"), "wiring='star' is unknown; use"),
        (
            lambda: run(((0, 1), (2,)), [1.0] * 3, 1, wiring="fixed"),
            "wiring='fixed' needs stages of equal size",
        ),
        (lambda: run(CHAIN, PAIR_S, 0), "duration_s=0 must be positive and finite"),
        (
            lambda: run(CHAIN, PAIR_S, 1, rebalance_s=0),
            "rebalance_s=0 must be positive",
        ),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
