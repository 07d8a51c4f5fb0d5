"""The stall meter: what it counts, and that no array can hang or silence it."""

import threading
import time

import jax.numpy as jnp
import pytest

from cocodc_jax.runtime.stall import StallMeter


class Arriving:
    """Becomes ready when its gate opens, as an array of a busy device does."""

    def __init__(self, *, is_ready=False):
        self.gate = threading.Event()
        if is_ready:
            self.gate.set()

    def block_until_ready(self):
        assert self.gate.wait(timeout=30)


def start_meter():
    before = set(threading.enumerate())
    stall = StallMeter()
    (thread,) = set(threading.enumerate()) - before
    return stall, thread


def test_the_wait_from_the_steps_to_the_arrival_is_counted():
    steps, arrival = Arriving(), Arriving()
    with StallMeter() as stall:
        stall.watch(steps, arrival)
        time.sleep(0.05)  # Inner steps still run: no stall.
        steps.gate.set()
        begin = time.perf_counter()
        time.sleep(0.2)
        arrival.gate.set()
        longest = time.perf_counter() - begin
    # The meter wakes up some time after each gate; this machine may be busy.
    assert 0.1 < stall.seconds < longest + 1


def test_an_early_arrival_is_no_stall():
    steps = Arriving()
    with StallMeter() as stall:
        stall.watch(steps, Arriving(is_ready=True))
        time.sleep(0.2)
        steps.gate.set()
    assert stall.seconds < 0.1


def test_waits_add_up():
    with StallMeter() as stall:
        for _ in range(3):
            arrival = Arriving()
            threading.Timer(0.1, arrival.gate.set).start()
            stall.watch(Arriving(is_ready=True), arrival)
            arrival.gate.wait()
    assert stall.seconds > 0.2


def test_watching_does_not_wait():
    arrival = Arriving()
    stall = StallMeter()
    begin = time.perf_counter()
    stall.watch(Arriving(is_ready=True), arrival)
    assert time.perf_counter() - begin < 5
    assert not arrival.gate.is_set()
    arrival.gate.set()
    stall.close()


def test_closing_waits_for_what_is_watched_and_ends_the_thread():
    arrival = Arriving()
    stall, thread = start_meter()
    stall.watch(Arriving(is_ready=True), arrival)
    threading.Timer(0.2, arrival.gate.set).start()
    stall.close()
    assert arrival.gate.is_set()
    assert stall.seconds > 0.1
    stall.close()  # A second time is no harm.
    assert not thread.is_alive()


class TestArraysThatCannotBeWaitedFor:
    def deleted(self):
        array = jnp.ones(3)
        array.delete()
        return array

    def test_a_failure_is_raised_when_the_meter_is_closed(self):
        stall, thread = start_meter()
        stall.watch(self.deleted(), jnp.ones(3))
        for _ in range(3):  # Still taken, though no longer measured.
            stall.watch(jnp.ones(3), jnp.ones(3))
        with pytest.raises(RuntimeError, match="stall.*deleted"):
            stall.close()
        assert not thread.is_alive()

    def test_it_does_not_hide_the_error_that_ends_a_run(self):
        def fail():
            with StallMeter() as stall:
                stall.watch(self.deleted(), jnp.ones(3))
                raise KeyError("the run's own")

        with pytest.raises(KeyError):
            fail()
