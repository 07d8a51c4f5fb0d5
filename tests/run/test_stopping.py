"""Requests to stop: real signals to a region that waits, and several processes."""

import signal
import subprocess
import sys
import time

import jax

from cocodc_jax.elastic.link import Link
from cocodc_jax.run import stopping
from cocodc_jax.run.stopping import stop_signal
from tests.program.elastic import meeting
from tests.waiting import at_once

# A region without a model: it waits for a mean that never comes.
PROGRAM = """
import pathlib, sys
from concurrent.futures import Future
from cocodc_jax.core.state import InFlight, PendingMean, landed
from cocodc_jax.elastic.link import Link
from cocodc_jax.run.stopping import stop_signal
from tests.program.elastic import meeting

addresses = tuple(sys.argv[1].split(","))
options = {"addresses": addresses, "key": meeting.KEY, "timing": meeting.TIMING}
place = meeting.Place(0, **options)
with stop_signal() as stop, Link(place, "run", 1000) as link:
    link.should_stop = stop.is_asked
    link.join(30)
    mean = PendingMean(link.send((0, 4), b"a"), link.wait_for)
    print("waiting", flush=True)
    print(dict(mean.result().rows), bool(stop()), flush=True)
sys.exit(75)
"""


def test_sigterm_ends_the_wait_for_a_mean_and_the_others_hear_that_it_left():
    _, place = meeting.places(2)
    command = [sys.executable, "-c", PROGRAM, ",".join(place.addresses)]
    with Link(place, "run", 1000) as frozen:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            frozen.join(60)
            assert process.stdout.readline() == "waiting\n"
            time.sleep(0.5)

            begin_s = time.monotonic()
            process.send_signal(signal.SIGTERM)
            with at_once(20):
                assert process.stdout.readline() == "{} True\n"
            assert time.monotonic() - begin_s < 2
            assert process.wait(20) == 75

            # It counts as gone at once, not after a minute of silence.
            assert dict(frozen.send((0, 8), b"b").result(5).rows) == {1: b"b"}
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def test_several_processes_stop_at_one_call_and_stay_stopped(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    reached = stopping.multihost_utils
    monkeypatch.setattr(reached, "reached_preemption_sync_point", lambda n: n == 3)
    with stop_signal() as should_stop:
        assert [should_stop() for _ in range(5)] == [False] * 2 + [True] * 3


def test_any_thread_sees_that_a_process_of_the_run_is_to_stop(monkeypatch):
    """Between two calls of all processes, which only agree on a later one."""
    asked = []

    class Client:
        def key_value_try_get(self, key):
            assert key == "RECEIVED_PREEMPTION_NOTICE"
            if not asked:
                raise jax.errors.JaxRuntimeError("NOT_FOUND")
            return asked[0]

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(stopping, "_ASK_S", 0)
    monkeypatch.setattr(stopping.distributed.global_state, "client", Client())

    with stop_signal() as should_stop:
        assert not should_stop.is_asked()
        asked.append("2026-11-28")
        assert should_stop.is_asked()
        asked.clear()  # The service ends before the process does.
        assert should_stop.is_asked()
