"""What a run of the lab is: the regions, their links, the command."""

import dataclasses
import pathlib

from experiments.lab.shaper import Conditions


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

    def region_command(self, region_id: int) -> list[str]:
        """The command of one region."""
        return [word.replace("{region}", str(region_id)) for word in self.command]

    def log_path(self, region_id: int) -> pathlib.Path:
        """Where a region's output goes."""
        return self.logdir / f"region_{region_id}.log"

    @property
    def traffic_path(self) -> pathlib.Path:
        """Where the relay's counters go."""
        return self.logdir / "traffic.json"
