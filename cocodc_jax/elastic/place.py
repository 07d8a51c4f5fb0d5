"""A region's settings: its index, all addresses, the shared key and timeouts."""

from __future__ import annotations

import dataclasses
import pathlib

from cocodc_jax.fields import check_choices

MIN_KEY_BYTES = 32
BUCKET_BEAT_S = 2.0
LATE = {"late_mean": ("wait", "merge"), "late_message": ("keep", "drop")}


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long regions wait for one another."""

    beat_s: float = 0.5  # Seconds between two heartbeats.
    # Seconds of silence after which a region counts as dead.
    dead_after_s: float = 10.0
    # Seconds from the message that completes the quorum of a sync to the decision
    # without the others.
    grace_s: float = 120.0
    # Seconds that a region waits for others before it begins alone.
    start_s: float = 60.0
    # Messages that a sync always waits for, or all of them where fewer regions take
    # part.
    quorum: int = 1
    # Syncs decided without a region after which it restarts, at the step of the others.
    max_behind: int = 32


@dataclasses.dataclass(frozen=True)
class Place:
    """A region's index, and what all regions share."""

    region: int  # Index of this region.
    # host:port of every possible region, by index; none with `via`.
    addresses: tuple[str, ...]
    key: bytes = dataclasses.field(repr=False)  # Shared secret, at least 32 bytes.
    timing: Timing = Timing()  # How long regions wait for one another.
    min_regions: int = 1  # How many regions must remain for the run to continue.
    # "wait" for a mean that is not there when it is due, or continue and "merge" it at
    # the next slot.
    late_mean: str = "wait"
    # What happens to the work in a message that missed its mean: "keep" it in the
    # region, or "drop" it.
    late_message: str = "keep"
    # Folder or bucket that carries messages in place of sockets, "" for none.
    via: str = ""
    regions: int = 0  # Number of possible regions, with `via`.

    def __post_init__(self):
        for address in self.addresses:
            host, _, port = address.rpartition(":")
            is_port = port.isdecimal() and 0 < int(port) < 1 << 16
            if not is_port or not host or any(x.isspace() or x in "/*" for x in host):
                raise ValueError(
                    f"region_addresses has {address!r}; it must be host:port"
                )

        if self.via and self.addresses:
            raise ValueError(
                f"via={self.via!r} needs no region_addresses="
                f"{','.join(self.addresses)!r}; leave one out"
            )
        if len(set(self.addresses)) < len(self.addresses):
            raise ValueError(
                f"region_addresses={','.join(self.addresses)} has one address twice; "
                "each region needs its own"
            )

        num = self.num_regions
        what = "regions" if self.via else "region_addresses"
        if not 0 <= self.region < num:
            raise ValueError(
                f"region_id={self.region} must be 0 to {num - 1}, as {what} "
                + (f"is {num}" if self.via else f"has {num}")
            )
        if is_bucket(self.via) and self.timing.beat_s < BUCKET_BEAT_S:
            raise ValueError(
                f"beat_s={self.timing.beat_s:g} is too short for via={self.via!r}: a "
                "bucket is listed once a second, and a request takes part of it; use "
                f"beat_s={BUCKET_BEAT_S:g} and dead_after_s=30"
            )
        if not 1 <= self.min_regions <= num:
            raise ValueError(f"min_regions={self.min_regions} must be 1 to {num}")

        check_choices(self, **LATE)
        if not 1 <= self.timing.quorum <= num:
            raise ValueError(f"quorum_regions={self.timing.quorum} must be 1 to {num}")
        if len(self.key) < MIN_KEY_BYTES:
            raise ValueError(
                f"the key has {len(self.key)} bytes and must have {MIN_KEY_BYTES}: "
                f"make one by head -c {MIN_KEY_BYTES} /dev/urandom > FILE"
            )

    @property
    def num_regions(self) -> int:
        """M, the number of possible regions."""
        return self.regions if self.via else len(self.addresses)


def is_bucket(via: str) -> bool:
    """Return whether a URL names something other than a folder.

    >>> is_bucket("gs://bucket/run"), is_bucket("/mnt/run"), is_bucket("file:///run")
    (True, False, False)
    """
    return "://" in via and not via.startswith("file://")


def read_key(path: str | pathlib.Path) -> bytes:
    """Read the shared key, from a file that no other user may read."""
    path = pathlib.Path(path)
    try:
        if path.stat().st_mode & 0o077:
            raise ValueError(
                f"key_file={str(path)!r} can be read by others; run chmod 600 {path}"
            )
        return path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"key_file={str(path)!r} cannot be read ({error.strerror})"
        ) from error
