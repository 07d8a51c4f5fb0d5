import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax.network import gloo
from cocodc_jax.network.collectives import collective_cost
from cocodc_jax.network.collectives import settled_s as settled
from cocodc_jax.network.gloo import Phase, seconds_of
from cocodc_jax.network.links import Link, LinkState, uniform
from tests.network.made_up_links import states

MIB = 2**20
NAMES = sorted(gloo.PHASES)


def equal_state(num, delay_s, bytes_per_s=1.0):
    return uniform(num, Link(8e-9 * bytes_per_s, delay_s)).at()


def settled_s(state, phases):
    return settled(state, functools.partial(seconds_of, state, phases))


UNEQUAL = LinkState(np.array([[np.inf, 1.0], [4.0, np.inf]]), 10 * (1 - np.eye(2)))
BY_HAND = {
    # 16 bytes make 4 segments of 4 bytes, so 4 s. In each phase: "ready" twice at 0, in
    # at 10; segments leave from 10 to 14 and to 18, and are in at 24 and 28.
    "two": (equal_state(2, 10.0), gloo.all_reduce_phases(2, 16), [56, 56]),
    # As above, but from 1 to 0 a segment takes 1 s: rank 0 has its own at 22, rank 1 at
    # 28. Rank 0 says "ready" at 22, there at 32, rank 1 at 28, there at 38. From 0: 38
    # to 46, in at 56. From 1: 32 to 34, in at 44.
    "unequal links": (UNEQUAL, gloo.all_reduce_phases(2, 16), [44, 56]),
    # Four segments of 4 s, delay 1. 0 leaves from 1 to 5, 1 to 9; they are in at 6 and
    # 10. "Ready for 2" is sent at 6 and leaves behind 1, at 9: there at 10, so 2 leaves
    # from 10 to 14. "Ready for 3", sent at 10 when the port has got 2, leaves at 14, is
    # there at 15; 3 leaves from 15 to 19.
    "ready waits behind segments": (
        equal_state(2, 1.0),
        [Phase(np.full((4, 2), 4.0), -1, sends_first=False)],
        [20, 20],
    ),
    # Halves of 4 s, delay 1: they leave from 1 to 5 and to 9. "Ready for 2" has its own
    # link, is sent at 6 and there at 7; 2 leaves behind 1, to 13, then 3, to 17.
    "of three ready waits for nothing": (
        equal_state(3, 1.0),
        gloo.all_gather_phases(3, 8),
        [18, 18, 18],
    ),
}


@pytest.mark.parametrize(("state", "phases", "ends"), BY_HAND.values(), ids=BY_HAND)
def test_seconds_of_phases_by_hand(state, phases, ends):
    assert seconds_of(state, phases, [0] * len(ends)) == ends


def test_an_all_gather_of_two_ranks_that_begin_apart_by_hand():
    # Rank 1 comes at 5, with rank 0 ready: its halves leave from 5 to 9 and to 13, and
    # are in at 10 and 14. Its "ready" leaves behind each, so rank 0 begins at 10 and
    # 14, and is done sending at 18.
    phases = gloo.all_gather_phases(2, 8)
    state = equal_state(2, 1.0)
    assert seconds_of(state, phases, [0, 5]) == [14, 19]
    # Both have waited 14 s and begin 5 s apart again: so it goes on.
    assert settled_s(state, phases) == 14
    # Ranks that begin at once do not say "ready" behind segments.
    assert seconds_of(state, phases, [0, 0]) == [10, 10]


def test_all_reduce_seconds_equal_the_formula_of_the_docstring():
    # Six segments a rank of 0.5 s, delay 2 s.
    state = equal_state(4, 2.0, 2 * MIB)
    expected = 3 * 6 * (2 * 2 + 0.5) + 2 * 0.5
    assert settled_s(state, gloo.all_reduce_phases(4, 24 * MIB)) == expected


@pytest.mark.parametrize(
    ("num", "num_bytes", "segments"),
    [
        (2, 16, 2),  # two a rank at least
        (2, 4 * MIB, 2),
        (2, 4 * MIB + 4, 3),  # of 1 MiB at most
        (3, 3 * MIB, 2),
        (4, 24 * MIB, 6),
    ],
)
def test_a_segment_is_a_mebibyte_at_most(num, num_bytes, segments):
    phases = gloo.all_reduce_phases(num, num_bytes)
    assert [phase.sizes.shape for phase in phases] == [((num - 1) * segments, num)] * 2
    largest = max(phase.sizes.max() for phase in phases)
    assert largest == min(MIB, num_bytes / num / 2)


@given(st.integers(2, 6), st.integers(1, 10**8))
def test_every_value_crosses(num, num_values):
    """Each rank passes on all chunks but one, in both phases of an all-reduce."""
    scatter, gather = gloo.all_reduce_phases(num, 4 * num_values)
    for phase in (scatter, gather):
        assert phase.sizes.sum() == 4 * num_values * (num - 1)
    # A rank never gathers the chunk that it has made last: that it sends first.
    np.testing.assert_array_equal(scatter.sizes[:, 0], gather.sizes[:, 1])


@given(st.integers(2, 6), st.floats(1e5, 1e8), st.sampled_from(NAMES))
@settings(max_examples=40, deadline=None)
def test_without_delay_gloo_costs_a_ring(num, num_bytes, name):
    num_bytes = 8 * num * round(num_bytes)  # equal segments
    state = equal_state(num, 0.0, 1e6)

    plain = {"gloo": "ring", "gloo_gather": "gather"}[name]
    simulated, ring = (
        collective_cost(state, kind, min(num_bytes, 2 * num * MIB))
        for kind in (name, plain)
    )

    assert simulated.seconds == pytest.approx(ring.seconds)
    assert simulated.bytes_sent == pytest.approx(ring.bytes_sent)


@given(states(5), st.floats(0, 3e7))
@settings(max_examples=40, deadline=None)
def test_an_all_reduce_that_all_begin_at_once_is_monotone(state, num_bytes):
    starts = [0.0] * state.num_regions

    def seconds(state, num_bytes):
        phases = gloo.all_reduce_phases(state.num_regions, num_bytes)
        return max(seconds_of(state, phases, starts))

    base = seconds(state, num_bytes)
    slack = 1 + 1e-9
    narrow = LinkState(state.bytes_per_s / 2, state.delay_s)
    far = LinkState(state.bytes_per_s, state.delay_s * 2)
    assert base <= seconds(state, 2 * num_bytes) * slack
    assert base <= seconds(narrow, num_bytes) * slack
    assert base <= seconds(far, num_bytes) * slack


@given(states(5), st.sampled_from(NAMES), st.floats(8, 3e7))
@settings(max_examples=40, deadline=None)
def test_gloo_is_never_faster_than_its_slowest_link(state, name, num_bytes):
    num = state.num_regions
    hop = {"gloo": -1, "gloo_gather": 1}[name]
    ends, sent = gloo.exchange(state, name, num_bytes)
    bound = max(sent[i] / state.bytes_per_s[i, (i + hop) % num] for i in range(num))
    assert settled(state, ends) >= bound * (1 - 1e-9)


def test_an_order_gives_each_region_its_rank():
    # Chunks of 8, 8 and 4 bytes. Rank k sends all but chunk k, then all but k - 1.
    state = equal_state(3, 1.0)
    assert collective_cost(state, "gloo", 20).bytes_sent == (12 + 16, 12 + 12, 16 + 12)
    assert collective_cost(state, "gloo", 20, (1, 0, 2)).bytes_sent == (24, 28, 28)


def test_no_bytes_take_no_time_and_a_cut_link_takes_for_ever():
    assert collective_cost(equal_state(3, 1.0), "gloo", 0).seconds == 0
    rate = np.array([[np.inf, 0.0], [1.0, np.inf]])
    cut = LinkState(rate, 1 - np.eye(2))
    assert math.isinf(collective_cost(cut, "gloo", 16).seconds)
    # One after the other: no part of it leaves the links free.
    assert collective_cost(equal_state(2, 10.0), "gloo", 16).latency_s == 0.0
