import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocodc_jax.network.collectives import CollectiveCost
from cocodc_jax.network.flights import Channel


def seconds_are_bytes(time_s, num_bytes):
    del time_s
    return CollectiveCost(num_bytes + 0.5, 0.5, (num_bytes,))


def arrivals(channel, jobs):
    sent = [channel.send(ready_s, size) for ready_s, size in jobs]
    return [channel.arrival_s(transfer) for transfer in sent]


@pytest.mark.parametrize(
    ("jobs", "fair", "fifo"),
    [
        ([(1.0, 2.0)], [3.5], [3.5]),
        # Alone from 0 to 1, half each from 1 to 3 when the first ends, then alone to 4.
        ([(0.0, 2.0), (1.0, 2.0), (9.0, 1.0)], [3.5, 4.5, 10.5], [2.5, 4.5, 10.5]),
        # A small transfer overtakes only when shared.
        ([(0.0, 4.0), (1.0, 1.0)], [5.5, 3.5], [4.5, 5.5]),
    ],
)
def test_sharing_by_hand(jobs, fair, fifo):
    assert arrivals(Channel(seconds_are_bytes), jobs) == fair
    assert arrivals(Channel(seconds_are_bytes, sharing="fifo"), jobs) == fifo


def test_an_outage_is_waited_out():
    def cost(time_s, num_bytes):
        seconds = math.inf if 1 <= time_s < 3 else num_bytes
        return CollectiveCost(seconds, 0.0, (num_bytes,))

    assert arrivals(Channel(cost, (1.0, 3.0)), [(0.0, 2.0)]) == [4.0]


def test_congestion_slows_the_remaining_bytes():
    def cost(time_s, num_bytes):
        return CollectiveCost(num_bytes * (4 if time_s >= 1 else 1), 0.0, (num_bytes,))

    # One of three bytes by 1 s, the others at a quarter of the rate.
    assert arrivals(Channel(cost, (1.0,)), [(0.0, 3.0)]) == [9.0]


def test_arrived_does_not_look_ahead():
    channel = Channel(seconds_are_bytes)
    first = channel.send(0.0, 2.0)
    assert not channel.arrived(first, 1.0)
    # Sent after the question, and still in time to slow the first down.
    channel.send(1.0, 2.0)
    assert not channel.arrived(first, 3.0)
    assert channel.arrived(first, 3.5)


def test_unknown_sharing_is_refused():
    with pytest.raises(ValueError, match="sharing='lifo' must be one of"):
        Channel(seconds_are_bytes, sharing="lifo")


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=8),
    st.sampled_from(["fair", "fifo"]),
)
def test_links_never_idle_while_there_is_work(jobs, sharing):
    """The last end is that of a server that is never idle, whatever the sharing."""
    jobs = sorted(jobs)
    free = 0.0
    for ready_s, size in jobs:
        free = max(free, ready_s) + size

    arrived = arrivals(Channel(seconds_are_bytes, sharing=sharing), jobs)
    assert max(arrived) == pytest.approx(free + 0.5)
    assert all(
        end >= ready_s + size + 0.5 - 1e-9
        for end, (ready_s, size) in zip(arrived, jobs, strict=True)
    )
