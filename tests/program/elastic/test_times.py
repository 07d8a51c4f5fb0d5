"""What messages took, whatever the clocks say."""

import math

from hypothesis import given
from hypothesis import strategies as st

from cocodc_jax.elastic.messages import Report
from cocodc_jax.elastic.times import Times

ME, OTHER = 0, (1, 7)
SYNC = (0, 10)


@given(st.floats(-1e6, 1e6), st.floats(0, 0.5), st.floats(0, 100))
def test_the_difference_of_clocks_is_no_time(apart, latency, seconds):
    """By hand: signs of life 0.2 s later than the shortest say nothing."""
    times = Times(ME, 2, wait_s=1)
    for sent, late in ((0.0, 0.2), (1.0, 0.0), (2.0, 0.1)):
        times.sign(OTHER, sent + apart, sent + latency + late)
    times.came(OTHER, SYNC, 3.0 + apart, 3.0 + latency + seconds)
    times.came(OTHER, SYNC, 3.0 + apart, 999.0)  # Again: the first time counts.
    times.decided(SYNC, [0, 1], 4.0)
    (report,) = times.due(4.0)
    ((sender, found),) = report.seconds
    assert sender == 1
    assert math.isclose(found, seconds, abs_tol=1e-6)


def test_what_never_comes_is_told_after_a_while():
    times = Times(ME, 3, wait_s=2)
    times.sign(OTHER, 0.0, 0.0)
    times.came(OTHER, SYNC, 1.0, 1.5)
    times.decided(SYNC, [0, 1, 2], 2.0)
    assert times.due(3.0) == []
    assert times.due(4.5) == [Report(SYNC, ((1, 0.5),), 0.0)]
    assert times.due(5.0) == []


def test_the_matrix_of_what_all_have_told():
    """By hand: 2's message came to 0 in 0.25 s and never to 1."""
    times = Times(ME, 3, wait_s=2)
    times.told(0, Report(SYNC, ((1, 0.5), (2, 0.25)), 1.0), 0.0)
    times.told(1, Report(SYNC, ((0, 0.75),), 0.0), 0.0)
    assert times.finished([0, 1, 2], 1.0) == []
    times.told(2, Report(SYNC, ((0, 2.0), (1, 3.0)), 4.0), 1.0)
    (found,) = times.finished([0, 1, 2], 1.0)
    nan, inf = math.nan, math.inf
    assert str(found.seconds) == str(
        [[nan, 0.75, 2.0], [0.5, nan, 3.0], [0.25, inf, nan]]
    )
    assert str(found.step_s) == str([1.0, nan, 4.0])
    times.told(2, Report(SYNC, (), 0.0), 2.0)  # What is done is done.
    assert times.finished([0, 1, 2], 99.0) == []


def test_who_is_silent_is_no_sender_and_no_receiver():
    times = Times(ME, 3, wait_s=2)
    times.told(0, Report(SYNC, ((1, 0.5),), 1.0), 0.0)
    times.told(1, Report(SYNC, ((0, 0.75),), 1.0), 0.0)
    assert times.finished([0, 1, 2], 4.0) == []
    (found,) = times.finished([0, 1, 2], 4.5)
    nan, inf = math.nan, math.inf
    assert str(found.seconds) == str(
        [[nan, 0.75, inf], [0.5, nan, inf], [inf, inf, nan]]
    )
