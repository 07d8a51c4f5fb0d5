"""Child processes, which end with their parent: one, a group, or separate regions."""

import contextlib
import ctypes
import functools
import math
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from cocodc_jax.files import open_regular, read_regular, say, writing

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_SIGNALLED = 128  # Plus the signal, as shells count exit codes.
_PR_SET_PDEATHSIG = 1
_TAIL_LINES = 10
_POLL_S = 0.1
_REFUSED = 2
_STOPPED = 75
# A region that fails within `_BRIEF_S` so many times in a row is not started again.
_BRIEF_LIVES = 5
_BRIEF_S = 60.0
_FAREWELL_S = 5.0  # For others to fail too, and report why.

libc = ctypes.CDLL(None, use_errno=True)


def call(function: Callable[..., int], *arguments: object) -> None:
    """Call a function of `libc`; an `OSError` names it if it fails."""
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function.__name__}: {os.strerror(number)}")


def die_with_parent(parent_pid: int, signal_number: signal.Signals) -> None:
    """Ask the kernel to signal this process when its parent ends; Linux only."""
    if sys.platform != "linux":
        return
    call(libc.prctl, _PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)
    # If the parent ended before the call, the kernel sends nothing.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def start_child(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    log: pathlib.Path | None = None,
    mode: str = "wb",
) -> subprocess.Popen:
    """Start a process that ends with this one, in a session of its own."""
    with open_regular(log, mode) if log else contextlib.nullcontext() as out:
        # Ctrl-C goes to this process alone, which ends the others in order.
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGKILL),
        )


def run(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    log: pathlib.Path | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> int:
    """Run a process to its end, and return its exit code as a shell reports it.

    The first signal to this process is passed on as SIGTERM, the second one as SIGKILL.
    When the child has ended, this process exits too.

    Args:
      command: of the process.
      env: its environment; None is this process's.
      log: file for its output; None is this process's output.
      meanwhile: called again and again while it runs.
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
    """Call `act(128 + n)` on signal n, instead of an exception that ends a clean-up."""
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
    """Return the exit code that a shell reports: 128 + n after signal n."""
    return returncode if returncode >= 0 else _SIGNALLED - returncode


def how_it_ended(code: int) -> str:
    """Return an exit code in words.

    >>> how_it_ended(137), how_it_ended(1)
    ('was killed by signal 9', 'ended with exit code 1')
    """
    if code > _SIGNALLED:
        return f"was killed by signal {code - _SIGNALLED}"
    return f"ended with exit code {code}"


def explain(who: str, code: int, log: pathlib.Path | None, tail: bool = True) -> None:
    """Print on standard error how a child ended, and the last lines of its log."""
    where = f"; {log}" if log else ""
    print(f"{who} {how_it_ended(code)}{where}", file=sys.stderr)
    if log and tail:
        lines = (f"  {line}" for line in said(log)[-_TAIL_LINES:])
        print(*lines, sep="\n", file=sys.stderr)


def said(log: pathlib.Path) -> list[str]:
    """Return the lines of a child's log, up to the reason why it ended."""
    content = read_regular(log).decode(errors="replace")
    # If JAX's runtime ends a process, the reason is above pages of stack traces.
    text, *_ = content.split("*** Check failure stack trace")
    return text.splitlines()


class Group:
    """Processes that end together."""

    def __init__(self, grace_s: float):
        self._grace_s = grace_s
        self._running: dict[int, subprocess.Popen] = {}
        self._logs: list[pathlib.Path | None] = []
        self._kill_at_s = math.inf
        self._is_asked = False

    def start(self, command: Sequence[str], env: dict, log: pathlib.Path | None):
        """Start one more process."""
        process = self._running[len(self._logs)] = start_child(command, env, log)
        self._logs.append(log)
        if self._is_asked:
            process.terminate()

    def stop(self, _: int = 0) -> None:
        """Ask all to end; the second call kills them. For a signal handler."""
        self._kill_at_s = time.monotonic() + (0 if self._is_asked else self._grace_s)
        if not self._is_asked:
            for process in self._running.values():
                process.terminate()
        self._is_asked = True

    def wait(self) -> int:
        """Wait until all have ended; return the exit code of the first to fail."""
        code = 0
        while self._running:
            for number in [n for n, p in self._running.items() if p.poll() is not None]:
                ended = exit_code(self._running.pop(number).returncode)
                if ended and code in (0, _STOPPED):
                    code = ended
                    if code == _STOPPED:  # The others stop at the same step.
                        continue
                    explain(f"process {number}", code, self._logs[number])
                    end_s = time.monotonic() + _FAREWELL_S
                    self._kill_at_s = min(self._kill_at_s, end_s)

            if time.monotonic() > self._kill_at_s:
                self.kill()
            time.sleep(_POLL_S)

        return code

    def kill(self) -> None:
        """Kill all processes that still run."""
        for process in self._running.values():
            process.kill()


class Region:
    """One region's processes, which may be started again after they ended."""

    def __init__(
        self, command: Sequence[str], log: pathlib.Path | None, num_processes: int = 1
    ):
        self._command = list(command)
        self._log = log
        self._num = num_processes
        self.processes: list[subprocess.Popen] = []
        self.lives = 0

    def start(self) -> None:
        """Start its next life."""
        self.lives += 1
        if self._log:
            self._log.parent.mkdir(parents=True, exist_ok=True)
        commands = [self._command]
        if self._num > 1:
            (address,) = free_addresses(1)
            shared = [
                f"--coordinator_address={address}",
                f"--num_processes={self._num}",
            ]
            numbers = (f"--process_id={number}" for number in range(self._num))
            commands = [[*self._command, *shared, number] for number in numbers]

        started = []
        for number, command in enumerate(commands):
            started.append(start_child(command, log=self._log_of(number), mode="ab"))
            self.processes = started  # If none can be started, the last life's stay.

    def _log_of(self, process: int) -> pathlib.Path | None:
        log = self._log
        return log.with_stem(f"{log.stem}_{process}") if log and process else log

    @property
    def is_running(self) -> bool:
        """Whether any of its processes is running."""
        return any(process.poll() is None for process in self.processes)

    @property
    def code(self) -> int | None:
        """The exit code of its last life; None while it runs.

        If a process fails, the others are killed, and the code is that of the process
        that failed. The processes of a region that was asked to stop end by themselves.
        """
        codes = [process.poll() for process in self.processes]
        if any(code not in (None, 0, _STOPPED) for code in codes):
            self.send(signal.SIGKILL)
        if not codes or None in codes:
            return None
        return exit_code(codes[_to_blame(codes)] or 0)

    def end(self) -> str:
        """Return how its last life ended: in words, with its log and the last line.

        Of several processes, the one that failed by itself counts.
        """
        log = self._log_of(_to_blame([process.poll() for process in self.processes]))
        assert self.code is not None
        how = how_it_ended(self.code)
        if log is None:
            return how
        lines = said(log) if log.exists() else []
        last = next((line for line in reversed(lines) if line.strip()), "nothing in it")
        return f"{how}, see {log}: {last.strip()}"

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
    """Return which process failed by itself, else one that failed, else the first."""
    bad = [n for n, code in enumerate(codes) if code]
    not_killed = [n for n in bad if codes[n] != -signal.SIGKILL]
    return (*not_killed, *bad, 0)[0]


def make_key(workdir: pathlib.Path) -> pathlib.Path:
    """Return the file of the key that the regions share; write one if it is missing."""
    key = workdir / "key"
    workdir.mkdir(parents=True, exist_ok=True)
    if not key.exists() or not key.stat().st_size:  # Empty: the disk was full.
        with (
            writing(key),
            open(os.open(key, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file,
        ):
            file.write(secrets.token_bytes(32))
    return key


def free_addresses(num: int) -> tuple[str, ...]:
    """Return different addresses of this machine on which no process listens now."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(num)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return tuple(f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes)


def make_regions(
    train: Sequence[str],
    logs: pathlib.Path,
    num_regions: int,
    via: str | None = None,
    num_processes: int = 1,
) -> list[Region]:
    """Return regions that share a key and meet at free local ports or `via` a store.

    Args:
      train: command that trains, without the flags of a region.
      logs: folder for the key and the regions' logs.
      num_regions: M.
      via: address of a store; None is TCP on this machine.
      num_processes: of each region.
    """
    shared = ["--exchange=elastic"]
    if not via:
        shared.append(f"--region_addresses={','.join(free_addresses(num_regions))}")
    shared.append(f"--key_file={make_key(logs)}")

    flags_and_logs = [
        (f"--region_id={r}", logs / f"region_{r}" / "output.log")
        for r in range(num_regions)
    ]
    return [
        Region([*train, *shared, flag], log, num_processes)
        for flag, log in flags_and_logs
    ]


def wait(
    regions: Sequence[Region],
    restarts: Callable[[], bool],
    kill_at_s: Callable[[], float] = lambda: math.inf,
) -> int:
    """Wait until all regions have ended; return the exit code of the first to fail.

    Args:
      regions: which were started.
      restarts: whether a region that fails is started again now.
      kill_at_s: the time, by `time.monotonic`, from which regions are killed.
    """
    ended: dict[int, int] = {}
    begun_s = [time.monotonic()] * len(regions)
    brief = [0] * len(regions)

    while len(ended) < len(regions):
        for number, region in enumerate(regions):
            if number in ended or region.code is None:
                continue
            code = region.code
            is_brief = time.monotonic() - begun_s[number] < _BRIEF_S
            brief[number] = brief[number] + 1 if is_brief else 0

            is_vain = code in (0, _REFUSED, _STOPPED) or brief[number] == _BRIEF_LIVES
            if is_vain or not restarts():
                ended[number] = code
                if code:
                    say(f"region {number} {region.end()}")
            else:
                begun_s[number] = time.monotonic()
                say(f"region {number} {how_it_ended(code)}; starting it again")
                with contextlib.suppress(OSError):  # The loop tries again.
                    region.start()
                if not restarts():  # A stop was requested meanwhile.
                    region.send(signal.SIGTERM)

        if time.monotonic() > kill_at_s():
            for region in regions:
                region.send(signal.SIGKILL)

        time.sleep(_POLL_S)

    bad = [code for code in ended.values() if code]
    return next((code for code in bad if code != _STOPPED), max(bad, default=0))
