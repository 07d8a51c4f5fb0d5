"""What a run of the lab is: the regions, their links, the command."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence

from cocodc_jax.netlab import schedule
from cocodc_jax.netlab.shaper import Conditions
from cocodc_jax.network.links import Topology


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run of the lab.

    Attributes:
      regions: names, one per region.
      command: program and arguments; `{region}` becomes the region's number.
      logdir: folder for region_N.log, region_N.hosts and traffic.json.
      conditions: of the links, over time.
      mtu_bytes: largest packet.
      buffer_s: longest wait in a queue of the relay.
      window_bytes: TCP may have so much under way in each connection.
      congestion_control: of TCP, the kernel's name.
      restarts_slowly: whether TCP begins with a small window again after a rest.
      seed: of loss and jitter.
      grace_s: between asking a command to end and killing it.
      changes_path: a file; the times of the conditions count from when it is there,
        None is from the lab's start.
    """

    regions: tuple[str, ...]
    command: tuple[str, ...]
    logdir: pathlib.Path
    conditions: tuple[Conditions, ...]
    mtu_bytes: int
    buffer_s: float
    window_bytes: int
    congestion_control: str
    restarts_slowly: bool
    seed: int
    grace_s: float
    changes_path: pathlib.Path | None = None

    def region_command(self, region_id: int) -> list[str]:
        """Return the command of one region."""
        return [word.replace("{region}", str(region_id)) for word in self.command]

    def log_path(self, region_id: int) -> pathlib.Path:
        """Where a region's output goes."""
        return self.logdir / f"region_{region_id}.log"

    @property
    def traffic_path(self) -> pathlib.Path:
        """Where the relay's counters go."""
        return self.logdir / "traffic.json"

    def summary(self) -> str:
        """Return what the relay has counted, on one line."""
        try:
            traffic = json.loads(self.traffic_path.read_text())
        except FileNotFoundError:
            return "wan: nothing was counted"
        sent, delivered = (
            sum(map(sum, traffic[name])) for name in ("sent_bytes", "delivered_bytes")
        )
        return (
            f"wan: {traffic['wall_s']:.1f} s, {sent / 1e6:.3f} MB sent, "
            f"{delivered / 1e6:.3f} MB delivered, relay busy "
            f"{traffic['relay_cpu_s'] / traffic['wall_s']:.0%} of a core, packets late "
            f"by {traffic['mean_late_s'] * 1000:.1f} ms, at most "
            f"{traffic['max_late_s'] * 1000:.1f}"
        )


def make_plan(
    topology: Topology,
    command: Sequence[str],
    logdir: pathlib.Path,
    *,
    region_bps: float = math.inf,
    mtu_bytes: int | None = None,
    buffer_s: float = math.inf,
    congestion_control: str = "reno",
    restarts_slowly: bool = False,
    seed: int = 0,
    grace_s: float = 5.0,
) -> Plan:
    """Plans a run over a network, with sizes that suit its links as they usually are.

    Args:
      topology: links and their changes.
      command: program and arguments; `{region}` becomes the region's number.
      logdir: folder for logs and counters.
      region_bps: bits per second of all that a region sends, and of all it receives.
      mtu_bytes: largest packet; None is what the slowest link passes in a millisecond.
      buffer_s: longest wait in a queue of the relay.
      congestion_control: of TCP, the kernel's name.
      restarts_slowly: whether TCP begins with a small window again after a rest.
      seed: of loss and jitter.
      grace_s: between asking a command to end and killing it.
    """
    undisturbed = dataclasses.replace(topology, changes=())
    usual = schedule.conditions_over_time(undisturbed, region_bps)[0]
    return Plan(
        regions=topology.regions,
        command=tuple(command),
        logdir=logdir,
        conditions=schedule.conditions_over_time(topology, region_bps),
        mtu_bytes=mtu_bytes or schedule.usual_mtu_bytes(usual),
        buffer_s=buffer_s,
        window_bytes=schedule.usual_window_bytes(usual),
        congestion_control=congestion_control,
        restarts_slowly=restarts_slowly,
        seed=seed,
        grace_s=grace_s,
    )
