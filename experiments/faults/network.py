"""Regions in network namespaces, joined by a router that can cut them; for root only.

Each region has a namespace and an address. A namespace between them forwards packets. A
cut is a rule of that router that drops packets from one region to another. So it can be
of one direction, and connections stay open as in a real network.
"""

import os
import subprocess
from collections.abc import Iterable, Sequence

PORT = 9876
Pair = tuple[int, int]


class Network:
    """The namespaces of some regions; use as a context manager."""

    def __init__(self, num_regions: int):
        self._num = num_regions
        self._name = f"c{os.getpid()}"
        self._cut: set[Pair] = set()

    @property
    def addresses(self) -> tuple[str, ...]:
        """host:port of each region."""
        return tuple(f"{self._host(region)}:{PORT}" for region in range(self._num))

    def inside(self, region: int) -> list[str]:
        """Return the words that start a command in a region's namespace."""
        return ["ip", "netns", "exec", f"{self._name}r{region}"]

    def __enter__(self) -> "Network":
        try:
            self._ip("netns", "add", self._hub)
            for region in range(self._num):
                self._join(region)
            forward = ["sysctl", "-qw", "net.ipv4.ip_forward=1"]
            self._run(["ip", "netns", "exec", self._hub, *forward])
        except BaseException:
            self.__exit__()
            raise

        return self

    def __exit__(self, *exception: object) -> None:
        names = [self._hub, *(f"{self._name}r{r}" for r in range(self._num))]
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)

    def cut(self, pairs: Iterable[Pair]) -> None:
        """Drop packets from one region to another, for each pair."""
        for sender, receiver in set(pairs) - self._cut:
            self._rule("add", sender, receiver)
            self._cut.add((sender, receiver))

    def mend(self) -> None:
        """End all cuts."""
        for sender, receiver in self._cut:
            self._rule("del", sender, receiver)
        self._cut = set()

    @property
    def _hub(self) -> str:
        return f"{self._name}hub"

    def _host(self, region: int) -> str:
        return f"10.77.{region}.2"

    def _rule(self, action: str, sender: int, receiver: int) -> None:
        source = self._host(sender)
        target = self._host(receiver)
        self._ip(
            "-n", self._hub, "rule", action, "from", source, "to", target, "blackhole"
        )

    def _join(self, region: int) -> None:
        space = f"{self._name}r{region}"
        near = f"{self._name}a{region}"
        far = f"{self._name}b{region}"
        self._ip("netns", "add", space)
        self._ip("link", "add", near, "type", "veth", "peer", "name", far)
        self._ip("link", "set", near, "netns", space)
        self._ip("link", "set", far, "netns", self._hub)
        self._ip("-n", space, "addr", "add", f"{self._host(region)}/24", "dev", near)
        gateway = f"10.77.{region}.1"
        self._ip("-n", self._hub, "addr", "add", f"{gateway}/24", "dev", far)

        for of, device in ((space, near), (space, "lo"), (self._hub, far)):
            self._ip("-n", of, "link", "set", device, "up")
        self._ip("-n", space, "route", "add", "default", "via", gateway)

    def _ip(self, *words: str) -> None:
        self._run(["ip", *words])

    def _run(self, command: Sequence[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def pairs_of(detail: str, regions: Sequence[int], num_regions: int) -> set[Pair]:
    """Return the pairs of sender and receiver of a cut; see `plans.Fault`."""
    if detail == "one way":
        sender, receiver = regions
        return {(sender, receiver)}
    others = set(range(num_regions)) - set(regions)
    apart = {(a, b) for a in regions for b in others}
    return apart | {(b, a) for a, b in apart}
