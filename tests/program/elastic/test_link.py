"""Real sockets: regions with the key take part; messages without it are ignored."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import socket
import threading
import time
import types

import pytest
import zmq

from cocodc_jax.elastic import messages, objects, place, sockets
from cocodc_jax.elastic.link import Arrived, AskedToStopError, LeftBehindError, Link
from cocodc_jax.elastic.messages import NO_EPOCH, Decision, Epoch, Row, Seat, Snapshot
from cocodc_jax.elastic.place import read_key
from tests.program.elastic import meeting
from tests.program.elastic.meeting import KEY, TIMING, join, let_in, mean
from tests.waiting import at_once

STOP_S = 2  # By then every wait of a region that is asked to stop has ended.


@pytest.fixture(params=["sockets", "folder"])
def places(request, tmp_path, monkeypatch):
    """Makes the places of some regions, which meet over each kind of channel."""
    if request.param == "sockets":
        return meeting.places
    monkeypatch.setattr(objects, "BUCKET_POLL_S", 0.02)
    monkeypatch.setattr(objects, "_STAY_S", 0.2)
    monkeypatch.setattr(place, "BUCKET_BEAT_S", 0)
    via = {"folder": tmp_path, "bucket": f"memory://bucket{tmp_path}"}[request.param]
    return functools.partial(meeting.places, via=via)


@pytest.mark.parametrize("places", ["sockets", "folder", "bucket"], indirect=True)
def test_two_regions_meet_average_and_part_and_one_comes_back(places):
    one, two = places(2)
    with Link(one, "run", 1000) as first:
        with Link(two, "run", 1000) as second:
            join(first, second)
            mean([first, second], 4)
            assert first.at(5) == {}

        # It has left, and no region waits for it.
        assert dict(first.send((0, 8), b"c").result(20).rows) == {0: b"c"}

        with Link(two, "run", 1000, is_announced=False) as second:
            assert second.hears_others(20)
            assert first.at(9) == {}
            second._member.announce(time.monotonic())
            copy = Snapshot(9, header={"x": 1}, arrays=(b"abc",))
            let_in(first, copy)
            assert second.join(30) == copy
            assert not second._snapshots
            mean([first, second], 12)


def test_a_life_that_returns_is_the_next_one_of_its_process():
    (place,) = meeting.places(1)
    with Link(place, "run", 1000) as first:
        boot = first.boot
    with Link(place, "run", 1000, last_boot=boot) as second:
        assert second.boot == boot + 1


def test_a_killed_region_is_left_out_and_its_next_life_joins(places):
    timing = dataclasses.replace(TIMING, dead_after_s=1)
    one, two = places(2, timing=timing)
    with Link(one, "run", 1000) as first:
        killed = Link(two, "run", 1000)
        join(first, killed)
        mean([first, killed], 4)
        killed._ended = True  # It sends no more, not even that it leaves.
        killed._thread.join()
        assert dict(first.send((0, 8), b"c").result(30).rows) == {0: b"c"}
        with Link(two, "run", 1000) as second:
            let_in(first, Snapshot(9, header={}, arrays=(b"abc",)))
            assert second.join(30).arrays == (b"abc",)
            mean([first, second], 12)


@pytest.mark.parametrize("kind", ["plain", "curve", "bytes"])
def test_messages_of_a_stranger_are_ignored(kind):
    """The stranger knows an address, and perhaps another key."""
    (place,) = meeting.places(1)
    letter = messages.pack(
        messages.Letter("run", 0, 2**40, Row(Epoch(1), (0, 1), b"x" * 100))
    )
    with Link(place, "run", 1000) as link:
        assert link.join(20) is None
        if kind == "bytes":
            host, _, port = place.addresses[0].rpartition(":")
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(os.urandom(1 << 16))
                time.sleep(0.3)
        else:
            with zmq.Context() as context, context.socket(zmq.PUSH) as out:
                out.linger = 0
                if kind == "curve":
                    out.curve_publickey, out.curve_secretkey = zmq.curve_keypair()
                    out.curve_serverkey = zmq.curve_keypair()[0]
                out.connect(f"tcp://{place.addresses[0]}")
                out.send_multipart(letter)
                time.sleep(0.5)

        assert link.strangers == 0  # It does not even count as a message.
        assert dict(link.send((0, 3), b"r").result(20).rows) == {0: b"r"}


def test_a_flood_of_strangers_is_bounded_and_members_stay(monkeypatch, capfd):
    monkeypatch.setattr(sockets, "_MAX_WAITING", 100)
    monkeypatch.setattr(sockets, "HANDSHAKE_MS", 2000)
    one, two = meeting.places(2)
    host, _, port = one.addresses[0].rpartition(":")

    connections = []
    with Link(one, "run", 1000) as first, Link(two, "run", 1000) as second:
        join(first, second)
        lost = second._channel._out[0].get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            for number in range(1000):
                connections.append(
                    socket.create_connection((host, int(port)), timeout=10)
                )
                connections[-1].sendall(b"\xff" + bytes(8))  # Of a greeting, no more.
                if number % 250 == 0:
                    mean([first, second], number + 4)

            assert len(first._channel._door._waiting) <= 2 * sockets._MAX_WAITING
            end = time.monotonic() + 4 * sockets.HANDSHAKE_MS / 1000
            for connection in connections:  # Waiting connections end after seconds.
                connection.settimeout(max(end - time.monotonic(), 0.01))
                with contextlib.suppress(ConnectionResetError):
                    while connection.recv(4096):  # ZeroMQ's greeting, then the end.
                        pass
            assert not lost.poll(0)
        finally:
            for connection in connections:
                connection.close()
            lost.close()
    assert "have not shown the key" in capfd.readouterr().err


def test_a_handshake_is_no_larger_than_a_piece_of_a_message():
    """Before the key is shown, a stranger gets no memory for a model's frame."""
    (place,) = meeting.places(1)
    host, _, port = place.addresses[0].rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\3\1" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with Link(place, "run", 1 << 26) as link:
        assert link.join(20) is None
        for size, is_open in ((sockets.PIECE_BYTES, True), (1 << 25, False)):
            with socket.create_connection((host, int(port)), timeout=3) as raw:
                raw.sendall(greeting + b"\6" + size.to_bytes(8, "big"))
                left = len(greeting)
                while left and (got := raw.recv(left)):
                    left -= len(got)
                raw.settimeout(1)
                try:
                    is_closed = raw.recv(1) == b""
                except TimeoutError:
                    is_closed = False
                except ConnectionResetError:
                    is_closed = True
                assert is_closed != is_open


def test_a_stranger_at_a_regions_address_gets_no_more_memory_than_one_that_connects(
    monkeypatch,
):
    monkeypatch.setattr(sockets, "_GIVE_UP_S", 60)  # It opens no second connection.
    greeting = b"\xff" + bytes(8) + b"\x7f\3\1" + b"CURVE".ljust(20, b"\0")
    greeting += b"\1" + bytes(31)  # It listens.
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(5)
        (one,) = meeting.places(1)
        there = f"127.0.0.1:{stranger.getsockname()[1]}"
        place = dataclasses.replace(one, addresses=(one.addresses[0], there))
        with Link(place, "run", 1 << 26):
            for size, is_open in ((sockets.PIECE_BYTES, True), (1 << 25, False)):
                raw, _ = stranger.accept()
                with raw:
                    raw.sendall(greeting + b"\6" + size.to_bytes(8, "big"))
                    raw.settimeout(1)
                    try:
                        while raw.recv(1 << 12):  # Its greeting, and what follows.
                            pass
                        is_closed = True
                    except TimeoutError:
                        is_closed = False
                    except ConnectionResetError:
                        is_closed = True
                    assert is_closed != is_open


@pytest.mark.parametrize(
    "pieces",
    [
        [b"1"],
        sockets.cut([b"ab"])[:-1],
        [*sockets.cut([b"ab"]), b"c"],
        [*sockets.cut([b"ab"])[:-1], b"c"],
        sockets.cut([b"abcd"]),
        [b"\xff" * 4, b"", b""],
    ],
)
def test_invalid_pieces_of_messages_are_refused(pieces):
    with pytest.raises(ValueError, match=r"bytes|long"):
        sockets.joined([bytes(piece) for piece in pieces], 3)


def test_a_frame_that_is_too_large_never_arrives():
    one, two = meeting.places(2)
    with Link(one, "run", 1000) as first, Link(two, "run", 1000) as second:
        join(first, second)
        too_large = bytes(messages.MAX_HEADER_BYTES + 100)
        second.let_in(0, 0, Snapshot(3, header={}, arrays=(too_large,)), 0)
        mean([first, second], 4)  # What follows arrives.
        assert not first._snapshots


def test_the_largest_row_that_can_be_right_arrives(places):
    size = messages.MAX_HEADER_BYTES + 1000
    one, two = places(2)
    with Link(one, "run", size) as first, Link(two, "run", size) as second:
        join(first, second)
        mean([first, second], 4, [os.urandom(size)] * 2)


def test_a_copy_is_of_the_life_that_admitted_a_region_or_it_waits():
    """Parts of a cut network both admit it at step 9; of the third no copy came."""
    (place, *_) = meeting.places(4)
    with Link(place, "run", 1000, is_announced=False) as link:
        for sender in (1, 2):
            letter = messages.Letter(
                "run", sender, 5, Snapshot(9, header={"of": sender}, arrays=())
            )
            link._take(Arrived(messages.pack(letter)), 0.0)
        for source in (1, 2):
            copy = link._copy(Seat(link.boot, 9, (source, 5)))
            assert copy.header == {"of": source}
        for source, step in (((3, 5), 9), ((1, 4), 9), ((1, 5), 8)):
            assert link._copy(Seat(link.boot, step, source)) is None


@pytest.mark.parametrize(
    "wait",
    [
        lambda link: link.hears_others(60),
        lambda link: link.wait_for_step(5, 60),
        lambda link: link.finish(60),
        lambda link: link.join(60),
    ],
)
def test_every_wait_ends_when_the_region_is_asked_to_stop(wait):
    (place, _) = meeting.places(2)
    with Link(place, "run", 1000) as link:
        waits = concurrent.futures.Future()
        is_asked = threading.Event()
        link.should_stop = is_asked.is_set
        link._member.is_needed = lambda now: True
        link._member.others_step = lambda now: 1

        def serve():
            try:
                waits.set_result(wait(link))
            except AskedToStopError as error:
                waits.set_result(str(error))

        threading.Thread(target=serve, daemon=True).start()
        time.sleep(0.3)
        assert not waits.done()
        is_asked.set()
        ends = (False, 1, None, "region 0 was asked to stop")
        assert waits.result(STOP_S) in ends


def test_a_region_that_was_asked_to_stop_does_not_ask_to_join():
    (place, _) = meeting.places(2)
    with Link(place, "run", 1000, is_announced=False) as link:
        link.should_stop = lambda: True
        with pytest.raises(AskedToStopError):
            link.join(60)
        assert not link._member.is_announced


def test_a_wait_for_a_mean_ends_when_the_region_is_asked_to_stop(places, capfd):
    """The other region is frozen: it counts as alive for a minute."""
    one, two = places(2)
    is_asked = threading.Event()
    with Link(one, "run", 1000) as first, Link(two, "run", 1000) as second:
        join(first, second)
        first.should_stop = is_asked.is_set
        late = threading.Timer(0.2, second.send, [(0, 4), b"b"])
        late.start()
        is_asked.set()  # Messages in flight still arrive.

        assert len(first.wait_for(first.send((0, 4), b"a")).rows) == 2
        is_asked.clear()
        threading.Timer(0.3, is_asked.set).start()
        begin_s = time.monotonic()
        with at_once(20):
            decision = first.wait_for(first.send((0, 8), b"c"))
        assert decision == Decision(NO_EPOCH, (0, 8), {})
        assert 0.3 < time.monotonic() - begin_s < STOP_S
        assert first.at(9) == {}  # It ends, and was not left behind.
        # It announced that it leaves.
        assert dict(second.send((0, 12), b"d").result(20).rows) == {1: b"d"}

    message = "asked to stop: region 0 waits for no further messages"
    assert capfd.readouterr().err.count(message) == 1


def test_regions_of_another_run_are_refused(places):
    one, two = places(2)
    with Link(one, "run", 1000) as first, Link(two, "other", 1000) as second:
        for link in (first, second):
            with pytest.raises(RuntimeError, match="of another run .*differ"):
                link.join(30)


@pytest.mark.parametrize("hears", [True, False])
def test_a_region_that_hears_only_another_run_gives_up(hears):
    member = types.SimpleNamespace(
        outbox=[], why_left="", is_in=False, hears_others=lambda: hears
    )
    at = types.SimpleNamespace(timing=TIMING)
    link = types.SimpleNamespace(_member=member, _answered_s=0.0, place=at)
    Link._meet_another_run(link, 2, 60.0)
    assert bool(member.why_left) != hears


def test_a_region_that_was_left_behind_learns_it_at_the_end_of_a_turn(places):
    (place,) = places(1)
    with Link(place, "run", 1000) as link:
        assert link.join(20) is None
        link._member.why_left = "made up"
        assert link.send((0, 3), b"r").result(20) == Decision(NO_EPOCH, (0, 3), {})
        with pytest.raises(LeftBehindError, match="region 0: made up"):
            link.at(3)


def test_joining_times_out_if_no_region_answers(places):
    one, _ = places(2)
    with Link(one, "run", 1000) as link, pytest.raises(TimeoutError, match="region 0"):
        link.join(0.5)


def test_an_admitted_region_whose_copy_is_lost_gives_up(places):
    timing = dataclasses.replace(TIMING, dead_after_s=1, start_s=2)
    one, two = places(2, timing=timing)
    with Link(one, "run", 1000) as first:
        assert first.join(30) is None
        with Link(two, "run", 1000) as second:
            too_large = bytes(messages.MAX_HEADER_BYTES + 100)
            let_in(first, Snapshot(9, header={}, arrays=(too_large,)))
            with pytest.raises(TimeoutError, match=r"within \d s: it was lost"):
                second.join(30)
        assert dict(first.send((0, 12), b"c").result(20).rows) == {0: b"c"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_link_that_breaks_leaves_its_port(places):
    def fail(silences):
        raise OSError("disk full")

    (place,) = places(1)
    watch = types.SimpleNamespace(silent=fail)
    with Link(place, "run", 1000, watch=watch) as link:
        with pytest.raises(LeftBehindError, match="its link broke.*disk full"):
            link.join(30)
    with Link(place, "run", 1000) as link:
        assert link.join(30) is None


def test_a_port_that_is_taken_is_named():
    (place,) = meeting.places(1)
    with Link(place, "run", 10), pytest.raises(OSError, match="cannot listen"):
        Link(place, "run", 10)


def test_a_key_that_others_may_read_is_refused(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(0o644)
    with pytest.raises(ValueError, match="can be read by others; run chmod 600"):
        read_key(path)
    path.chmod(0o600)
    assert read_key(path) == KEY


def test_a_missing_key_is_named(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_key(tmp_path / "none")


def test_a_region_that_saves_before_it_stops_is_not_waited_for(places):
    one, two = places(2)
    with Link(one, "run", 1000) as first, Link(two, "run", 1000, step=0) as second:
        join(first, second)
        mean([first, second], 4)
        second.leave()  # It runs, but sends no more.
        assert dict(first.send((0, 8), b"c").result(20).rows) == {0: b"c"}


def test_a_region_that_waits_for_min_regions_can_be_asked_to_stop(places):
    one, two = places(2, min_regions=2)
    asked = []
    with Link(one, "run", 1000) as first, Link(two, "run", 1000) as second:
        join(first, second)
        first.should_stop = lambda: bool(asked)
        second.leave()
        waits = first.send((0, 8), b"c")
        time.sleep(0.3)
        assert not waits.done()
        asked.append(True)
        assert waits.result(20) == Decision(NO_EPOCH, (0, 8), {})
        assert first.at(9) == {}  # It ends, and was not left behind.


def test_a_region_that_is_ahead_waits_until_the_others_reach_its_step(places):
    one, two = places(2, timing=dataclasses.replace(TIMING, start_s=0))
    with Link(one, "run", 1000) as first:
        first.join(30)
        with Link(two, "run", 1000, step=7, is_announced=False) as second:
            assert second.hears_others(20)
            first.at(6)
            assert second.wait_for_step(7, 0.3) == 6
            first.at(7)
            assert second.wait_for_step(7, 20) == 7


def test_a_region_that_has_finished_waits_for_the_others(places):
    one, two = places(2)
    with Link(one, "run", 1000) as first, Link(two, "run", 1000) as second:
        join(first, second)
        mean([first, second], 4)
        first.at(4)
        began = time.monotonic()
        first.finish(0.4)  # The second has not reported it as applied.
        assert time.monotonic() - began > 0.39
        second.at(5)
        first.finish(30)
        second.finish(30)
        assert time.monotonic() - began < 10
