"""Flags of a run whose regions are elastic: addresses, and timeouts."""

import dataclasses

from cocodc_jax.elastic.objects import reach
from cocodc_jax.elastic.place import Place, Timing, read_key
from cocodc_jax.fields import check_choices, check_least, free
from cocodc_jax.run.fault_watch import ON_FAULT


@dataclasses.dataclass(frozen=True)
class ElasticFlags:
    """Addresses and timeouts of the regions of a run, if each is a separate job.

    Attributes:
      region_addresses: host:port of every region (of its process 0), comma-separated,
        in their order; as many as there may ever be.
      via: shared folder or bucket (gs://BUCKET/RUN, s3://BUCKET/RUN) that all regions
        reach, through which messages go in place of sockets; then no region opens a
        port, region_addresses is left out, and regions says how many there may be.
      region_id: index of this region.
      key_file: file with the key that all share, at least 32 bytes, readable by its
        owner only.
      min_regions: minimum number of regions to go on with; more than half of them keeps
        the two parts of a cut network from both going on.
      beat_s: seconds between two heartbeats.
      dead_after_s: seconds of silence after which a region counts as dead; longer than
        a message takes on the slowest link, as heartbeats wait behind it. The copy that
        a region starts from may take longer: the others wait for it.
      grace_s: seconds to wait for further messages of a sync after a quorum has
        arrived.
      quorum_regions: number of messages of a sync to wait for without a timeout, or all
        if fewer regions take part.
      max_behind_syncs: maximum number of decided syncs that a region may be behind,
        more than are in flight at once. A region further behind restarts at the others'
        step, so that they need not keep its messages.
      late_mean: "wait" for a mean that has not arrived when it is due, or train on and
        "merge" it at the next slot, with its actual delay.
      late_message: what happens to the work of a message that came too late for its
        mean: "keep" it in the region, whose next message contains it, or "drop" it.
      on_fault: what to do when a fault of a region or link is detected: "warn",
        "exclude" the region from the means, or "route" messages around the link.
      start_s: seconds to wait until all regions have started.
      outer_digests: write a digest of the outer fragment after every merge to
        syncs.jsonl.
    """

    region_addresses: str = ""
    via: str = free("", is_path=True)
    region_id: int = -1
    key_file: str = free("", is_path=True)
    min_regions: int = 1
    beat_s: float = 0.5
    dead_after_s: float = 10.0
    grace_s: float = 120.0
    quorum_regions: int = 1
    max_behind_syncs: int = 32
    late_mean: str = "wait"
    late_message: str = "keep"
    on_fault: str = "warn"
    start_s: float = 300.0
    outer_digests: bool = False

    def __post_init__(self):
        for name in ("beat_s", "grace_s", "start_s"):
            seconds = getattr(self, name)
            if not 0 < seconds < float("inf"):
                raise ValueError(f"{name}={seconds} must be above 0")

        check_least(self, 1, "max_behind_syncs")
        check_choices(self, on_fault=ON_FAULT)
        if not 3 * self.beat_s <= self.dead_after_s < float("inf"):
            raise ValueError(
                f"dead_after_s={self.dead_after_s} must be at least three times "
                f"beat_s={self.beat_s}"
            )

    def place(self, exchange: str, regions: int) -> Place | None:
        """Return the place of this region, None if regions are not elastic."""
        if exchange != "elastic":
            for name, value in vars(self).items():
                if value != getattr(NOT_ELASTIC, name):
                    raise ValueError(
                        f"{name}={value!r} has no meaning for exchange={exchange!r}; "
                        "use exchange='elastic'"
                    )
            return None
        if not self.region_addresses and not self.via:
            raise ValueError(
                "exchange='elastic' needs region_addresses or via; see --help=all"
            )
        if not self.key_file:
            raise ValueError("exchange='elastic' needs key_file; see --help=all")

        addresses = [address.strip() for address in self.region_addresses.split(",")]
        timing = Timing(
            beat_s=self.beat_s,
            dead_after_s=self.dead_after_s,
            grace_s=self.grace_s,
            start_s=self.start_s,
            quorum=self.quorum_regions,
            max_behind=self.max_behind_syncs,
        )
        place = Place(
            region=self.region_id,
            addresses=tuple(address for address in addresses if address),
            key=read_key(self.key_file),
            timing=timing,
            min_regions=self.min_regions,
            late_mean=self.late_mean,
            late_message=self.late_message,
            via=self.via,
            regions=regions if self.via else 0,
        )
        if self.via:
            reach(self.via)
        return place

    def check_several(self, num_processes: int) -> None:
        """Refuse settings that a region of several processes does not support."""
        if self.late_mean == "merge":
            raise ValueError(
                "late_mean='merge' lets each process see by its own clock that a mean "
                f"is late, and a region of num_processes={num_processes} has several; "
                "use 'wait'"
            )


NOT_ELASTIC = ElasticFlags()
