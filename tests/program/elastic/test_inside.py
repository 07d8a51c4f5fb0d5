"""A region of several processes: one of them has the link and informs the others."""

import concurrent.futures
import functools
import threading
import time

import pytest

from cocodc_jax.elastic import inside, objects
from cocodc_jax.elastic.link import (
    AskedToStopError,
    LeftBehindError,
    Link,
    SupersededError,
)
from cocodc_jax.elastic.messages import Snapshot
from tests.program.elastic import meeting


def at_once(act, things):
    """Return what `act` returns or raises for each thing, each in its own thread."""

    def do(thing):
        try:
            return act(thing)
        except (LeftBehindError, OSError, RuntimeError) as error:
            return error

    pool = concurrent.futures.ThreadPoolExecutor(len(things))
    try:
        return list(pool.map(do, things, timeout=60))
    finally:
        pool.shutdown(wait=False)


def meet(place, num, make_link=None):
    """Return the links of all processes of a region."""
    values = [None] * num
    barrier = threading.Barrier(num)

    def come(process):
        def gather(value):
            values[process] = value
            barrier.wait(30)
            return list(values)

        make = make_link or functools.partial(Link, place, "run", 1000)
        return inside.of_process(place, process, num, make, gather)

    return at_once(come, range(num))


@pytest.fixture(params=["sockets", "folder"])
def regions(request, tmp_path, monkeypatch):
    """A region of one process, and one of three."""
    monkeypatch.setattr(objects, "_STAY_S", 0.2)  # Closing a folder takes so long.
    via = tmp_path if request.param == "folder" else None
    places = meeting.places(2, via)
    links = [Link(places[0], "run", 1000)], meet(places[1], 3)
    yield links
    for link in (*links[0], *reversed(links[1])):
        link.__exit__(None, None, None)


def test_every_process_of_a_region_takes_the_same_decisions(regions):
    (single,), three = regions
    assert at_once(lambda link: link.join(30), [single, *three]) == [None] * 4

    views = [link.view for link in (single, *three)]
    assert all(set(view.seats) == {0, 1} for view in views)
    assert len({view.epoch for view in views}) == 1
    assert single.agree(3) == 3
    assert at_once(lambda link: link.agree(5 + three.index(link)), three) == [5, 5, 5]

    sent = single.send((0, 4), b"a")
    decisions = at_once(lambda link: link.send((0, 4), b"b").result(30), three)
    assert all(dict(decision.rows) == {0: b"a", 1: b"b"} for decision in decisions)
    assert dict(sent.result(30).rows) == {0: b"a", 1: b"b"}

    # A decision may arrive before it is expected, and is kept until it is applied.
    single.send((1, 6), b"c")
    three[0].send((1, 6), b"d").result(30)
    time.sleep(0.3)
    for link in three[1:]:
        assert dict(link.expect((1, 6)).result(30).rows) == {0: b"c", 1: b"d"}
        assert (0, 4) in link._futures

    assert at_once(lambda link: link.at(6), three) == [{}] * 3
    assert all(set(link._futures) == {(1, 6)} for link in three[1:])

    single.at(7)
    at_once(lambda link: link.finish(30), [single, *three])


def test_processes_of_a_region_are_admitted_and_left_behind_together(regions):
    (single,), three = regions
    at_once(lambda link: link.join(30), [single, *three])

    for link in reversed(three):
        link.__exit__(None, None, None)
    single.send((0, 4), b"a").result(30)

    place = three[0].place
    back = meet(place, 3)
    regions[1][:] = back

    copy = Snapshot(9, header={"x": [1, 2]}, arrays=(b"abc", b""))
    thread = threading.Thread(target=meeting.let_in, args=(single, copy))
    thread.start()

    assert at_once(lambda link: link.join(30), back) == [copy] * 3
    thread.join(30)
    back[0]._link._member.why_left = "made up"
    errors = at_once(lambda link: link.at(10), back)
    assert [str(error) for error in errors] == ["region 1: made up"] * 3
    assert all(isinstance(error, LeftBehindError) for error in errors)


def test_every_process_of_a_superseded_region_ends(regions):
    (single,), three = regions
    at_once(lambda link: link.join(30), [single, *three])
    three[0]._link._member.is_superseded = True
    errors = at_once(lambda link: link.at(5), three)
    assert [type(error) for error in errors] == [SupersededError] * 3


def test_processes_that_wait_for_one_that_ended_raise_its_error(regions):
    _, three = regions
    three[0].__exit__(OSError, OSError("disk full"), None)
    errors = at_once(lambda link: link.at(3), three[1:])
    assert all(isinstance(error, ConnectionError) for error in errors)
    assert {*map(str, errors)} == {"process 0 of region 1 has ended: disk full"}
    three.pop(0)


def test_a_process_raises_if_its_region_has_no_link():
    def taken():
        raise OSError("port 5 is taken")

    error, listener = meet(meeting.places(2)[1], 2, taken)
    assert isinstance(error, OSError)
    with listener, pytest.raises(ConnectionError, match="has ended: port 5 is taken"):
        listener.hears_others(0.1)


def test_processes_that_make_different_calls_are_refused(regions):
    _, three = regions
    three[0].hears_others(0.01)
    three[1].hears_others(0.01)
    three[1]._calls += 1
    three[0].hears_others(0.01)
    with pytest.raises(RuntimeError, match="call 3 got the answer to call 2"):
        three[1].hears_others(0.01)


def test_the_wait_for_processes_that_do_not_connect_is_bounded():
    ears = inside.Ears(*meeting.places(1))
    with pytest.raises(TimeoutError, match="2 processes of this region did not con"):
        ears.wait_for(2, 0.1, lambda: False)
    with pytest.raises(AskedToStopError, match="this region was asked to stop"):
        ears.wait_for(2, 60, lambda: True)
    ears.close()


def test_process_0_ends_the_waits_of_all_processes_of_a_region(regions):
    """Another region is frozen, and the others are asked to stop."""
    (single,), three = regions
    at_once(lambda link: link.join(30), [single, *three])
    three[0].should_stop = lambda: True
    begin_s = time.monotonic()
    ends = at_once(lambda link: link.wait_for(link.send((0, 4), b"b")), three)
    assert [dict(decision.rows) for decision in ends] == [{}] * 3
    assert time.monotonic() - begin_s < 2
    assert at_once(lambda link: link.at(5), three) == [{}] * 3


def test_every_process_stops_before_its_region_takes_part():
    processes = meet(meeting.places(2)[1], 2)
    processes[0].should_stop = lambda: True
    errors = at_once(lambda link: link.join(60), processes)
    assert [type(error) for error in errors] == [AskedToStopError] * 2
    for link in reversed(processes):
        link.__exit__(None, None, None)


def test_a_region_of_one_process_has_its_link():
    assert inside.of_process(None, 0, 1, lambda: "link", None) == "link"
