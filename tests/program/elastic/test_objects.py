"""Messages through a store: signed, written once, read by all, removed."""

import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax._extras import MissingExtraError
from cocodc_jax.elastic import objects, stores
from cocodc_jax.elastic.link import Link
from cocodc_jax.elastic.objects import Objects, RefusedError, opened, seal, unseal
from cocodc_jax.elastic.place import Place, Timing
from tests.program.elastic.meeting import KEY, TIMING, join, mean, places
from tests.waiting import wait_until

NAME = "001-0000-0000-1"
FRAMES = st.lists(st.binary(max_size=40), min_size=1, max_size=5)


def signed(start):
    """The name of an object that only a member can make."""
    return f"{start}-{objects.tag(objects.key_of(KEY), start)}"


def received(channel, seconds=20):
    """The frames of the messages that arrive."""
    return [message.frames for message in channel.receive(seconds)]


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(objects, "_STAY_S", 0.2)


@given(FRAMES)
@settings(max_examples=50, deadline=None)
def test_an_object_is_read_as_it_was_signed(frames):
    sealed = seal(KEY, NAME, frames)

    assert opened(NAME, sealed, *unseal(KEY, NAME, sealed, 40)) == frames


@given(FRAMES, st.data())
@settings(max_examples=50, deadline=None)
def test_an_object_with_another_bit_is_refused(frames, data):
    damaged = bytearray(seal(KEY, NAME, frames))
    at = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[at // 8] ^= 1 << at % 8

    with pytest.raises(RefusedError, match=NAME):
        opened(NAME, bytes(damaged), *unseal(KEY, NAME, bytes(damaged), 40))


@given(FRAMES, st.data())
@settings(max_examples=50, deadline=None)
def test_an_object_that_was_cut_is_refused(frames, data):
    sealed = seal(KEY, NAME, frames)
    cut = sealed[: data.draw(st.integers(0, len(sealed) - 1))]

    with pytest.raises(RefusedError, match=NAME):
        opened(NAME, cut, *unseal(KEY, NAME, cut, 40))


@pytest.mark.parametrize(
    ("key", "name"), [(KEY, NAME.replace("1", "2")), (b"q" * 32, NAME)]
)
def test_an_object_of_another_name_or_key_is_refused(key, name):
    sealed = seal(KEY, NAME, [b"header", b"row"])

    with pytest.raises(RefusedError, match=name):
        opened(name, sealed, *unseal(key, name, sealed, 40))


def test_only_the_head_of_an_object_that_is_too_long_is_read():
    sealed = seal(KEY, NAME, [b"header", b"x" * 1000])
    assert unseal(KEY, NAME, sealed[:100], 1000)[0] == (6, 1000)
    with pytest.raises(RefusedError, match="a frame of 1000 bytes, more than 999"):
        unseal(KEY, NAME, sealed[:100], 999)


def test_a_large_message_is_one_object_for_all(tmp_path):
    rows = [os.urandom(objects._FIRST_BYTES + 100) for _ in range(3)]
    channels = [Objects(place, 1, 1 << 20) for place in places(3, tmp_path)]
    channels[0].send([1, 2], [b"a", rows[0]])
    channels[1].send([2], [b"b", rows[1], b""])

    arrived = [[], [], []]

    def all_there():
        for region, channel in enumerate(channels):
            arrived[region] += received(channel, 0.01)
        return len(arrived[1]) == 1 and len(arrived[2]) == 2

    wait_until(all_there)
    assert arrived[:2] == [[], [[b"a", rows[0]]]]
    assert sorted(arrived[2]) == [[b"a", rows[0]], [b"b", rows[1], b""]]
    assert len(list(tmp_path.iterdir())) == 2

    for channel in channels:
        channel.close()
    assert not list(tmp_path.iterdir())


def test_objects_without_a_valid_signature_are_ignored_and_reported_once(
    tmp_path, capfd
):
    first, second = places(2, tmp_path)
    with Link(first, "run", 1000) as one, Link(second, "run", 1000) as two:
        join(one, two)

        written = max(tmp_path.glob("001-*-1-*"))
        for number in range(20):
            # As if a stranger had replaced objects of a member.
            name = signed(f"001-{two.boot:020}-{10**9 + number}-1")
            (tmp_path / name).write_bytes(os.urandom(number * 20))

        # The signature does not hold under another name.
        other = signed(f"001-{two.boot:020}-{10**10}-1")
        (tmp_path / other).write_bytes(written.read_bytes())
        (tmp_path / "1-2-3-nothing of ours").mkdir()

        mean([one, two], 4)
        message = "is not signed with the key of this run"
        errors = []

        def is_reported():
            errors.append(capfd.readouterr().err)
            return message in "".join(errors)

        wait_until(is_reported)
        assert "".join(errors).count(message) == 1
        assert one.strangers == 0


def test_a_store_that_fails_now_and_then_is_asked_again(tmp_path, capfd):
    calls = itertools.count(1)

    class Failing:
        def __getattr__(self, name):
            if next(calls) % 10 == 0:
                raise RuntimeError("503 try later")
            return getattr(store, name)

    first, second = places(2, tmp_path)
    with Link(first, "run", 1000) as one, Link(second, "run", 1000) as two:
        join(one, two)
        store = one._channel._store
        one._channel._store = Failing()
        for step in range(4, 12):
            mean([one, two], step)
    assert "503 try later" in capfd.readouterr().err


def test_the_part_of_a_failed_write_is_removed(tmp_path, monkeypatch):
    one, _ = (Objects(place, 1, 1000) for place in places(2, tmp_path))
    failed = mock.Mock(side_effect=OSError("no space"))
    monkeypatch.setattr(stores.os, "replace", failed)
    one.send([1], [b"a"])
    wait_until(lambda: failed.called and not [*tmp_path.iterdir()])


def test_a_failed_read_is_repeated(tmp_path, capfd):
    one, two = (Objects(place, 1, 1 << 20) for place in places(2, tmp_path))
    read = two._store.read
    failed = set()

    def reads_twice(name, start, end):
        if (name, start) not in failed:
            failed.add((name, start))
            raise OSError("503 try later")
        return read(name, start, end)

    two._store.read = reads_twice
    row = os.urandom(objects._FIRST_BYTES + 100)
    one.send([1], [b"a", row])
    assert received(two) == [[b"a", row]]
    assert len(failed) == 2

    for channel in (one, two):
        channel.close()
    assert "503 try later" in capfd.readouterr().err


def test_pipes_links_and_sockets_in_a_store_are_ignored(tmp_path, capfd):
    """Six pipes were enough to block every reader, so that no object was read."""
    first, second = places(2, tmp_path)
    with Link(first, "run", 1000) as one, Link(second, "run", 1000) as two:
        join(one, two)
        written = max(tmp_path.glob("001-*-1-*"))
        (tmp_path / "copy").write_bytes(written.read_bytes())

        path = tmp_path / "socket"
        with socket.socket(socket.AF_UNIX) as strange:
            strange.bind(str(path))

        for number in range(30):
            name = tmp_path / signed(f"001-{two.boot:020}-{10**9 + number}-1")
            if number < 12:
                os.mkfifo(name)
            elif number < 18:
                name.symlink_to("/dev/zero" if number % 2 else written)
            elif number < 24:
                name.mkdir()
            else:
                os.link(path, name)

        for step in range(4, 8):
            mean([one, two], step)

        errors = []

        def is_reported():
            errors.append(capfd.readouterr().err)
            return any(errors)

        wait_until(is_reported)
        assert "is not a regular file" in "".join(errors)
        assert one.strangers == 0


def test_a_link_to_a_file_is_not_followed(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    store = stores.Folder(str(tmp_path))
    assert store.read("file", 1, 9) == b"bc"
    with pytest.raises(RefusedError, match="link is not a regular file"):
        store.read("link", 0, 9)


def test_names_that_no_member_made_are_not_opened(tmp_path, monkeypatch):
    opened = []
    read = stores.Folder.read

    def noting(store, name, start, end):
        opened.append(name)
        return read(store, name, start, end)

    monkeypatch.setattr(stores.Folder, "read", noting)
    first, second = places(2, tmp_path)
    with Link(first, "run", 1000) as one, Link(second, "run", 1000) as two:
        join(one, two)

        strange = [f"001-{two.boot:020}-{10**9 + n:010}-1-{n:016x}" for n in range(500)]
        for name in [*strange, *(f"strange {n}" for n in range(500))]:
            (tmp_path / name).write_bytes(b"")

        mean([one, two], 4)
        wait_until(lambda: set(strange) <= one._channel._seen)
        mean([one, two], 8)

    assert opened
    assert not {*opened} & {*strange}


def test_a_store_that_is_slow_to_list_is_listed_a_tenth_of_the_time(tmp_path):
    """As if it were full of unknown names."""
    (channel,) = (Objects(place, 1, 1000) for place in places(1, tmp_path))
    list_all = channel._store.list
    looks = []

    def slow():
        looks.append(time.monotonic())
        time.sleep(0.05)
        return list_all()

    channel._store.list = slow
    wait_until(lambda: len(looks) > 3)
    assert looks[3] - looks[1] > 2 * 0.4
    channel.close()


def test_reads_that_hang_do_not_delay_other_reads(tmp_path, capfd):
    """As on a dead network file system: more reads hang than there are threads."""
    timing = Timing(beat_s=0.05, dead_after_s=0.2)
    one, two = (Objects(x, 1, 1 << 20) for x in places(2, tmp_path, timing=timing))
    two._hangs_s = 0.3
    read = two._store.read
    ends = threading.Event()
    hung = set()

    def hang(name, start, end):
        if len(hung) < 10:
            hung.add(name)
            ends.wait(60)
        return read(name, start, end)

    two._store.read = hang
    for number in range(10):
        one.send([1], [b"%d" % number])
    wait_until(lambda: len(hung) == 10)

    one.send([1], [b"last"])
    assert received(two) == [[b"last"]]
    assert two._small._num_lost
    ends.set()
    wait_until(lambda: not two._small._num_lost)

    # One hangs while the store is listed: other looks follow.
    ends.clear()
    list_all = two._store.list
    looks = []

    def hang_once():
        looks.append(len(looks))
        if len(looks) == 1:
            ends.wait(60)
        return list_all()

    two._store.list = hang_once
    wait_until(lambda: len(looks) > 2)
    ends.set()

    for channel in (one, two):
        channel.close()
    assert "hang and are given up" in capfd.readouterr().err


def test_a_lane_begins_no_call_once_too_many_hang():
    lane = stores.Lane(2)
    ends = threading.Event()
    for _ in range(stores.MOST_LOST + 4):
        lane.submit(lambda: ends.wait(60), 0.0)

    def is_stuck():
        lane.give_up_hung()
        return lane.is_stuck

    wait_until(is_stuck)
    late = lane.submit(lambda: None, 0.0)
    time.sleep(0.05)
    assert lane.give_up_hung() == 0
    assert not late.done.is_set()

    ends.set()
    assert stores.wait_for([late], time.monotonic() + 20)
    lane.close()


# The process ends with the last line, although a call never returns.
HANGING = """
import sys, threading
from cocodc_jax.elastic import objects
from tests.program.elastic.meeting import places

objects._FAREWELL_S = objects._STAY_S = 0.2
channel = objects.Objects(places(2, sys.argv[1])[0], 1, 1000)
channel._store.write = lambda name, data: threading.Event().wait()
channel._store.list = lambda: threading.Event().wait()
channel.send([1], [b"a"])
channel.close()
print("the end", flush=True)
"""


def test_a_call_that_never_returns_does_not_keep_a_process_alive(tmp_path):
    command = [sys.executable, "-c", HANGING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr


def test_old_objects_are_removed_by_their_writer_and_never_read(tmp_path):
    def names(region):
        return {x.name for x in tmp_path.iterdir() if x.name.startswith(f"00{region}")}

    for name in (signed("000-1-8-2"), f".{signed('000-1-9-2')}"):
        (tmp_path / name).write_bytes(seal(KEY, name, [b"of a life that was killed"]))
    other = Objects(places(2, tmp_path)[1], 1, 1000)
    timing = Timing(beat_s=0.05, dead_after_s=0.1)
    later = Objects(places(2, tmp_path, timing=timing)[0], 2, 1000)
    wait_until(lambda: not names(0) and not list(tmp_path.glob(".*")))

    later.send([1], [b"new"])
    assert received(other) == [[b"new"]]
    assert len(names(0)) == 1

    time.sleep(0.4)
    later.send([1], [b"newer"])
    assert received(other) == [[b"newer"]]
    wait_until(lambda: len(names(0)) == 1)

    later.close()
    other.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"region": 2}, "region_id=2 must be 0 to 1, as regions is 2"),
        ({"addresses": ("a:1", "b:1")}, "via='/x' needs no region_addresses='a:1,b:1'"),
        (
            {"via": "gs://a/b"},
            "beat_s=0.05 is too short for via='gs://a/b'.* use beat_s=2",
        ),
    ],
)
def test_invalid_places_are_refused_in_one_line(fields, message):
    fields = {"region": 0, "addresses": (), "via": "/x", "regions": 2} | fields
    with pytest.raises(ValueError, match=message):
        Place(**fields, key=KEY, timing=TIMING)


def test_a_store_that_cannot_be_reached_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"via='.*file' cannot be reached: .*exists"):
        objects.reach(f"{tmp_path}/file")
    with pytest.raises(ValueError, match="via='ftq://x' cannot be reached"):
        objects.reach("ftq://x")


def test_a_store_whose_package_is_missing_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingExtraError, match=r"s3fs is not .*cocodc_jax\[s3\]'"):
        objects.reach("s3://bucket/run")


def test_a_new_region_refuses_a_store_that_it_cannot_reach(tmp_path):
    (tmp_path / "file").touch()
    one, _ = places(2, via=tmp_path / "file")
    with pytest.raises(ValueError, match=r"via='.*file' cannot be reached: .*exists"):
        Link(one, "run", 1000)
    # A restarted region goes on: the store may return soon.
    with Link(one, "run", 1000, is_announced=False, last_boot=1) as link:
        assert not link.hears_others(0.1)
