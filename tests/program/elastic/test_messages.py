"""Messages between regions as bytes, and their times, whatever the clocks.

Malformed messages are refused.
"""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax.elastic import messages as m
from cocodc_jax.elastic.times import Times

NINE = m.Epoch(9, 2, 7)
SIX = m.Epoch(6, 0, 5)
VIEW = m.View(NINE, {0: m.Seat(5, 0, (0, 5)), 2: m.Seat(7, 40, (0, 5))})
MARK = m.Mark((0, 4), 2**63 - 1, -0.5, 1.5)
DECISION = m.Decision(NINE, (1, 30), {0: b"abc", 2: b"defg"})
MESSAGES = [
    m.Join(12, ((1, 6),)),
    m.Join(0, (), ((0, 5), (2, 7))),
    m.Beat(VIEW, NINE, 30, ((0, 5), (2, 7)), 3.25, ((2, 8),), (MARK,)),
    m.Row(NINE, (0, 4), b"\0\1", 7.5),
    m.Choice(NINE, (0, 4), ((0, 5), (2, 7)), {2: b"x"}),
    m.Report((0, 4), ((0, 0.25),), 1.5),
    m.Want(NINE, (0, 4)),
    m.Want(NINE, (0, 4), (2,)),
    DECISION,
    m.Decision(m.NO_EPOCH, (0, 4), {}),
    m.Propose(VIEW, SIX, ((0, 1), (1, 2))),
    m.Promise(NINE, (), (DECISION, DECISION)),
    m.Install(VIEW, ()),
    m.Leave(),
    m.Snapshot(7, {"schedule": {"step": 7}}, (b"", b"xy")),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda x: type(x).__name__)
def test_messages_survive_packing_and_unpacking(message):
    letter = m.Letter("run", 2, 77, message)
    assert m.unpack(m.pack(letter), 3) == letter


@given(st.data())
@settings(max_examples=200)
def test_a_malformed_message_raises_only_wire_error(data):
    frames = m.pack(m.Letter("run", 1, 7, data.draw(st.sampled_from(MESSAGES))))
    header = json.loads(frames[0])
    odd = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x, max_size=2),
        max_leaves=4,
    )

    where = data.draw(st.sampled_from(["kind", "from", "run", "body", "field", "raw"]))
    if where == "raw":
        frames[0] = data.draw(st.binary(max_size=64))
    elif where == "field" and header["body"]:
        header["body"][data.draw(st.sampled_from(sorted(header["body"])))] = data.draw(
            odd
        )
    else:
        header[where] = data.draw(odd)

    if where != "raw":
        frames[0] = json.dumps(header).encode()
    try:
        letter = m.unpack(frames, 3)
    except m.WireError:
        return
    assert letter.sender < 3  # By chance it was one.


@pytest.mark.parametrize(
    "change",
    [
        lambda frames: frames[:-1],
        lambda frames: [*frames, b"more"],
        lambda frames: [],
        lambda frames: [b" " * (m.MAX_HEADER_BYTES + 1), *frames[1:]],
        lambda frames: [frames[0].replace(b'"rows": [[0, 0]', b'"rows": [[0, 1]')],
        lambda frames: [frames[0].replace(b"[2, 1]", b"[3, 1]"), *frames[1:]],
        lambda frames: [frames[0].replace(b'"from": [1', b'"from": [3'), *frames[1:]],
        lambda frames: [frames[0].replace(b'"epoch": [9', b'"epoch": [true')],
        lambda frames: [b"[" * 100000, *frames[1:]],
    ],
)
def test_missing_frames_and_unknown_regions_are_refused(change):
    frames = m.pack(m.Letter("run", 1, 7, DECISION))
    with pytest.raises(m.WireError, match="not a message of this protocol"):
        m.unpack(change(frames), 3)


# --- Times of messages ---

ME = 0
OTHER = (1, 7)
SYNC = (0, 10)


@given(st.floats(-1e6, 1e6), st.floats(0, 0.5), st.floats(0, 100))
def test_differences_of_clocks_do_not_count_as_time(apart, latency, seconds):
    """By hand: heartbeats 0.2 s later than the fastest one tell nothing."""
    times = Times(ME, 2, wait_s=1)
    for sent, late in ((0.0, 0.2), (1.0, 0.0), (2.0, 0.1)):
        times.sign(OTHER, sent + apart, sent + latency + late)
    times.came(OTHER, SYNC, 3.0 + apart, 3.0 + latency + seconds)
    times.came(OTHER, SYNC, 3.0 + apart, 999.0)  # Again: the first time counts.
    times.decided(SYNC, [0, 1], 4.0)
    (report,) = times.due(4.0)
    ((sender, measured),) = report.seconds

    assert sender == 1
    assert math.isclose(measured, seconds, abs_tol=1e-6)


def test_a_missing_message_is_reported_after_a_while():
    times = Times(ME, 3, wait_s=2)
    times.sign(OTHER, 0.0, 0.0)
    times.came(OTHER, SYNC, 1.0, 1.5)
    times.decided(SYNC, [0, 1, 2], 2.0)
    assert times.due(3.0) == []
    assert times.due(4.5) == [m.Report(SYNC, ((1, 0.5),), 0.0)]
    assert times.due(5.0) == []


def test_reports_of_all_regions_make_the_matrix_of_seconds():
    """By hand: 2's message came to 0 in 0.25 s and never to 1."""
    times = Times(ME, 3, wait_s=2)
    times.learn(0, m.Report(SYNC, ((1, 0.5), (2, 0.25)), 1.0), 0.0)
    times.learn(1, m.Report(SYNC, ((0, 0.75),), 0.0), 0.0)
    assert times.finished([0, 1, 2], 1.0) == []

    times.learn(2, m.Report(SYNC, ((0, 2.0), (1, 3.0)), 4.0), 1.0)
    (measured,) = times.finished([0, 1, 2], 1.0)
    nan = math.nan
    inf = math.inf
    assert str(measured.seconds) == str(
        [[nan, 0.75, 2.0], [0.5, nan, 3.0], [0.25, inf, nan]]
    )
    assert str(measured.step_s) == str([1.0, nan, 4.0])

    times.learn(2, m.Report(SYNC, (), 0.0), 2.0)  # A finished report is not repeated.
    assert times.finished([0, 1, 2], 99.0) == []


def test_a_silent_region_is_infinitely_late_as_sender_and_receiver():
    times = Times(ME, 3, wait_s=2)
    times.learn(0, m.Report(SYNC, ((1, 0.5),), 1.0), 0.0)
    times.learn(1, m.Report(SYNC, ((0, 0.75),), 1.0), 0.0)
    assert times.finished([0, 1, 2], 4.0) == []

    (measured,) = times.finished([0, 1, 2], 4.5)
    nan = math.nan
    inf = math.inf
    assert str(measured.seconds) == str(
        [[nan, 0.75, inf], [0.5, nan, inf], [inf, inf, nan]]
    )
