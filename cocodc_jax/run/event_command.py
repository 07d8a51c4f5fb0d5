"""Run a shell command on events of a run, beside the training and never in its way."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import NamedTuple

TIMEOUT_S = 60.0
_WAITING = 32


class Event(NamedTuple):
    """Something that an operator wants to know.

    Attributes:
      name: one of `EVENTS`.
      message: a line.
      step: inner steps done, None if it is not about one.
      region: None if it is not about one.
    """

    name: str
    message: str
    step: int | None = None
    region: int | None = None


EVENTS = (
    "fault", "fault_ended", "region_lost", "region_returned", "loss_spike",
    "non_finite", "finished", "stopped", "failed",
)  # fmt: skip


class EventCommand:
    """Runs one command at a time, in the order of events; use as a context manager.

    A command that takes too long is killed, with its children. Events that come while
    very many wait are dropped. Both, and exit codes, are lines on standard error.
    """

    def __init__(self, command: str, workdir: str, timeout_s: float = TIMEOUT_S):
        """Run nothing yet; an empty command never runs."""
        self._command, self._workdir = command, workdir
        self._timeout_s = timeout_s
        self._waiting: queue.Queue[Event | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._run_all, daemon=True)

    def __enter__(self) -> EventCommand:
        """Start the thread that runs commands."""
        if self._command:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Wait for the commands that wait and run, for twice the time of one."""
        if not self._command:
            return
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=self._timeout_s)
        self._thread.join(2 * self._timeout_s)
        if self._thread.is_alive():
            _say("commands still run or wait; the program ends without them")

    def __call__(self, event: Event) -> None:
        """Hand over an event; returns at once."""
        if not self._command:
            return
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            _say(f"{_WAITING} events wait; {event.name} is dropped ({event.message})")

    def _run_all(self) -> None:
        while (event := self._waiting.get()) is not None:
            try:
                self._run(event)
            except Exception as error:  # Whatever it is: the run goes on.
                _say(f"{event.name}: {error}")

    def _run(self, event: Event) -> None:
        about = event._asdict() | {"workdir": self._workdir, "time": time.time()}
        about["event"] = about.pop("name")
        environment = {
            f"COCODC_{name.upper()}": "" if about[name] is None else str(about[name])
            for name in ("event", "step", "region", "message", "workdir")
        }
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                self._command,
                shell=True,
                env=os.environ | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,  # So that all of it can be killed.
            )
            try:
                process.communicate(json.dumps(about).encode(), self._timeout_s)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                _say(f"{event.name}: killed after {self._timeout_s:g} s")
                return
            if process.returncode:
                said.seek(0)
                lines = said.read().decode(errors="replace").strip().splitlines()
                end = f" ({lines[-1][:200]})" if lines else ""
                _say(f"{event.name}: exit code {process.returncode}{end}")


def _say(line: str) -> None:
    print(f"warning: --on_event: {line}", file=sys.stderr, flush=True)
