"""What the lab asks of the Linux kernel: namespaces, TUN devices, adoption.

Network and mount namespaces are anonymous: nothing names them, so the kernel takes
them down, with the device in them, when the last process or descriptor in them is
gone. No clean-up can be forgotten, also after kill -9. (A user looks inside one with
`nsenter --net --target PID`.)
"""

import ctypes
import fcntl
import ipaddress
import os
import pathlib
import shutil
import struct
import subprocess

DEVICE = "wan0"
MAX_REGIONS = 250

_NETWORK = ipaddress.ip_network("10.77.0.0/24")
_TUN_PATH = "/dev/net/tun"
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_SET_CHILD_SUBREAPER = 36
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_QUEUE_PACKETS = 10000  # in the device; the relay's queues are the ones that count

_FIRST_WINDOW_PACKETS = 16

_TCP = pathlib.Path("/proc/sys/net/ipv4")

_libc = ctypes.CDLL(None, use_errno=True)


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


def packed_address(region_id: int) -> bytes:
    """Return the region's address as it stands in packets."""
    return _NETWORK[region_id + 1].packed


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parents end."""
    _call(_libc.prctl, _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def enter_new_namespaces() -> None:
    """Move this process into new network and mount namespaces."""
    _call(_libc.unshare, _CLONE_NEWNET | _CLONE_NEWNS)
    # Mounts made from here on stay here.
    _mount(b"none", b"/", _MS_REC | _MS_PRIVATE)


def show_file(path: str, instead_of: str) -> None:
    """Show a file in place of another, in this mount namespace only."""
    _mount(os.fsencode(path), os.fsencode(instead_of), _MS_BIND)


def open_tun(region_id: int, mtu_bytes: int) -> int:
    """Make the region's device, give it its address, and return it, non-blocking."""
    # IPv4 only: the relay knows no other, and nobody shall pick another address.
    if (ipv6 := pathlib.Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")).exists():
        ipv6.write_text("1")
    fd = os.open(_TUN_PATH, os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(fd, _TUNSETIFF, request)
    commands = f"""link set lo up
link set {DEVICE} mtu {mtu_bytes} txqueuelen {_QUEUE_PACKETS} up
addr add {address(region_id)}/{_NETWORK.prefixlen} dev {DEVICE}
"""
    subprocess.run(
        ["ip", "-batch", "-"],
        input=commands,
        text=True,
        check=True,
        capture_output=True,
    )
    return fd


def congestion_controls() -> list[str]:
    """Return the algorithms of TCP that a network namespace of its own may use."""
    return (_TCP / "tcp_allowed_congestion_control").read_text().split()


def set_tcp(
    mtu_bytes: int, window_bytes: int, congestion_control: str, restarts_slowly: bool
) -> None:
    """Set TCP in this network namespace."""
    for name in ("tcp_rmem", "tcp_wmem"):
        low, usual, high = map(int, (_TCP / name).read_text().split())
        usual = max(usual, window_bytes, _FIRST_WINDOW_PACKETS * mtu_bytes)
        (_TCP / name).write_text(f"{low} {usual} {max(usual, high)}")
    (_TCP / "tcp_congestion_control").write_text(congestion_control)
    (_TCP / "tcp_slow_start_after_idle").write_text(str(int(restarts_slowly)))


def _mount(source: bytes, target: bytes, flags: int) -> None:
    _call(_libc.mount, source, target, None, ctypes.c_ulong(flags), None)


def _call(function, *arguments) -> None:
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function.__name__}: {os.strerror(number)}")
