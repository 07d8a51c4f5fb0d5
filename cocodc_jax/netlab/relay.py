"""The process that carries packets between the regions' TUN devices.

`python -m cocodc_jax.netlab.relay` reads the lab's pickled values from standard input
(the plan, the devices' file descriptors, the lab's process), prints "ready", and runs
until SIGTERM. It uses the standard library only and one thread, and sleeps when no
packet is due; a packet may be delivered up to `TICK_S` late.
"""

import contextlib
import dataclasses
import json
import math
import os
import pickle
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from cocodc_jax.netlab import children, region
from cocodc_jax.netlab.plan import Plan
from cocodc_jax.netlab.shaper import Shaper

TICK_S = 0.0005
_MAX_PACKET_BYTES = 65536
_BATCH_PACKETS = 64  # Of one region, before the next one's.
_REPORT_S = 1.0
_PRIORITY = 1  # The lowest real-time priority.
_IDLE_S = 0.1  # `select` does not return on a signal to stop.


class Relay:
    """Reads packets, lets the shaper hold them, and writes those that are due."""

    def __init__(self, plan: Plan, devices: Sequence[int]):
        """Set up an idle relay.

        `devices` has one non-blocking file descriptor per region.
        """
        self._plan = plan
        self._devices = devices
        self._shaper = Shaper(plan.conditions, plan.buffer_s, plan.seed)

        if plan.changes_path:
            self._shaper.changes_from_s = math.inf
        regions = range(len(devices))
        self._region_of = {socket.inet_aton(region.address(i)): i for i in regions}
        self._source_of = {devices[i]: i for i in regions}
        self._start_s = time.monotonic()
        self._is_stopped = False
        self._handed_over = 0  # packets
        self._late_s = self._max_late_s = 0.0  # their sum, and the most of one

    def run(self) -> None:
        """Carry packets until `stop` is called, then write the counters."""
        report_s = look_s = 0.0
        while not self._is_stopped:
            wait_s = min(self._shaper.next_s - self._now_s(), _IDLE_S)
            ready, _, _ = select.select(self._devices, (), (), max(TICK_S, wait_s))
            for fd in ready:
                self._read(fd)

            self._write_due()
            if self._now_s() >= look_s:
                self._look_for_changes()
                look_s = self._now_s() + _IDLE_S

            if self._now_s() >= report_s:
                self.report()
                report_s = self._now_s() + _REPORT_S

        self.report()

    def stop(self, *_: Any) -> None:
        """End `run`; a signal handler."""
        self._is_stopped = True

    def report(self) -> None:
        """Write the counters; a reader never sees half a file."""
        table = {
            "regions": self._plan.regions,
            "wall_s": self._now_s(),
            "relay_cpu_s": time.process_time(),
            "mean_late_s": self._late_s / max(1, self._handed_over),
            "max_late_s": self._max_late_s,
            **dataclasses.asdict(self._shaper.traffic),
        }

        path = self._plan.traffic_path
        partial = path.with_name(f"{path.name}.partial")
        lines = (f'"{name}": {json.dumps(value)}' for name, value in table.items())
        partial.write_text("{" + ",\n ".join(lines) + "}\n")
        partial.replace(path)

    def _look_for_changes(self) -> None:
        """Start the conditions' clock once the file that it waits for exists."""
        path = self._plan.changes_path
        if math.isinf(self._shaper.changes_from_s) and path and path.exists():
            self._shaper.changes_from_s = self._now_s()

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    def _read(self, fd: int) -> None:
        now_s = self._now_s()
        source = self._source_of[fd]
        for _ in range(_BATCH_PACKETS):
            try:
                packet = os.read(fd, _MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            # The last four bytes of an IPv4 header without options: where it goes.
            target = self._region_of.get(packet[16:20])
            if target is not None and packet[0] >> 4 == 4:
                self._shaper.send(now_s, source, target, packet)

    def _write_due(self) -> None:
        now_s = self._now_s()
        late_s = now_s - self._shaper.next_s
        due = self._shaper.arrivals(now_s)
        for target, packet in due:
            # To a device that the command has taken down: as to a cut cable.
            with contextlib.suppress(OSError):
                os.write(self._devices[target], packet)

        if due:  # The first of a batch is the latest.
            self._handed_over += len(due)
            self._late_s += len(due) * late_s
            self._max_late_s = max(self._max_late_s, late_s)


def main() -> None:
    """Run the relay until SIGTERM or until the parent is gone."""
    plan, devices, parent_pid = pickle.load(sys.stdin.buffer)
    children.die_with_parent(parent_pid, signal.SIGTERM)
    # Ahead of the commands, which may use every core, if permissions allow it.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
    relay = Relay(plan, devices)
    signal.signal(signal.SIGTERM, relay.stop)
    print("ready", flush=True)
    relay.run()


if __name__ == "__main__":
    main()
