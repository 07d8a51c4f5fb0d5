"""What a program takes at least, by what a chip can do: a roofline.

A device computes, reads and writes its memory, and takes part in collectives inside its
slice at the same time, each at its full published rate; the longest of the three is the
estimate. What crosses between regions adds to it unless the schedule shows it to span
the steps. Nothing runs faster; what runs slower has its reason in something not counted
here (latencies, other work than matrix products, padding).
"""

from __future__ import annotations

import dataclasses

from cocodc_jax.aot.collectives import Collective
from cocodc_jax.chips import Chip


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one call of a program.

    Attributes:
      compute_s: of matrix products.
      hbm_s: of main memory.
      link_s: of collectives inside regions.
      network_s: of collectives between regions that nothing hides.
      hidden_s: of those that span the inner steps.
    """

    compute_s: float
    hbm_s: float
    link_s: float
    network_s: float
    hidden_s: float

    @property
    def seconds(self) -> float:
        """The least time: what spans the steps may take longer than they do."""
        beside = max(self.compute_s, self.hbm_s, self.link_s, self.hidden_s)
        return beside + self.network_s

    @property
    def limit(self) -> str:
        """What it is limited by most."""
        parts = {
            "compute": self.compute_s,
            "memory": self.hbm_s,
            "links": self.link_s,
            "network": max(self.network_s, self.hidden_s),
        }
        return max(parts, key=lambda name: parts[name])


def estimate(
    chip: Chip,
    flops: float,
    hbm_bytes: float,
    collectives: list[Collective],
    between: frozenset[str],
) -> Estimate:
    """Estimate one call of a program.

    Args:
      chip: one device's part of one.
      flops: of a device.
      hbm_bytes: that a device moves.
      collectives: of the program.
      between: axes that lie between regions, over the slower network.
    """

    def seconds(rate: float, is_between: bool, spans: bool | None = None) -> float:
        return sum(
            each.num_bytes * each.times / rate
            for each in collectives
            if bool(between & set(each.axes)) == is_between
            and spans in (None, each.spans)
        )

    return Estimate(
        flops / chip.flops,
        hbm_bytes / chip.hbm_bps,
        seconds(chip.link_bps, False),
        seconds(chip.network_bps, True, False),
        seconds(chip.network_bps, True, True),
    )
