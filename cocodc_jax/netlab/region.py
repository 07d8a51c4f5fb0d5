"""The process that keeps one region: its namespaces, its device, its command.

`python -m cocodc_jax.netlab.region` reads the lab's pickled values from standard input
(the plan, the region's number, the folder to run in, a socket to the lab, the lab's
process). It makes the region, sends its TUN device over the socket, waits there for a
byte, runs the command, and ends with its exit code (128 + n after signal n). It kills
all processes that the command leaves running. On SIGTERM, and when the lab is gone, the
command has `grace_s` to end.

Network and mount namespaces are anonymous: no file names them, so the kernel removes
them, with the device in them, when their last process or descriptor is gone. Nothing
has to clean up, not even after kill -9. (`nsenter --net --target PID` looks inside.)
"""

import contextlib
import ctypes
import fcntl
import functools
import ipaddress
import os
import pathlib
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys

from cocodc_jax.netlab import children
from cocodc_jax.netlab.children import libc
from cocodc_jax.netlab.plan import Plan

DEVICE = "wan0"
MAX_REGIONS = 250

_NETWORK = ipaddress.ip_network("10.77.0.0/24")
_TUN_PATH = "/dev/net/tun"
_CLONE_NEWNS = 0x00020000
_CLONE_NEWNET = 0x40000000
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_PR_SET_CHILD_SUBREAPER = 36
_TUNSETIFF = 0x400454CA
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_QUEUE_PACKETS = 10000  # In the device; the relay's queues are shorter.

_FIRST_WINDOW_PACKETS = 16
_TCP = pathlib.Path("/proc/sys/net/ipv4")
_COORDINATOR_PORT = 29400  # Free, as the namespace is new.
_SHORTEST_GRACE_S = 1e-3


def missing() -> list[str]:
    """Return what the lab needs and this process lacks, each with a remedy."""
    lacks = []
    status = pathlib.Path("/proc/self/status").read_text()
    effective = int(status.split("CapEff:")[1].split()[0], 16)

    absent = [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    if absent:
        lacks.append(
            f"the permission {' and '.join(absent)} (run as root, or where the kernel "
            "lets users make namespaces, after `unshare --user --map-root-user`)"
        )

    if shutil.which("ip") is None:
        lacks.append("the program `ip` (package iproute2)")
    try:
        os.close(os.open(_TUN_PATH, os.O_RDWR))
    except OSError as error:
        lacks.append(f"{_TUN_PATH} ({error.strerror}; kernel module tun)")

    return lacks


def address(region_id: int) -> str:
    """Return the region's IPv4 address."""
    return str(_NETWORK[region_id + 1])


def congestion_controls() -> list[str]:
    """Return the congestion controls that a new network namespace may use."""
    return (_TCP / "tcp_allowed_congestion_control").read_text().split()


def hosts(text: str, hostname: str, region_id: int, num_regions: int) -> str:
    """Return a hosts file in which the host's own name is the region's address."""
    entries = [line.partition("#")[0].split() for line in text.splitlines()]
    kept = [[name for name in entry if name != hostname] for entry in entries]
    lines = [" ".join(entry) for entry in kept if len(entry) > 1]
    lines.append(f"{address(region_id)} {hostname}")
    lines += [f"{address(i)} region{i}" for i in range(num_regions)]
    return "\n".join(lines) + "\n"


def environment(region_id: int, num_regions: int) -> dict[str, str]:
    """Return the command's environment: the lab's, the region's, and no proxies.

    A proxy cannot be reached from inside, and gRPC would use it for the coordinator.
    """
    kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    return kept | {
        "COCODC_PROCESS_ID": str(region_id),
        "COCODC_NUM_PROCESSES": str(num_regions),
        "COCODC_COORDINATOR_ADDRESS": f"{address(0)}:{_COORDINATOR_PORT}",
        "COCODC_LOCAL_ADDRESS": address(region_id),
    }


def _make(plan: Plan, region_id: int) -> int:
    """Make the region; return its TUN device."""
    children.call(libc.unshare, _CLONE_NEWNET | _CLONE_NEWNS)
    # Mounts made from here on stay here.
    _mount(b"none", b"/", _MS_REC | _MS_PRIVATE)

    usual = pathlib.Path("/etc/hosts")
    path = plan.logdir / f"region_{region_id}.hosts"
    text = hosts(usual.read_text(), socket.gethostname(), region_id, len(plan.regions))
    path.write_text(text)
    _mount(os.fsencode(path), os.fsencode(usual), _MS_BIND)

    _set_tcp(plan)
    return _open_tun(region_id, plan.mtu_bytes)


def _open_tun(region_id: int, mtu_bytes: int) -> int:
    """Make the region's device, give it its address, and return it, non-blocking."""
    # IPv4 only: the relay supports no other, and no program may choose another.
    if (ipv6 := pathlib.Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")).exists():
        ipv6.write_text("1")
    fd = os.open(_TUN_PATH, os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(fd, _TUNSETIFF, request)
    commands = f"""link set lo up
link set {DEVICE} mtu {mtu_bytes} txqueuelen {_QUEUE_PACKETS} up
addr add {address(region_id)}/{_NETWORK.prefixlen} dev {DEVICE}
"""
    ip = ["ip", "-batch", "-"]
    subprocess.run(ip, input=commands, text=True, check=True, capture_output=True)

    return fd


def _set_tcp(plan: Plan) -> None:
    """Set TCP in this network namespace."""
    least = max(plan.window_bytes, _FIRST_WINDOW_PACKETS * plan.mtu_bytes)
    for name in ("tcp_rmem", "tcp_wmem"):
        low, usual, high = map(int, (_TCP / name).read_text().split())
        usual = max(usual, least)
        (_TCP / name).write_text(f"{low} {usual} {max(usual, high)}")
    (_TCP / "tcp_congestion_control").write_text(plan.congestion_control)
    (_TCP / "tcp_slow_start_after_idle").write_text(str(int(plan.restarts_slowly)))


def _mount(source: bytes, target: bytes, flags: int) -> None:
    children.call(libc.mount, source, target, None, ctypes.c_ulong(flags), None)


def _run(plan: Plan, region_id: int, folder: str) -> int:
    """Run the command to its end; return its exit code."""

    def stop(number: int, frame: object) -> None:
        del number, frame
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        # A timer of 0 would never ring.
        signal.setitimer(signal.ITIMER_REAL, max(plan.grace_s, _SHORTEST_GRACE_S))

    process = subprocess.Popen(
        plan.region_command(region_id),
        cwd=folder,
        env=environment(region_id, len(plan.regions)),
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


def _kill_children(*_: object) -> None:
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # It has ended.
            parent = path.read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                os.kill(int(path.parent.name), signal.SIGKILL)


def _end_all() -> None:
    """Kill descendants until none is left: orphans become children in turn."""
    with contextlib.suppress(ChildProcessError):
        while True:
            _kill_children()
            os.wait()


def main() -> int:
    """Run the region; return the command's exit code."""
    plan, region_id, folder, socket_fd, parent_pid = pickle.load(sys.stdin.buffer)
    children.die_with_parent(parent_pid, signal.SIGTERM)
    # Descendants whose parents end become children of this process.
    children.call(libc.prctl, _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    with socket.socket(fileno=socket_fd) as lab:
        try:
            device = _make(plan, region_id)
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
        return _run(plan, region_id, folder)
    except OSError as error:
        program = plan.region_command(region_id)[0]
        print(f"cannot run {program}: {error.strerror}", file=sys.stderr)
        return 127
    finally:
        _end_all()


if __name__ == "__main__":
    sys.exit(main())
