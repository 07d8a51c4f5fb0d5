"""The process that keeps one region: its namespaces, its device, its command.

`python -m cocodc_jax.netlab.region JSON` (the fields of `Settings`) makes the region,
sends its TUN device over the given socket, waits there for a byte, runs the command,
and ends with its exit code (128 + n after signal n). Whatever the command leaves
running is killed. On SIGTERM, and when the lab is gone, the command has `grace_s` to
end.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

from cocodc_jax.netlab import children, kernel

_COORDINATOR_PORT = 29400  # free: the namespace is new
_SHORTEST_GRACE_S = 1e-3


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a region is given.

    Attributes:
      region_id: from 0 to num_regions - 1.
      num_regions: of the lab.
      command: program and arguments.
      folder: in which the command runs.
      mtu_bytes: largest packet.
      window_bytes: TCP may have so much under way.
      congestion_control: of TCP.
      restarts_slowly: whether TCP does after a rest.
      grace_s: between asking the command to end and killing it, in seconds.
      hosts_path: where the region's hosts file goes.
      socket_fd: to the lab.
      parent_pid: the lab's process; the region ends with it.
    """

    region_id: int
    num_regions: int
    command: Sequence[str]
    folder: str
    mtu_bytes: int
    window_bytes: int
    congestion_control: str
    restarts_slowly: bool
    grace_s: float
    hosts_path: str
    socket_fd: int
    parent_pid: int


def hosts(text: str, hostname: str, region_id: int, num_regions: int) -> str:
    """Return a hosts file in which the host's own name is the region's address."""
    entries = [line.partition("#")[0].split() for line in text.splitlines()]
    kept = [[name for name in entry if name != hostname] for entry in entries]
    lines = [" ".join(entry) for entry in kept if len(entry) > 1]
    lines.append(f"{kernel.address(region_id)} {hostname}")
    lines += [f"{kernel.address(i)} region{i}" for i in range(num_regions)]
    return "\n".join(lines) + "\n"


def environment(settings: Settings) -> dict[str, str]:
    """Return the command's environment: the lab's, who it is, and no proxies.

    A proxy cannot be reached from inside, and gRPC would ask it for the coordinator.
    """
    kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    return kept | {
        "COCODC_PROCESS_ID": str(settings.region_id),
        "COCODC_NUM_PROCESSES": str(settings.num_regions),
        "COCODC_COORDINATOR_ADDRESS": f"{kernel.address(0)}:{_COORDINATOR_PORT}",
        "COCODC_LOCAL_ADDRESS": kernel.address(settings.region_id),
    }


def _make(settings: Settings) -> int:
    """Make the region; returns its TUN device."""
    kernel.enter_new_namespaces()
    usual = pathlib.Path("/etc/hosts")
    path = pathlib.Path(settings.hosts_path)
    numbers = settings.region_id, settings.num_regions
    path.write_text(hosts(usual.read_text(), socket.gethostname(), *numbers))
    kernel.show_file(str(path), str(usual))
    kernel.set_tcp(
        settings.mtu_bytes,
        settings.window_bytes,
        settings.congestion_control,
        settings.restarts_slowly,
    )
    return kernel.open_tun(settings.region_id, settings.mtu_bytes)


def _run(settings: Settings) -> int:
    """Run the command to its end; returns its exit code."""

    def stop(number, _):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        # A timer of 0 would never ring.
        signal.setitimer(signal.ITIMER_REAL, max(settings.grace_s, _SHORTEST_GRACE_S))

    process = subprocess.Popen(
        settings.command,
        cwd=settings.folder,
        env=environment(settings),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=functools.partial(_prepare_command, os.getpid()),
    )
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, _kill_children)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return children.exit_code(process.wait())


def _prepare_command(parent_pid: int) -> None:
    children.die_with_parent(parent_pid, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _children() -> Iterator[int]:
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = path.read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                yield int(path.parent.name)


def _kill_children(*_: object) -> None:
    for pid in _children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _end_all() -> None:
    """Kills descendants until there are none: orphans become children in turn."""
    with contextlib.suppress(ChildProcessError):
        while True:
            _kill_children()
            os.wait()


def main() -> int:
    """Run the region; returns the command's exit code."""
    settings = Settings(**json.loads(sys.argv[1]))
    children.die_with_parent(settings.parent_pid, signal.SIGTERM)
    kernel.adopt_orphans()
    with socket.socket(fileno=settings.socket_fd) as lab:
        try:
            device = _make(settings)
        except (OSError, subprocess.CalledProcessError) as error:
            detail = getattr(error, "stderr", None) or ""
            lab.sendall(f"{error} {detail}".strip().encode())
            return 1
        socket.send_fds(lab, [b"made"], [device])
        os.close(device)
        if not lab.recv(1):
            return 1
    # Until the handlers stand, a request to end waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return _run(settings)
    except OSError as error:
        print(f"cannot run {settings.command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    finally:
        _end_all()


if __name__ == "__main__":
    sys.exit(main())
