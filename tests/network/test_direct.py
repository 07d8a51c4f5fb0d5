"""The direct all-reduce: by hand, against the lab, and never below its links."""

import functools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax.network import direct
from cocodc_jax.network.collectives import settled_s
from cocodc_jax.network.gloo import payload_share
from cocodc_jax.network.links import Link, LinkState, uniform
from tests.network.made_up_links import own_links


def settled(state, num_bytes):
    return settled_s(state, functools.partial(seconds_of, state, num_bytes))


def seconds_of(state, num_bytes, starts):
    return direct.exchange(state, "direct", num_bytes)[0](starts)


def about(*seconds):
    """Words take a ten thousandth of a second."""
    return pytest.approx(list(seconds), abs=1e-2)


def test_two_regions_that_begin_at_once_by_hand():
    # Parts of 4 s. "Ready" arrives at 10, parts arrive at 24; and again: 48.
    assert seconds_of(own_links(2, 10.0), 8e6, [0, 0]) == about(48, 48)


def test_two_regions_of_which_one_is_late_by_hand():
    # Rank 1 comes at 20, when rank 0 is ready: its part leaves to 24 and arrives at 34,
    # and its "ready" behind it. So rank 0 sends from 34 to 38, and is in the second
    # exchange at 34. Its second "ready" leaves behind its part, at 38; both arrive at
    # 48.
    # Rank 1 is then in the second exchange, with rank 0 ready: it sends from 48 to 52,
    # and rank 0 is done at 62; its own part leaves then, and arrives at 76.
    assert seconds_of(own_links(2, 10.0), 8e6, [0, 20]) == about(62, 76)
    # So each has waited for twice a round trip and two parts, and it stays so.
    assert settled(own_links(2, 10.0), 8e6) == pytest.approx(2 * (20 + 8), abs=1e-2)


def test_messages_are_gathered_in_one_exchange_by_hand():
    # Messages of 4 s. Both at once: "ready" at 10, messages arrive at 24. Rank 1 late:
    # its message and its "ready" arrive at 34; that of rank 0 arrives at 48.
    gathered, _ = direct.exchange(own_links(2, 10.0), "direct_gather", 4e6)
    assert gathered([0, 0]) == about(24, 24)
    assert gathered([0, 20]) == about(34, 48)


def test_three_regions_over_one_line_each_by_hand():
    # Parts of 1 s, delay 1. Each gets "ready" first from the next and then from the one
    # after, and sends in that order: no two to the same one at a time. "Ready" arrives
    # at 1, parts arrive at 3 and at 4; and again: 8.
    state = uniform(3, Link(8e-3, 1.0)).at()
    assert seconds_of(state, 3e6, [0, 0, 0]) == about(8, 8, 8)


def test_one_region_takes_no_time_and_a_cut_link_takes_for_ever():
    assert seconds_of(own_links(1, 1.0), 8, [3]) == [3]
    state = own_links(3, 1.0)
    state.bytes_per_s[0, 1] = 0.0
    assert max(seconds_of(state, 3, [0, 0, 0])) == math.inf


# Four regions in the lab, seconds of the slowest, medians of 6 to 8.
@pytest.mark.parametrize(
    ("mbit", "megabytes", "measured_s"),
    [
        (1000, 3.36, 0.26),
        (100, 3.36, 0.75),
        (100, 0.84, 0.34),
        (100, 0.21, 0.23),
        (20, 3.36, 3.25),
        (20, 0.84, 0.95),
    ],
)
def test_the_formula_gives_the_seconds_that_the_lab_measured(
    mbit, megabytes, measured_s
):
    share = payload_share(min(125 * mbit, 65000))
    state = uniform(4, Link(mbit / 1000 * share, 0.05)).at()
    assert settled(state, megabytes * 1e6) == pytest.approx(measured_s, rel=0.1)


@pytest.mark.parametrize(
    ("num", "megabytes", "measured_s"),
    [(2, 6.0, 2.26), (2, 1.68, 0.86), (4, 3.36, 0.87)],
)
def test_regions_with_links_of_their_own_wait_for_two_parts(num, megabytes, measured_s):
    """50 Mbit/s and 80 ms for each pair, in packets of 6250 bytes."""
    state = own_links(num, 0.08, 6.25e6 * payload_share(6250))
    assert settled(state, megabytes * 1e6) == pytest.approx(measured_s, rel=0.02)


@given(
    st.integers(2, 5),
    st.floats(0, 1),
    st.floats(1e4, 1e7),
    st.lists(st.floats(0, 3), min_size=5, max_size=5),
    st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_an_exchange_is_between_its_bounds(num, delay_s, num_bytes, starts, has_line):
    state = own_links(num, delay_s, 1e6)
    if has_line:
        state = LinkState(state.bytes_per_s, state.delay_s, 1e6)
    starts = starts[:num]
    ends = seconds_of(state, num_bytes, starts)

    part_s = num_bytes / num / 1e6
    others = num - 1 if has_line else 1
    assert max(ends) - max(starts) >= 2 * (others * part_s + delay_s) * (1 - 1e-9)
    in_turn = 2 * num * (num - 1) * part_s + 8 * delay_s
    assert max(ends) - max(starts) <= in_turn + 0.1
