"""What regions exchange at every inner step, in place of their own gradient.

Every region turns its gradient into a message. From all messages each region computes
the same gradient for its inner optimizer. In data parallelism the message is the
gradient, and the result is the mean. Programs map `send` over regions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from cocodc_jax.sync.messages import mean_of_decoded
from cocodc_jax.transforms.compressor import Compressor, message_bytes
from cocodc_jax.transforms.numerics import widen

PyTree = Any


@dataclasses.dataclass(frozen=True)
class PerStep:
    """An exchange at every step.

    Attributes:
      name: for records and error messages.
      init: `init(params) -> state` of one region.
      send: `send(gradient, state, key) -> (message, state)`. Where the gradient is not
        finite, the state must stay as it was, and `receive` leave the message out, as
        with compressors of `keep_finite`.
      receive: `receive(messages) -> gradient`, every leaf of `messages` with a leading
        region axis, `[M, ...]`. None: the message is a tree like the gradient, and is
        averaged, without gathering.
      compressed_by: `compressed_by(compressor) -> PerStep`, the same with its messages
        compressed; None if unsupported.
      why_uncompressed: why it is unsupported, if so.
    """

    name: str
    init: Callable[[PyTree], PyTree]
    send: Callable[..., tuple[PyTree, PyTree]]
    receive: Callable[[PyTree], PyTree] | None = None
    compressed_by: Callable[[Compressor], PerStep] | None = None
    why_uncompressed: str = "its messages cannot be encoded further"

    def compressed(self, compressor: Compressor) -> PerStep:
        """Return the same with its messages compressed."""
        if self.compressed_by is None:
            raise ValueError(self.why_uncompressed)
        return self.compressed_by(compressor)

    def num_bytes(self, params: PyTree) -> int:
        """Return the bytes that one region, with parameters so shaped, sends a step."""

        def message(gradient):
            sent = self.send(gradient, self.init(gradient), jax.random.key(0))[0]
            # What is not decoded is summed as it is, in at least float32.
            return sent if self.receive else jax.tree.map(widen, sent)

        return message_bytes(jax.eval_shape(message, params))


def mean_gradients() -> PerStep:
    """Average the gradients uncompressed: data parallelism."""
    return PerStep(
        "mean_gradients",
        lambda params: (),
        lambda gradient, state, key: (gradient, state),
        compressed_by=compressed_gradients,
    )


def compressed_gradients(compressor: Compressor) -> PerStep:
    """Average the compressed gradients, decoded in every region."""
    return PerStep(
        "compressed_gradients",
        compressor.init,
        compressor.encode,
        lambda messages: mean_of_decoded(messages, compressor),
        compressed_gradients,
    )
