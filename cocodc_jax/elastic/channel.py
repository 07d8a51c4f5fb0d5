"""What carries messages between regions: sockets, or objects of a store.

What is sent may be lost, come twice or in another order: the protocol asks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cocodc_jax.elastic.place import Place


class Channel(Protocol):
    """Sends and receives frames; one thread alone may use it, but for `wake`."""

    def receive(self, seconds: float) -> list[list[bytes]]:
        """Return new messages; waits for one, for `wake`, or so many seconds."""
        ...

    def send(self, regions: Sequence[int], frames: list[bytes]) -> None:
        """Send one message to some regions, without waiting for them."""
        ...

    def wake(self) -> None:
        """Have `receive` return now; any thread may call this."""
        ...

    def close(self) -> None:
        """Send what is still to be sent, for a few seconds."""
        ...


def open_channel(place: Place, boot: int, max_frame_bytes: int) -> Channel:
    """Return the channel of a region.

    Args:
      place: of the region.
      boot: see `Seat`.
      max_frame_bytes: of the largest row or array that can be right.

    Raises:
      ImportError: if a package is missing.
      OSError: if the address cannot be listened at.
    """
    if place.via:
        from cocodc_jax.elastic.objects import Objects

        return Objects(place, boot, max_frame_bytes)
    from cocodc_jax.elastic.sockets import Sockets

    return Sockets(place, max_frame_bytes)
