"""Regions as processes of this machine that live and die alone.

Unlike a `children.Group`, none ends because another one has; who has died may be
started again, by itself or when it is asked for.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from cocodc_jax.netlab.children import exit_code, said, start_child

_POLL_S = 0.1
_REFUSED = 2
# Lives of a region, one after another, that end badly so soon that none will do better.
_BRIEF_LIVES, _BRIEF_S = 5, 60.0


class Region:
    """One region's processes, and those it has been before."""

    def __init__(
        self, command: Sequence[str], log: pathlib.Path | None, num_processes: int = 1
    ):
        self._command, self._log, self._num = list(command), log, num_processes
        self.processes: list[subprocess.Popen] = []
        self.lives = 0

    def start(self) -> None:
        """Start its next life."""
        self.lives += 1
        if self._log:
            self._log.parent.mkdir(parents=True, exist_ok=True)
        self.processes = []
        (coordinator,) = free_addresses(1)
        for number in range(self._num):
            command = self._command
            if self._num > 1:
                command = [
                    *command,
                    f"--coordinator_address={coordinator}",
                    f"--num_processes={self._num}",
                    f"--process_id={number}",
                ]
            log = self._log_of(number)
            self.processes.append(start_child(command, log=log, mode="ab"))

    def _log_of(self, process: int) -> pathlib.Path | None:
        log = self._log
        return log.with_stem(f"{log.stem}_{process}") if log and process else log

    @property
    def is_running(self) -> bool:
        """Whether one of its processes lives."""
        return any(process.poll() is None for process in self.processes)

    @property
    def code(self) -> int | None:
        """How its last life ended, None while it lives.

        A process that has ended badly takes the others with it; the code is its own.
        """
        codes = [process.poll() for process in self.processes]
        if any(codes):
            self.send(signal.SIGKILL)
        if not codes or None in codes:
            return None
        return exit_code(codes[_to_blame(codes)] or 0)

    def end(self) -> str:
        """Return how its last life ended: the code, where its output is, the last line.

        Of several processes those are meant that ended badly by themselves.
        """
        log = self._log_of(_to_blame([process.poll() for process in self.processes]))
        if log is None:
            return f"{self.code}"
        lines = said(log.read_text(errors="replace")) if log.exists() else []
        last = next((line for line in reversed(lines) if line.strip()), "nothing in it")
        return f"{self.code}, see {log}: {last.strip()}"

    def wait(self) -> None:
        """Wait until all of its processes have ended."""
        for process in self.processes:
            process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send its processes a signal."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)


def _to_blame(codes: Sequence[int | None]) -> int:
    """Return which process ended badly by itself, else one that did, else the first."""
    bad = [n for n, code in enumerate(codes) if code]
    own = [n for n in bad if codes[n] != -signal.SIGKILL]
    return (*own, *bad, 0)[0]


def make_key(workdir: pathlib.Path) -> pathlib.Path:
    """Make the key that the regions share, unless it is there; return where it is."""
    key = workdir / "key"
    workdir.mkdir(parents=True, exist_ok=True)
    if not key.exists():
        with open(os.open(key, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
    return key


def free_addresses(num: int) -> tuple[str, ...]:
    """Return addresses of this machine that nobody listens on now, all different."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(num)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return tuple(f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes)


def commands(
    train: Sequence[str], workdir: pathlib.Path, num_regions: int, via: str = ""
) -> list[list[str]]:
    """Return the command of every region, at free ports of this machine or without."""
    key = make_key(workdir)
    where = []
    if not via:
        where = [f"--region_addresses={','.join(free_addresses(num_regions))}"]
    return [
        [
            *train,
            f"--workdir={workdir}",
            "--exchange=elastic",
            *where,
            f"--region_id={region}",
            f"--key_file={key}",
        ]
        for region in range(num_regions)
    ]


def logs(workdir: pathlib.Path, num_regions: int) -> list[pathlib.Path]:
    """Return where every region's output goes."""
    return [workdir / f"region_{r}" / "output.log" for r in range(num_regions)]


def wait(
    regions: Sequence[Region],
    restarts: Callable[[], bool],
    kill_at_s: Callable[[], float] = lambda: math.inf,
) -> int:
    """Wait until all have ended."""
    ended: dict[int, int] = {}
    begun_s, brief = [time.monotonic()] * len(regions), [0] * len(regions)
    while len(ended) < len(regions):
        for number, region in enumerate(regions):
            if number in ended or region.code is None:
                continue
            code = region.code
            is_brief = time.monotonic() - begun_s[number] < _BRIEF_S
            brief[number] = brief[number] + 1 if is_brief else 0
            is_vain = code in (0, _REFUSED) or brief[number] == _BRIEF_LIVES
            if is_vain or not restarts():
                ended[number] = code
                if code:
                    told = f"region {number} ended with {region.end()}"
                    print(told, file=sys.stderr)
            else:
                begun_s[number] = time.monotonic()
                print(f"region {number} ended with {code}: again", file=sys.stderr)
                region.start()
                if not restarts():  # Told to stop while it was started.
                    region.send(signal.SIGTERM)
        if time.monotonic() > kill_at_s():
            for region in regions:
                region.send(signal.SIGKILL)
        time.sleep(_POLL_S)
    return next((code for code in ended.values() if code), 0)
