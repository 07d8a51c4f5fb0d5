"""Which fragments a method sends at which step, and how late it merges them.

Steps are counted when done: a sync that starts at step t sees the parameters after t
inner steps. Data parallel sends everything every step, DiLoCo (arXiv 2311.08105)
everything every H steps, Streaming DiLoCo (arXiv 2501.18512) fragment p at the offset
floor(p H / K) of every H steps, CoCoDC (arXiv 2504.17672) one fragment every
h = floor(H / N) steps. CoCoDC picks the fragment by its change rate,
which a network model does not know: here the one that has waited longest is sent, never
one in flight. With fragments of about equal bytes the times are the same.
"""

import dataclasses
from collections.abc import Collection, Sequence

METHODS = ("data_parallel", "diloco", "streaming_diloco", "cocodc")

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What is sent when.

    Attributes:
      method: one of `METHODS`.
      num_fragments: K; data parallel and DiLoCo send all of them together.
      sync_interval: H, in steps; 1 for data parallel.
      delay_steps: tau, steps between the start of a sync and its merge, or "auto":
        merged at the first step at which it has arrived in every region.
      syncs_per_interval: N, for CoCoDC only; None means K.
      max_delay_steps: with "auto", merged (and waited for) after so many steps at the
        latest; None means H - 1.
    """

    method: str
    num_fragments: int = 1
    sync_interval: int = 1
    delay_steps: int | str = 0
    syncs_per_interval: int | None = None
    max_delay_steps: int | None = None

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} must be one of {METHODS}")
        for name in ("num_fragments", "sync_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        self._check_delay()
        if self.method == "data_parallel" and self.sync_interval != 1:
            raise ValueError(
                f"sync_interval={self.sync_interval} must be 1 for data_parallel"
            )
        if self.is_whole_model:
            return
        if self.num_fragments > self.sync_interval:
            raise ValueError(
                f"num_fragments={self.num_fragments} must not be above sync_interval="
                f"{self.sync_interval}: each fragment goes once in an interval"
            )
        if not self.num_fragments <= self.num_syncs <= self.sync_interval:
            raise ValueError(
                f"syncs_per_interval={self.num_syncs} must be between num_fragments="
                f"{self.num_fragments} and sync_interval={self.sync_interval}"
            )

    def _check_delay(self) -> None:
        delay = self.delay_steps
        if delay != AUTO and not isinstance(delay, int):
            raise ValueError(f"delay_steps={delay!r} must be a number or {AUTO!r}")
        if self.is_whole_model and delay != 0:
            raise ValueError(f"delay_steps={delay!r} must be 0 for {self.method}")
        name = "max_delay_steps" if delay == AUTO else "delay_steps"
        if not self.is_whole_model and not 0 <= self.max_delay < self.sync_interval:
            raise ValueError(
                f"{name}={self.max_delay} must be at least 0 and below sync_interval="
                f"{self.sync_interval}"
            )

    @property
    def is_whole_model(self) -> bool:
        """Whether every sync carries the whole model."""
        return self.method in ("data_parallel", "diloco")

    @property
    def num_syncs(self) -> int:
        """Syncs per `sync_interval` steps."""
        if self.is_whole_model:
            return 1
        if self.method == "cocodc" and self.syncs_per_interval is not None:
            return self.syncs_per_interval
        return self.num_fragments

    @property
    def slot_steps(self) -> int:
        """h, steps between two starts of CoCoDC."""
        return self.sync_interval // self.num_syncs

    @property
    def max_delay(self) -> int:
        """Steps after which a sync is merged at the latest."""
        if isinstance(self.delay_steps, int):
            return self.delay_steps
        if self.max_delay_steps is None:
            return self.sync_interval - 1
        return self.max_delay_steps

    def is_start(self, step: int) -> bool:
        """Whether some sync starts after `step` inner steps."""
        if self.method == "cocodc":
            return step % self.slot_steps == 0
        return step % self.sync_interval in self._offsets()

    def _offsets(self) -> tuple[int, ...]:
        if self.is_whole_model:
            return (0,)
        interval, num = self.sync_interval, self.num_fragments
        return tuple(p * interval // num for p in range(num))

    def starts(
        self, step: int, in_flight: Collection[int], last_sent: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Returns the syncs that start at a step, each a tuple of fragment ids.

        Args:
          step: inner steps done, at least 1.
          in_flight: fragments sent and not merged yet.
          last_sent: step at which each fragment was last sent, -1 for never.
        """
        if self.is_whole_model:
            return [tuple(range(self.num_fragments))]
        if self.method == "cocodc":
            free = [p for p in range(self.num_fragments) if p not in in_flight]
            return [(min(free, key=lambda p: (last_sent[p], p)),)] if free else []
        phase = step % self.sync_interval
        return [(p,) for p, offset in enumerate(self._offsets()) if offset == phase]
