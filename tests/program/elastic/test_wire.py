"""What regions tell one another as bytes; what is no such thing is refused."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax.elastic import messages as m
from cocodc_jax.elastic import wire

VIEW = m.View(9, {0: m.Seat(5, 0), 2: m.Seat(7, 40)})
DECISION = m.Decision(9, (1, 30), {0: b"abc", 2: b"defg"})
MESSAGES = [
    m.Join(12, (1,)),
    m.Beat(VIEW, 12, 30, (0, 2), 3.25),
    m.Row(9, (0, 4), b"\0\1", 7.5),
    m.Choice(9, (0, 4), ((0, 5), (2, 7)), {2: b"x"}),
    m.Report((0, 4), ((0, 0.25),), 1.5),
    m.Want(9, (0, 4)),
    DECISION,
    m.Decision(9, (0, 4), {}),
    m.Propose(VIEW, 6, ((0, 1), (1, 2))),
    m.Promise(9, (), (DECISION, DECISION)),
    m.Install(VIEW, ()),
    m.Leave(),
    m.Snapshot(7, {"schedule": {"step": 7}}, (b"", b"xy")),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda x: type(x).__name__)
def test_there_and_back(message):
    letter = wire.Letter("run", 2, 77, message)
    assert wire.unpack(wire.pack(letter), 3) == letter


@given(st.data())
@settings(max_examples=200)
def test_anything_else_is_refused_and_nothing_else_happens(data):
    frames = wire.pack(wire.Letter("run", 1, 7, data.draw(st.sampled_from(MESSAGES))))
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
        letter = wire.unpack(frames, 3)
    except wire.WireError:
        return
    assert letter.sender < 3  # By chance it was one.


@pytest.mark.parametrize(
    "change",
    [
        lambda frames: frames[:-1],
        lambda frames: [*frames, b"more"],
        lambda frames: [],
        lambda frames: [b" " * (wire.MAX_HEADER_BYTES + 1), *frames[1:]],
        lambda frames: [frames[0].replace(b'"rows": [[0, 0]', b'"rows": [[0, 1]')],
        lambda frames: [frames[0].replace(b"[2, 1]", b"[3, 1]"), *frames[1:]],
        lambda frames: [frames[0].replace(b'"from": [1', b'"from": [3'), *frames[1:]],
        lambda frames: [frames[0].replace(b'"epoch": 9', b'"epoch": true')],
        lambda frames: [b"[" * 100000, *frames[1:]],
    ],
)
def test_frames_and_regions_that_are_not_there(change):
    frames = wire.pack(wire.Letter("run", 1, 7, DECISION))
    with pytest.raises(wire.WireError, match="not a message of this protocol"):
        wire.unpack(change(frames), 3)
