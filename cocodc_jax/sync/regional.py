"""Outer optimizers that every region runs for itself, on outer parameters of its own.

Most methods have one outer model, and a region only sends its pseudo-gradient. Where
regions are never made equal (NoLoCo, decoupled momentum), or correct the mean by what
they alone know (eager updates), outer parameters and optimizer state are *regional*:

    message_m, state_m = send(params_m, state_m, local_m)
    params_m, state_m = receive(params_m, state_m, arrived_m)

where `arrived_m` is the mean of what the messages of the region's group decode to.
Each is a pure function of one region's fragment; the runtime maps it over regions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from cocodc_jax.transforms.compressor import Compressor

PyTree = Any

GROUPS = ("all", "pairs")


@dataclasses.dataclass(frozen=True)
class RegionalOuter:
    """An outer optimizer of regional parameters.

    Attributes:
      name: for records and error messages.
      init: `init(params, compressor) -> state` of one region's fragment.
      send: `send(params, state, local, compressor, key) -> (message, state)`: `params`
        the region's outer fragment, `local` its own; pseudo-gradients are old minus
        new, `params - local`. The message is what `compressor.encode` gives.
      receive: `receive(params, state, arrived, num_regions) -> (params, state)`.
      group: whose messages a region gets the mean of: "all", or "pairs" (itself and a
        partner, drawn anew for every sync).
      seed: of the draw of pairs, the same on every region.
    """

    name: str
    init: Callable[[PyTree, Compressor], PyTree]
    send: Callable[..., tuple[PyTree, PyTree]]
    receive: Callable[..., tuple[PyTree, PyTree]]
    group: str = "all"
    seed: int = 0

    def __post_init__(self):
        """Checks the group.

        Raises:
          ValueError: if it is none of `GROUPS`.
        """
        if self.group not in GROUPS:
            raise ValueError(f"group={self.group!r} is unknown; use one of {GROUPS}")
