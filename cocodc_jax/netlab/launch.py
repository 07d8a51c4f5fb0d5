"""Starts the regions and the relay, waits for the commands, and ends everything."""

import contextlib
import dataclasses
import math
import os
import pathlib
import pickle
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO

from cocodc_jax.files import open_regular
from cocodc_jax.netlab import children, region, relay
from cocodc_jax.netlab.plan import Plan

_ROOT = pathlib.Path(__file__).parents[2]  # From there `-m experiments...` works.
_SPARE_S = 5.0  # After the grace period, before a region's keeper is killed.
_STDOUT = 1
_STDERR = 2


class LabError(RuntimeError):
    """The lab itself failed, not a command in it."""


def run(plan: Plan) -> int:
    """Run the command in every region, and end all processes.

    Returns:
      0, or the exit code of the region that failed first (128 + n after signal n), or
      128 + n if this process got signal n of SIGINT, SIGTERM and SIGHUP.

    Raises:
      LabError: if a region or the relay could not be set up, or the relay broke.
    """
    plan.logdir.mkdir(parents=True, exist_ok=True)
    plan.traffic_path.unlink(missing_ok=True)
    lab = _Lab(plan)
    with children.on_signals(lab.stop):
        try:
            lab.start()
            lab.wait()
        except LabError:
            if not lab.exit_code:  # A region that was stopped half-way is no error.
                raise
        finally:
            lab.close()

    return lab.exit_code


class _Lab:
    """The processes of a run; `close` may be called at any time."""

    def __init__(self, plan: Plan):
        self.exit_code = 0
        self._plan = plan
        # With absolute paths, as the lab's processes run in another folder.
        changes = plan.changes_path and plan.changes_path.absolute()
        logdir = plan.logdir.absolute()
        self._absolute_plan = dataclasses.replace(
            plan, logdir=logdir, changes_path=changes
        )

        self._selector = selectors.DefaultSelector()
        self._regions: dict[int, subprocess.Popen] = {}  # that run
        self._asked_to_end: set[int] = set()
        self._open_pipes = 0
        self._relay: subprocess.Popen | None = None
        self._relay_broke = False
        self._kill_at_s = math.inf

    def start(self) -> None:
        """Make the regions, join them by the relay, and start the commands."""
        with contextlib.ExitStack() as stack:
            connections = []
            for region_id in range(len(self._plan.regions)):
                ours, theirs = socket.socketpair()
                connections.append(stack.enter_context(ours))
                with theirs:
                    self._start_region(region_id, theirs.fileno())

            devices = []
            for region_id, connection in enumerate(connections):
                message, received, _, _ = socket.recv_fds(connection, 4096, 1)
                if not received:
                    reason = message.decode() or "its process ended"
                    raise LabError(f"region {region_id} could not be made: {reason}")
                devices += received
                stack.callback(os.close, devices[-1])

            self._start_relay(devices)
            for connection in connections:
                connection.sendall(b"g")

    def wait(self) -> None:
        """Wait until every region has ended and all output is copied."""
        if self.exit_code:  # stopped, perhaps before there was anything to stop
            self._stop_regions()
        while self._regions:
            self._step()
            if time.monotonic() > self._kill_at_s:
                for process in self._regions.values():
                    process.kill()

        while self._open_pipes and self._step():
            pass
        if self._relay_broke:
            raise LabError("the relay broke; see its message above")

    def stop(self, exit_code: int) -> None:
        """Ask all commands to end; `wait` then returns. For a signal handler."""
        self.exit_code = self.exit_code or exit_code
        self._stop_regions()

    def close(self) -> None:
        """End all processes that still run; commands have `grace_s` for it."""
        self._stop_regions()
        try:
            self.wait()
        finally:
            if self._relay:
                self._relay.terminate()
                self._relay.wait()
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, int):  # Of who was not waited for.
                    os.close(key.fileobj)
            self._selector.close()

    def _start_region(self, region_id: int, socket_fd: int) -> None:
        arguments = (
            self._absolute_plan,
            region_id,
            os.getcwd(),
            socket_fd,
            os.getpid(),
        )
        with open_regular(self._plan.log_path(region_id), "wb") as log:
            out = log if region_id else subprocess.PIPE  # Region 0 is shown.
            process = _start_module(
                region.__name__, arguments, pass_fds=[socket_fd], stdout=out, stderr=out
            )

        self._regions[region_id] = process
        self._on_end(process, lambda: self._region_ended(region_id))
        if process.stdout and process.stderr:
            self._show(process.stdout, _STDOUT)
            self._show(process.stderr, _STDERR)

    def _start_relay(self, devices: Sequence[int]) -> None:
        arguments = (self._absolute_plan, devices, os.getpid())
        self._relay = _start_module(
            relay.__name__, arguments, pass_fds=devices, stdout=subprocess.PIPE
        )
        assert self._relay.stdout
        with self._relay.stdout as pipe:
            if pipe.readline() != b"ready\n":
                raise LabError("the relay did not start; see its message above")
        self._on_end(self._relay, self._relay_ended)

    def _step(self) -> bool:
        """Handle the events of the next second; return False if there were none."""
        ready = self._selector.select(timeout=1.0)
        for key, _ in ready:
            key.data()
        return bool(ready)

    def _on_end(self, process: subprocess.Popen, act: Callable[[], None]) -> None:
        fd = os.pidfd_open(process.pid)

        def ended() -> None:
            self._selector.unregister(fd)
            os.close(fd)
            act()

        self._selector.register(fd, selectors.EVENT_READ, ended)

    def _region_ended(self, region_id: int) -> None:
        code = children.exit_code(self._regions.pop(region_id).wait())
        if code and not self.exit_code:
            log = self._plan.log_path(region_id)
            # Region 0 has been on the terminal already.
            children.explain(f"wan: region {region_id}", code, log, tail=region_id > 0)
            self.stop(code)

    def _relay_ended(self) -> None:
        if self._regions:
            self._relay_broke = True
            self._stop_regions()

    def _stop_regions(self) -> None:
        # Once each: a region counts its grace from the last time it is asked.
        for region_id in self._regions.keys() - self._asked_to_end:
            self._asked_to_end.add(region_id)
            self._regions[region_id].terminate()
            self._kill_at_s = time.monotonic() + self._plan.grace_s + _SPARE_S

    def _show(self, pipe: IO[bytes], terminal_fd: int) -> None:
        """Copy region 0's output to its log and to the terminal."""

        def copy() -> None:
            text = os.read(pipe.fileno(), 65536)
            if not text:
                self._selector.unregister(pipe)
                pipe.close()
                self._open_pipes -= 1
                return

            with open_regular(self._plan.log_path(0), "ab") as log:
                log.write(text)
            # A reader that has gone away does not end the run.
            with contextlib.suppress(BrokenPipeError):
                os.write(terminal_fd, text)

        self._open_pipes += 1
        self._selector.register(pipe, selectors.EVENT_READ, copy)


def _start_module(name: str, arguments: tuple, **settings) -> subprocess.Popen:
    """Start a process of the lab, which reads `arguments` from its standard input."""
    # Ctrl-C goes to the lab alone, which ends the others in order.
    process = subprocess.Popen(
        [sys.executable, "-m", name],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        start_new_session=True,
        **settings,
    )
    assert process.stdin

    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pickle.dump(arguments, pipe)
    return process
