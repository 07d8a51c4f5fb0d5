"""The setting that this project recommends, for all programs.

It is Streaming DiLoCo with one bit a value, error feedback and plain averaging, and a
fragment at every step. docs/results/recipe.md has the small models with which it was
measured. With K fragments, and tau steps from a fragment's start to its merge:

    tau <= 2    H = K: a fragment starts at every step
    tau > 2     H = tau, a multiple of K: no fragment starts before its last message is
                merged, and the next message repeats what the merge drops
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

METHOD = "streaming_diloco"
COMPRESS = "ef+sign"
NAME = "recipe"  # What `experiments.compare` calls it.
FRAGMENTS = 4
# The best inner learning rate over that of the presets: 2 to 8 times, up to 0.84M.
INNER_LR_FACTOR = 2
SHORT_DELAY = 2
LONGEST_DELAY = 32  # Steps; longer delays were not measured.


@dataclasses.dataclass(frozen=True)
class Setting:
    """The method's arguments, by their flags."""

    num_fragments: int
    sync_interval: int
    delay_steps: int
    mixing_alpha: float
    outer_lr: float
    outer_momentum: float
    merge_feedback: bool = False

    @property
    def flags(self) -> dict[str, Any]:
        """Flags of `experiments.train`, without the inner learning rate."""
        flags = {"method": METHOD, "compress": COMPRESS} | dataclasses.asdict(self)
        if not self.merge_feedback:
            del flags["merge_feedback"]
        return flags


def setting(num_fragments: int = FRAGMENTS, delay_steps: int = 1) -> Setting:
    """Return the setting for a number of fragments and a delay in steps.

    A delay of more than two steps becomes a multiple of the fragments.

    >>> setting(4, 1).sync_interval, setting(4, 6).sync_interval
    (4, 8)
    """
    if delay_steps <= SHORT_DELAY:
        return Setting(
            num_fragments,
            sync_interval=max(num_fragments, delay_steps),
            delay_steps=delay_steps,
            mixing_alpha=0.25,
            outer_lr=1.0,
            outer_momentum=0.0,
        )

    sync_interval = math.ceil(delay_steps / num_fragments) * num_fragments
    return Setting(
        num_fragments,
        sync_interval,
        delay_steps=sync_interval,
        mixing_alpha=0.5,
        outer_lr=0.7,
        outer_momentum=0.5,
        merge_feedback=True,
    )


def words(flags: Mapping[str, Any]) -> str:
    """Return flags as words of a command line.

    >>> words({"method": "diloco", "merge_feedback": True})
    '--method=diloco --merge_feedback'
    """
    return " ".join(
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in flags.items()
    )
