"""Several JAX processes that train one model: how they connect, and their checks.

A process holds full regions, or a region spans several consecutive processes.

When one process ends, so do all. Its connections close, so the next collective fails in
the others within about a second. If its machine or network fails silently, they are
ended after `heartbeat_timeout_s`.
"""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import re
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from importlib import metadata
from typing import Any, Self

import jax

import cocodc_jax as cc
from cocodc_jax.engine.transfer import gather
from cocodc_jax.fields import check_least
from cocodc_jax.files import TransientError
from cocodc_jax.run.config.train_config import flat
from cocodc_jax.train.checkpoint import first_line

# Set by `experiments.wan` and `experiments.launch_local` for their processes.
ADDRESS = "COCODC_COORDINATOR_ADDRESS"
COUNT = "COCODC_NUM_PROCESSES"
ID = "COCODC_PROCESS_ID"

_FAREWELL_S = 3.0


@dataclasses.dataclass(frozen=True)
class Processes:
    """Processes of a run.

    Attributes:
      coordinator_address: host:port of process 0, for several processes; JAX detects
        it with num_processes=0.
      num_processes: processes that share the regions, or several to a region; 0 asks
        the cluster (SLURM, GKE, TPU, MPI). Default: a launcher's, or 1.
      process_id: which of the processes this one is; JAX detects it with
        num_processes=0.
      coordinator_bind_address: host:port that process 0's coordinator listens on, which
        has no key: of an inner network, say. Default: coordinator_address if it is of
        this machine alone (127.0.0.1, localhost), else all addresses.
      start_timeout_s: seconds to wait until all processes have started. Default: 300.
      heartbeat_timeout_s: seconds of silence after which a process is taken for dead
        and all others end; more than the longest outage of the network. Default: 30.
    """

    coordinator_address: str = ""
    num_processes: int = 1
    process_id: int = -1
    coordinator_bind_address: str = ""
    start_timeout_s: int = 300
    heartbeat_timeout_s: int = 30

    def __post_init__(self):
        check_least(self, 1, "start_timeout_s", "heartbeat_timeout_s")
        if self.num_processes < 0:
            raise ValueError(
                f"num_processes={self.num_processes} must be at least 1, or 0 for what "
                "the cluster says"
            )

        bind_host, _, bind_port = self.coordinator_bind_address.rpartition(":")
        if self.coordinator_bind_address:
            if self.num_processes == 1:
                raise ValueError(
                    f"coordinator_bind_address={self.coordinator_bind_address!r} has "
                    "no meaning for one process; leave it out"
                )
            if not bind_host or not bind_port.isdigit():
                raise ValueError(
                    f"coordinator_bind_address={self.coordinator_bind_address!r} must "
                    "be host:port of this machine"
                )

        if self.num_processes < 2:
            self._check_unset()
            return
        host, _, port = self.coordinator_address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(
                f"coordinator_address={self.coordinator_address!r} must be host:port "
                "of process 0"
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"process_id={self.process_id} must be 0 to {self.num_processes - 1}, "
                f"another for each of num_processes={self.num_processes}"
            )

    def _check_unset(self) -> None:
        """Refuse addresses of processes in a run of one, or if JAX detects them."""
        repair = "say how many there are"
        if self.num_processes == 0:
            repair = "leave it out, JAX finds it"
        for name, unset in (("coordinator_address", ""), ("process_id", -1)):
            value = getattr(self, name)
            if value != unset:
                raise ValueError(
                    f"{name}={value!r} was given, but num_processes is "
                    f"{self.num_processes}; {repair}"
                )

    @classmethod
    def from_environment(cls, **settings: Any) -> Self:
        """Return the processes that a launcher has set, or one; `settings` override."""
        of_launcher: dict[str, Any] = {}
        if os.environ.get(COUNT, "1") != "1":
            of_launcher = {
                "coordinator_address": os.environ.get(ADDRESS, ""),
                "num_processes": _number(COUNT),
                "process_id": _number(ID),
            }
        return cls(**of_launcher | settings)

    def start(self, num_regions: int, devices_per_region: int = 1) -> None:
        """Connect to the other processes; call before the first JAX computation."""
        if self.num_processes == 1:
            return
        if self.num_processes:
            check_shares(num_regions, self.num_processes, devices_per_region)

        if self.process_id == 0:
            self._check_port()
        # Without it CPU processes have no collectives; other platforms ignore it.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        keep_for_python(sys.stdout)

        # In a thread, as JAX ends the process on its own timeout.
        failures: list[Exception] = []
        meeting = threading.Thread(target=self._meet, args=[failures], daemon=True)
        meeting.start()
        meeting.join(self.start_timeout_s)
        if meeting.is_alive():
            failures = [TimeoutError("there was no answer")]
        if failures:
            kind = TransientError if self.num_processes else ValueError
            raise kind(self._explain(failures[0])) from failures[0]

    @property
    def bind_address(self) -> str | None:
        """Where the coordinator listens; None for the port on all addresses.

        >>> Processes("127.0.0.1:9876", 2, 0).bind_address
        '127.0.0.1:9876'
        """
        if self.coordinator_bind_address:
            return self.coordinator_bind_address
        host = self.coordinator_address.rpartition(":")[0].strip("[]")
        is_local = host == "localhost" or host.startswith("127.") or host == "::1"
        return self.coordinator_address if is_local else None

    def _meet(self, failures: list[Exception]) -> None:
        try:
            jax.distributed.initialize(
                self.coordinator_address or None,
                self.num_processes or None,
                None if self.process_id < 0 else self.process_id,
                initialization_timeout=self.start_timeout_s + 60,
                heartbeat_timeout_seconds=self.heartbeat_timeout_s,
                coordinator_bind_address=self.bind_address,
            )
        except Exception as error:  # JAX passes on any exception of its runtime.
            failures.append(error)

    def _explain(self, error: Exception) -> str:
        if self.num_processes == 0:  # JAX's message says little.
            return (
                "num_processes=0 asks the cluster who takes part, and JAX did not find "
                f"out ({first_line(error)}); give coordinator_address, num_processes "
                "and process_id"
            )
        return (
            f"coordinator_address={self.coordinator_address!r}: process "
            f"{self.process_id} of {self.num_processes} did not meet the others within "
            f"start_timeout_s={self.start_timeout_s} ({first_line(error)}); check "
            "that process 0 runs there, that the address can be reached, and that as "
            "many processes were started as num_processes says"
        )

    def _check_port(self) -> None:
        # On all addresses, like JAX: behind NAT, the given one is not local. JAX would
        # silently share the port with another coordinator.
        port = self.coordinator_address.rpartition(":")[2]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", int(port)))
            except (OSError, OverflowError) as error:  # The latter above 65535.
                raise ValueError(
                    f"coordinator_address={self.coordinator_address!r}: process 0 "
                    f"cannot listen on port {port}: {error}; name a free port"
                ) from error


ONE_PROCESS = Processes()


def keep_for_python(stdout: Any) -> None:
    """Keep standard output for what Python prints.

    Gloo writes its connections there; they are discarded. Standard error, which has the
    runtime's errors, stays as it is.
    """
    if stdout is None or stdout is not sys.__stdout__ or stdout.fileno() != 1:
        return  # Closed, or captured.

    stdout.flush()
    sys.stdout = os.fdopen(
        os.dup(1),
        "w",
        encoding=stdout.encoding,
        errors=stdout.errors,
        buffering=1 if stdout.line_buffering else -1,
    )

    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def check_shares(
    num_regions: int, num_processes: int, devices_per_region: int = 1
) -> None:
    """Refuse a number of processes that cannot share the regions evenly."""
    if num_regions % num_processes and num_processes % num_regions:
        raise ValueError(
            f"num_processes={num_processes} must divide regions={num_regions}, so that "
            "each process has full regions, or be a multiple of it, so that each "
            "region has equally many processes"
        )
    members = max(num_processes // num_regions, 1)
    if devices_per_region % members:
        raise ValueError(
            f"num_processes={num_processes} makes {members} processes of each of "
            f"regions={num_regions}, which cannot share its stages * data_axis * "
            f"expert_axis * sequence_axis * model_axis = {devices_per_region} devices; "
            f"make that a multiple of {members}, as with data_axis={members}, or use "
            f"num_processes={num_regions}"
        )


@contextlib.contextmanager
def failing_alone() -> Iterator[None]:
    """End a process that fails at once, even if the others do not fail.

    At a normal exit it would wait for all others, which may wait for it in a
    collective. A run of one process is left alone.
    """
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized():
            raise
        code = _report(error)
        sys.stdout.flush()
        sys.stderr.flush()

        def shut_down() -> None:
            with contextlib.suppress(Exception):  # Others have failed too; reported.
                jax.distributed.shutdown()

        farewell = threading.Thread(target=shut_down, daemon=True)
        farewell.start()
        farewell.join(_FAREWELL_S)
        os._exit(code)


def _report(error: BaseException) -> int:
    """Print the error, unless it was reported; return the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else error.code is not None

    if isinstance(error, jax.errors.JaxRuntimeError) and _NETWORK.search(str(error)):
        print(
            f"error: another process has ended, or cannot be reached: "
            f"{first_line(error)}; see its output. The same command in all processes "
            "resumes from the last checkpoint",
            file=sys.stderr,
        )
    else:
        traceback.print_exception(error)
    return 1


_NETWORK = re.compile("gloo|heartbeat|coordination service|connection", re.IGNORECASE)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(
            f"{name}={text!r} in the environment must be a whole number"
        ) from error


def check_alike(config: dict[str, Any]) -> None:
    """Compare this process's run with the others', before anything is compiled."""
    version = metadata.version("cocodc_jax")
    mine = {"version": version, "code": code_digest(), **flat(config)}
    first, *others = gather(mine)
    differences = [
        f"{name} is {first.get(name)!r} in process 0, {theirs.get(name)!r} in {process}"
        for process, theirs in enumerate(others, 1)
        for name in sorted(first.keys() | theirs.keys())
        if first.get(name) != theirs.get(name)
    ]

    if differences:
        raise ValueError(
            f"the processes do not run the same: {'; '.join(differences)}; start all "
            "of them with the same command and the same code"
        )


def code_digest() -> str:
    """Return twelve hex digits that identify the version of this package's source."""
    root = pathlib.Path(cc.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
