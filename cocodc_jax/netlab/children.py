"""What the programs that start others share: children that end with their parent."""

import contextlib
import ctypes
import functools
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_PR_SET_PDEATHSIG = 1
_TAIL_LINES = 10
_POLL_S = 0.1
_FAREWELL_S = 5.0  # for others to fail too, and say why

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int, signal_number: signal.Signals) -> None:
    """Has the kernel send this process a signal when its parent is gone.

    Linux only; elsewhere, a child may outlive a parent that is killed.
    """
    if sys.platform != "linux":
        return
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")
    # For a parent that went before the call, nothing is sent.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def start_child(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    log: pathlib.Path | None = None,
    mode: str = "wb",
) -> subprocess.Popen:
    """Start a process that ends with this one, in a session of its own."""
    out = log.open(mode) if log else None
    # Ctrl-C goes to this process alone, which ends the others in order.
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        start_new_session=True,
        preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGKILL),
    )
    if out:
        out.close()
    return process


def run(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    log: pathlib.Path | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> int:
    """Run a process to its end, and return its exit code as a shell has it.

    A signal to this process is passed on as SIGTERM, the second one as SIGKILL; the
    kernel kills the process if this one is killed.

    Raises:
      SystemExit: once it has ended, if this process was asked to.
    """
    codes: list[int] = []

    def stop(code: int) -> None:
        process.send_signal(signal.SIGKILL if codes else signal.SIGTERM)
        codes.append(code)

    process = start_child(command, env, log)
    try:
        with on_signals(stop):
            while process.poll() is None:
                meanwhile()
                time.sleep(_POLL_S)
        meanwhile()
    finally:
        process.kill()
        process.wait()
    if codes:
        sys.exit(codes[0])
    return exit_code(process.returncode)


@contextlib.contextmanager
def on_signals(act: Callable[[int], None]) -> Iterator[None]:
    """Call act(128 + n) on signal n; no exception that could cut a clean-up short."""
    before = {
        number: signal.signal(number, lambda got, _: act(128 + got))
        for number in STOPPING
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(returncode: int) -> int:
    """Return what a shell would call it: 128 + n after signal n."""
    return returncode if returncode >= 0 else 128 - returncode


def explain(who: str, code: int, log: pathlib.Path | None, tail: bool = True) -> None:
    """Say on standard error how a child ended, and the last lines of its log."""
    where = f"; {log}" if log else ""
    print(f"{who} ended with exit code {code}{where}", file=sys.stderr)
    if log and tail:
        lines = said(log.read_text(errors="replace"))[-_TAIL_LINES:]
        print(*(f"  {line}" for line in lines), sep="\n", file=sys.stderr)


def said(text: str) -> list[str]:
    """Return the lines of what a child wrote, up to the reason of its end."""
    # Where JAX's runtime ends a process, the reason stands above pages of stacks.
    return text.partition("*** Check failure stack trace")[0].splitlines()


class Group:
    """Processes that end together."""

    def __init__(self, grace_s: float):
        self._grace_s = grace_s
        self._running: dict[int, subprocess.Popen] = {}
        self._logs: list[pathlib.Path | None] = []
        self._kill_at_s = float("inf")
        self._is_asked = False

    def start(self, command: Sequence[str], env: dict, log: pathlib.Path | None):
        """Start one more process."""
        process = start_child(command, env, log)
        self._running[len(self._logs)] = process
        self._logs.append(log)
        if self._is_asked:
            process.terminate()

    def stop(self, _: int = 0) -> None:
        """Asks all to end, the second time with force. A signal handler's work."""
        self._kill_at_s = time.monotonic() + (0 if self._is_asked else self._grace_s)
        if not self._is_asked:
            for process in self._running.values():
                process.terminate()
        self._is_asked = True

    def wait(self) -> int:
        """Wait until all have ended; returns the exit code of the first to fail."""
        code = 0
        while self._running:
            for number in [n for n, p in self._running.items() if p.poll() is not None]:
                ended = exit_code(self._running.pop(number).returncode)
                if ended and not code:
                    code = ended
                    explain(f"process {number}", code, self._logs[number])
                    end_s = time.monotonic() + _FAREWELL_S
                    self._kill_at_s = min(self._kill_at_s, end_s)
            if time.monotonic() > self._kill_at_s:
                self.kill()
            time.sleep(_POLL_S)
        return code

    def kill(self) -> None:
        """End all that still runs."""
        for process in self._running.values():
            process.kill()
