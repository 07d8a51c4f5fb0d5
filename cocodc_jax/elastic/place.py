"""A region's settings: its index, all addresses, the shared key and timeouts."""

from __future__ import annotations

import dataclasses
import pathlib

from cocodc_jax.elastic.failure_detector import Timing

MIN_KEY_BYTES = 32
LATE = {"late_mean": ("wait", "merge"), "late_message": ("keep", "drop")}


@dataclasses.dataclass(frozen=True)
class Place:
    """A region's index, and what all regions share.

    Attributes:
      region: index of this region.
      addresses: host:port of every possible region, by index.
      key: shared secret, at least 32 bytes.
      timing: how long regions wait for one another.
      min_regions: how many regions must remain for the run to continue.
      late_mean: "wait" for a mean that is not there when it is due, or continue and
        "merge" it at the next slot.
      late_message: what happens to the work in a message that missed its mean: "keep"
        it in the region, or "drop" it.
    """

    region: int
    addresses: tuple[str, ...]
    key: bytes = dataclasses.field(repr=False)
    timing: Timing = Timing()
    min_regions: int = 1
    late_mean: str = "wait"
    late_message: str = "keep"

    def __post_init__(self):
        """Validate the settings.

        Raises:
          ValueError: with the argument, its value and what would be right.
        """
        for address in self.addresses:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError(
                    f"region_addresses has {address!r}; it must be host:port"
                )
        num = len(self.addresses)
        if len(set(self.addresses)) < num:
            raise ValueError(
                f"region_addresses={','.join(self.addresses)} has one address twice; "
                "each region needs its own"
            )
        if not 0 <= self.region < num:
            raise ValueError(
                f"region_id={self.region} must be 0 to {num - 1}: region_addresses has "
                f"{num}"
            )
        if not 1 <= self.min_regions <= num:
            raise ValueError(f"min_regions={self.min_regions} must be 1 to {num}")
        for name, words in LATE.items():
            if getattr(self, name) not in words:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown; use one of {words}"
                )
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
        return len(self.addresses)


def read_key(path: str | pathlib.Path) -> bytes:
    """Read the shared key.

    Raises:
      ValueError: if the file cannot be read, or other users may read it.
    """
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
