import itertools
import math

import numpy as np
import pytest

from cocodc_jax.network.links import LinkState
from cocodc_jax.network.placement import Pipeline, place
from tests.network.made_up_links import random_links

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


def test_heavy_averages_keep_a_stage_in_one_place():
    placed = place(two_clusters(), Pipeline(2, 1e3, 1e9))
    assert {frozenset(stage) for stage in placed.stages} == {
        frozenset(c) for c in CLUSTERS
    }


def test_the_slowest_stage_is_named():
    state = two_clusters()
    state.bytes_per_s[1, 3] = 1e8
    placed = place(state, Pipeline(2, 1e3, 1e9))
    assert set(placed.stages[placed.slowest_stage]) == {1, 3}


def test_rare_averages_turn_the_choice():
    often = Pipeline(2, 1e8, 1e9, sync_interval=1)
    rarely = Pipeline(2, 1e8, 1e9, sync_interval=500)
    clusters = {frozenset(c) for c in CLUSTERS}
    assert {frozenset(s) for s in place(two_clusters(), often).stages} == clusters
    assert {frozenset(s) for s in place(two_clusters(), rarely).stages} != clusters


@pytest.mark.parametrize("seed", range(4))
def test_exact_and_local_search_against_brute_force(seed):
    state, pipeline = random_links(6, seed), Pipeline(3, 1e8, 5e8, 3)
    best = min(
        oracle_s(state, (flat[:2], flat[2:4], flat[4:]), pipeline)
        for flat in itertools.permutations(range(6))
    )
    exact = place(state, pipeline)
    assert exact.seconds == pytest.approx(best)
    assert exact.seconds == pytest.approx(oracle_s(state, exact.stages, pipeline))
    # Six sites are few enough for eight starts to find the best on these seeds.
    local = place(state, pipeline, exact_sites=1)
    assert not local.is_exact
    assert local.seconds == pytest.approx(best)


def test_larger_searches_beat_the_order_as_given():
    state, pipeline = random_links(12, 0), Pipeline(4, 1e8, 5e8, 10)
    placed = place(state, pipeline, num_starts=3)
    assert sorted(itertools.chain(*placed.stages)) == list(range(12))
    again = place(state, pipeline, num_starts=1)
    assert placed.seconds <= again.seconds


def test_errors():
    with pytest.raises(ValueError, match="num_stages=3 must divide the number of sit"):
        place(two_clusters(), Pipeline(3, 1.0, 1.0))
    with pytest.raises(ValueError, match="num_stages=0 must be at least 1"):
        Pipeline(0, 1.0, 1.0)
    with pytest.raises(ValueError, match="stage_bytes=-1 must be at least 0 and fin"):
        Pipeline(1, 1.0, -1)
    with pytest.raises(ValueError, match="activation_bytes=nan must be at least 0 an"):
        Pipeline(1, math.nan, 1.0)
