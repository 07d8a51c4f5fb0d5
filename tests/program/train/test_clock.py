"""The recorder of a run's timeline: its figures, and that no array blocks it."""

import threading
import time
from concurrent.futures import Future

import jax.numpy as jnp
import pytest

from cocodc_jax.core import state as arriving
from cocodc_jax.core.state import AppliedSync
from cocodc_jax.train.clock import FlightRecorder


class PendingMean:
    """Becomes ready when its gate opens, as an array of a busy device does."""

    def __init__(self):
        self.gate = threading.Event()

    def block_until_ready(self):
        assert self.gate.wait(timeout=30)

    def is_ready(self):
        return self.gate.is_set()

    def is_deleted(self):
        return False


READY = PendingMean()
READY.gate.set()


def merged(outer):
    return [AppliedSync(1, 2, 4, 64, outer, {})]


def test_the_wait_from_the_steps_to_the_arrival_is_stall():
    steps = PendingMean()
    outer = PendingMean()

    with FlightRecorder() as recorder:
        recorder.stepped(4, steps, merged(outer))
        time.sleep(0.05)  # Inner steps still run: no stall.
        steps.gate.set()
        begin = time.perf_counter()
        time.sleep(0.2)
        outer.gate.set()
        longest = time.perf_counter() - begin

    # The thread wakes up some time after each gate; this machine may be busy.
    assert 0.1 < recorder.stall_s < longest + 1


def test_waits_for_several_merges_add_up():
    with FlightRecorder() as recorder:
        for step in range(3):
            outer = PendingMean()
            threading.Timer(0.1, outer.gate.set).start()
            recorder.stepped(step, READY, merged(outer))
            outer.gate.wait()
    assert recorder.stall_s > 0.2


def test_a_sync_has_the_times_of_its_start_arrival_and_merge():
    """Started at step 2, arrived 0.2 s later, merged at step 4 without stall."""
    mean = PendingMean()
    steps = PendingMean()

    with FlightRecorder(earlier_s=100.0) as recorder:
        recorder.stepped(2, READY, [])
        recorder.started(1, 2, READY, {"w": mean})
        recorder.stepped(4, steps, merged(READY))

        time.sleep(0.2)
        mean.gate.set()
        time.sleep(0.1)
        steps.gate.set()

    (sync,) = recorder.to_json()["syncs"]
    assert (sync["fragment"], sync["start_step"], sync["apply_step"]) == (1, 2, 4)
    assert sync["num_bytes"] == 64
    assert 100.0 <= sync["start_s"] < sync["arrival_s"] < sync["merge_s"]
    assert sync["arrival_s"] - sync["start_s"] > 0.1
    assert sync["stall_s"] < 0.1

    marks = recorder.to_json()["marks"]
    assert [step for step, _ in marks] == [2, 4]
    assert marks[1][1] - marks[0][1] > 0.2


def test_done_s_waits_until_the_steps_are_done():
    steps = PendingMean()
    later = PendingMean()
    with FlightRecorder(earlier_s=100.0) as recorder:
        recorder.stepped(2, steps, [])
        recorder.stepped(4, later, [])

        threading.Timer(0.1, steps.gate.set).start()
        begin = time.perf_counter()
        first = recorder.done_s(2)
        assert begin + 0.05 < first <= time.perf_counter()

        later.gate.set()
        assert recorder.done_s(4) > first == recorder.done_s(2)


def test_seconds_of_a_step_leave_out_compilation_before_it():
    with FlightRecorder() as recorder:
        recorder.stepped(2, READY, [])
        recorder.done_s(2)
        assert recorder.own_step_s is None  # They had ended when they were dispatched.

        time.sleep(0.4)  # As compiling takes.
        steps = PendingMean()
        recorder.stepped(4, steps, [])
        time.sleep(0.1)
        steps.gate.set()
        recorder.done_s(4)

        assert recorder.own_step_s < 0.2 < recorder.recent_step_s + 0.05


def test_a_sync_in_flight_at_the_end_has_no_merge():
    with FlightRecorder() as recorder:
        recorder.started(0, 2, READY, READY)
    (sync,) = recorder.to_json()["syncs"]
    assert sync["arrival_s"] is not None
    assert sync["merge_s"] is None
    assert sync["apply_step"] is None


def test_leaving_waits_for_watched_arrays_and_ends_the_threads():
    before = set(threading.enumerate())
    mean = PendingMean()
    with FlightRecorder() as recorder:
        recorder.started(1, 2, READY, mean)
        threading.Timer(0.2, mean.gate.set).start()
    assert mean.gate.is_set()
    alive = set(threading.enumerate()) - before
    assert not [t for t in alive if not isinstance(t, threading.Timer)]


@pytest.fixture
def deleted():
    array = jnp.ones(3)
    array.delete()
    return array


def test_a_deleted_array_raises_at_the_end(deleted):
    recorder = FlightRecorder()
    recorder.stepped(2, deleted, [])
    for step in range(3):  # Still taken, though no longer measured.
        recorder.stepped(step, jnp.ones(3), merged(jnp.ones(3)))
    with pytest.raises(RuntimeError, match="timeline.*deleted"):
        recorder.__exit__(None)


def test_done_s_returns_if_an_array_was_deleted(deleted):
    recorder = FlightRecorder()
    threading.Timer(0.1, recorder.stepped, (2, deleted, [])).start()
    assert recorder.done_s(2) <= time.perf_counter()
    with pytest.raises(RuntimeError, match="timeline.*deleted"):
        recorder.__exit__(None)


def test_a_deleted_array_does_not_hide_an_earlier_error(deleted):
    recorder = FlightRecorder()
    recorder.started(0, 1, READY, deleted)
    recorder.__exit__(KeyError)


def test_a_step_is_measured_without_the_wait_before_it():
    outer = PendingMean()
    steps = PendingMean()

    with FlightRecorder() as recorder:
        assert (recorder.step_s, recorder.sync_s) == (0.0, 0.0)

        recorder.stepped(4, READY, merged(outer))
        recorder.stepped(6, steps, [])

        time.sleep(0.6)
        outer.gate.set()
        time.sleep(0.2)
        steps.gate.set()

    assert 0.05 < recorder.step_s < 0.3  # 0.1; 0.4 with the wait.


def test_sync_s_is_that_of_the_last_sync_to_arrive():
    mean = PendingMean()
    with FlightRecorder() as recorder:
        recorder.started(1, 2, READY, {"w": READY})
        recorder.started(0, 4, READY, {"w": mean})
        time.sleep(0.3)
        mean.gate.set()
    assert recorder.sync_s > 0.2


def test_waiting_for_a_mean_on_the_host_counts_as_stall():
    """Steps of 0.1 s; then the mean of other regions is waited for on the host."""
    future = Future()
    steps = PendingMean()

    with FlightRecorder() as recorder:
        recorder.stepped(2, READY, [])
        recorder.started(1, 2, READY, arriving.PendingMean(future))
        recorder.stepped(4, steps)

        time.sleep(0.2)
        steps.gate.set()
        time.sleep(0.8)

        future.set_result(arriving.InFlight(jnp.ones(3), {}))
        time.sleep(0.1)
        recorder.stepped(4, steps, merged(READY))

    assert 0.05 < recorder.step_s < 0.4  # 0.55 with the wait.
    assert recorder.recent_step_s == recorder.step_s
    assert 0.4 < recorder.stall_s < 5

    marks = recorder.to_json()["marks"]
    assert [step for step, _ in marks] == [2, 4]

    (sync,) = recorder.to_json()["syncs"]
    assert sync["stall_s"] == recorder.stall_s
    assert sync["arrival_s"] - marks[1][1] > 0.4
