"""Messages through a store: signed, written once, read by all, removed."""

import itertools
import os
import sys
import time
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax._extras import MissingExtraError
from cocodc_jax.elastic import objects
from cocodc_jax.elastic.link import Link
from cocodc_jax.elastic.objects import Objects, RefusedError, opened, seal, unseal
from cocodc_jax.elastic.place import Place, Timing
from tests.program.elastic.meeting import KEY, TIMING, join, mean, places
from tests.waiting import wait_until

NAME = "001-0000-0000-1"


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(objects, "_STAY_S", 0.2)


@given(frames=st.lists(st.binary(max_size=40), min_size=1, max_size=5), data=st.data())
@settings(max_examples=50, deadline=None)
def test_an_object_is_read_as_it_was_signed_and_not_at_all_otherwise(frames, data):
    sealed = seal(KEY, NAME, frames)
    lengths, start = unseal(KEY, NAME, sealed, 40)
    assert opened(NAME, sealed, lengths, start) == frames
    at = data.draw(st.integers(0, 8 * len(sealed) - 1))
    other = bytearray(sealed)
    other[at // 8] ^= 1 << at % 8
    cut = sealed[: data.draw(st.integers(0, len(sealed) - 1))]
    for key, name, damaged in (
        (KEY, NAME, bytes(other)),
        (KEY, NAME, cut),
        (KEY, NAME.replace("1", "2"), sealed),
        (b"q" * 32, NAME, sealed),
    ):
        with pytest.raises(RefusedError, match=name):
            opened(name, damaged, *unseal(key, name, damaged, 40))


def test_no_more_than_the_head_is_read_of_what_is_too_long():
    sealed = seal(KEY, NAME, [b"header", b"x" * 1000])
    assert unseal(KEY, NAME, sealed[:100], 1000)[0] == (6, 1000)
    with pytest.raises(RefusedError, match="a frame of 1000 bytes, more than 999"):
        unseal(KEY, NAME, sealed[:100], 999)


def test_a_large_message_is_one_object_for_all(tmp_path):
    rows = [os.urandom(objects._FIRST_BYTES + 100) for _ in range(3)]
    channels = [Objects(each, 1, 1 << 20) for each in places(3, tmp_path)]
    channels[0].send([1, 2], [b"a", rows[0]])
    channels[1].send([2], [b"b", rows[1], b""])
    found = [[], [], []]

    def all_there():
        for region, channel in enumerate(channels):
            found[region] += channel.receive(0.01)
        return len(found[1]) == 1 and len(found[2]) == 2

    wait_until(all_there)
    assert found[:2] == [[], [[b"a", rows[0]]]]
    assert sorted(found[2]) == [[b"a", rows[0]], [b"b", rows[1], b""]]
    assert len(list(tmp_path.iterdir())) == 2
    for channel in channels:
        channel.close()
    assert not list(tmp_path.iterdir())


def test_who_has_not_the_key_is_not_heard_and_said_once(tmp_path, capfd):
    first, second = places(2, tmp_path)
    with Link(first, "run", 1000) as one, Link(second, "run", 1000) as two:
        join(one, two)
        written = max(tmp_path.glob("001-*-1"))
        for number in range(20):
            name = f"001-{two.boot:020}-{10**9 + number}-1"
            (tmp_path / name).write_bytes(os.urandom(number * 20))
        # Under another name it is not what was signed.
        (tmp_path / f"{name}1").write_bytes(written.read_bytes())
        (tmp_path / "1-2-3-nothing of ours").mkdir()
        mean([one, two], 4)
        said, errors = "is not signed with the key of this run", []

        def is_said():
            errors.append(capfd.readouterr().err)
            return said in "".join(errors)

        wait_until(is_said)
        assert "".join(errors).count(said) == 1
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
        store, one._channel._store = one._channel._store, Failing()
        for step in range(4, 12):
            mean([one, two], step)
    assert "503 try later" in capfd.readouterr().err


def test_what_fitted_of_a_write_that_failed_is_removed(tmp_path, monkeypatch):
    one, _ = (Objects(each, 1, 1000) for each in places(2, tmp_path))
    failed = mock.Mock(side_effect=OSError("no space"))
    monkeypatch.setattr(type(one._store), "mv", failed)
    one.send([1], [b"a"])
    wait_until(lambda: failed.called and not [*tmp_path.iterdir()])


def test_what_could_not_be_read_is_read_again(tmp_path, capfd):
    one, two = (Objects(each, 1, 1 << 20) for each in places(2, tmp_path))
    read, failed = two._read, set()

    def reads_twice(name, start, end):
        if (name, start) not in failed:
            failed.add((name, start))
            raise OSError("503 try later")
        return read(name, start, end)

    two._read = reads_twice
    row = os.urandom(objects._FIRST_BYTES + 100)
    one.send([1], [b"a", row])
    assert two.receive(20) == [[b"a", row]]
    assert len(failed) == 2
    for channel in (one, two):
        channel.close()
    assert "503 try later" in capfd.readouterr().err


def test_what_is_old_is_removed_by_its_writer_and_read_by_nobody(tmp_path):
    def names(region):
        return {x.name for x in tmp_path.iterdir() if x.name.startswith(f"00{region}")}

    for name in ("000-1-8-2", ".000-1-9-2"):
        (tmp_path / name).write_bytes(seal(KEY, name, [b"of a life that was killed"]))
    other = Objects(places(2, tmp_path)[1], 1, 1000)
    timing = Timing(beat_s=0.05, dead_after_s=0.1)
    later = Objects(places(2, tmp_path, timing=timing)[0], 2, 1000)
    wait_until(lambda: not names(0))
    assert not list(tmp_path.glob(".*"))
    later.send([1], [b"new"])
    assert other.receive(20) == [[b"new"]]
    assert len(names(0)) == 1
    time.sleep(0.4)
    later.send([1], [b"newer"])
    assert other.receive(20) == [[b"newer"]]
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
def test_what_cannot_be_is_refused_in_a_line(fields, message):
    fields = {"region": 0, "addresses": (), "via": "/x", "regions": 2} | fields
    with pytest.raises(ValueError, match=message):
        Place(**fields, key=KEY, timing=TIMING)


def test_a_store_that_cannot_be_reached_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"via='.*file' cannot be reached: .*exists"):
        objects.reach(f"{tmp_path}/file")
    with pytest.raises(ValueError, match="via='ftq://x' cannot be reached"):
        objects.reach("ftq://x")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingExtraError, match=r"s3fs is not .*cocodc_jax\[s3\]'"):
        objects.reach("s3://bucket/run")
