"""What a simulated region computes and sends."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from cocodc_jax.network.links import check

FORWARD_SHARE = 1 / 3  # a backward pass costs two forward passes


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is computed and sent.

    Attributes:
      fragment_bytes: bytes of one region's message for each fragment, as encoded.
      step_time_s: seconds of an inner step, one number per region.
      num_layers: 1 sends at step boundaries; L > 1 lets each layer travel alone. Layers
        are dealt to fragments in turn (strided).
      host_bytes_per_s: bytes of messages that hosts encode, copy and sum in a second,
        one message after the other, before they enter the network.
      answer_share: bytes of the answer to a region that comes alone over those of its
        message; above 1 where messages are compressed and parameters are not.
    """

    fragment_bytes: tuple[float, ...]
    step_time_s: tuple[float, ...]
    num_layers: int = 1
    host_bytes_per_s: float = np.inf
    answer_share: float = 1.0

    def __post_init__(self):
        for name in ("fragment_bytes", "step_time_s"):
            values = getattr(self, name)
            are_positive = bool(values) and all(0 < v < np.inf for v in values)
            check(are_positive, name, values, "positive numbers")

        for name in ("host_bytes_per_s", "answer_share"):
            check(getattr(self, name) > 0, name, getattr(self, name), "positive")
        if self.num_layers != 1 and self.num_layers < len(self.fragment_bytes):
            raise ValueError(
                f"num_layers={self.num_layers} must be 1 or at least the number of "
                f"fragments, {len(self.fragment_bytes)}"
            )

    @property
    def is_layered(self) -> bool:
        """Whether each layer travels alone."""
        return self.num_layers > 1

    def messages(self, fragments: Sequence[int]) -> list[tuple[int, float]]:
        """Return (layer, bytes) of a sync's messages, in the order they are ready."""
        if not self.is_layered:
            return [(0, sum(self.fragment_bytes[p] for p in fragments))]
        out = []
        for p in fragments:
            layers = range(p, self.num_layers, len(self.fragment_bytes))
            out += [(layer, self.fragment_bytes[p] / len(layers)) for layer in layers]
        return sorted(out, reverse=True)
