"""Exchanges at every inner step, whose result replaces a region's gradient.

Every region turns its gradient into a message. From all messages each region computes
the same gradient for its inner optimizer. In data parallelism the message is the
gradient, and the result is the mean. Programs map `send` over regions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax

from cocodc_jax.sync.messages import mean_of_decoded
from cocodc_jax.transforms.compressor import Compressor, message_bytes
from cocodc_jax.transforms.numerics import widen

PyTree = Any


class PerStepSendFn(Protocol):
    """The `send` of a `PerStep`."""

    def __call__(
        self, gradient: PyTree, memory: PyTree, key: jax.Array, /
    ) -> tuple[PyTree, PyTree]:
        """Make one region's message of a step.

        Args:
          gradient: the region's, a tree like the parameters.
          memory: from `init` or the last call; *regional*.
          key: PRNG key of the region and the step.

        Returns:
          The message and the new memory. Where the gradient is not finite, the memory
          must stay as it was, and `receive` leave the message out, as with compressors
          of `keep_finite`.
        """
        ...


class PerStepReceiveFn(Protocol):
    """The `receive` of a `PerStep`."""

    def __call__(self, messages: PyTree, /) -> PyTree:
        """Return the gradient that every region's inner optimizer receives.

        Args:
          messages: of all regions, every leaf with a leading region axis, `[M, ...]`.

        Returns:
          A tree like the parameters, equal in every region.
        """
        ...


@dataclasses.dataclass(frozen=True)
class PerStep:
    """An exchange at every step.

    Attributes:
      name: for records and error messages.
      init: `init(params) -> memory` of one region, before its first message.
      send: makes one region's message; see `PerStepSendFn`.
      receive: makes a gradient of all messages; see `PerStepReceiveFn`. None: the
        message is a tree like the gradient, and is averaged, without gathering.
      compressed_by: `compressed_by(compressor) -> PerStep`, the same with its messages
        compressed; None if unsupported.
      why_uncompressed: why it is unsupported, if so.
    """

    name: str
    init: Callable[[PyTree], PyTree]
    send: PerStepSendFn
    receive: PerStepReceiveFn | None = None
    compressed_by: Callable[[Compressor], PerStep] | None = None
    why_uncompressed: str = "its messages cannot be encoded further"

    def compressed(self, compressor: Compressor) -> PerStep:
        """Return the same with its messages compressed."""
        if self.compressed_by is None:
            raise ValueError(self.why_uncompressed)
        return self.compressed_by(compressor)

    def num_bytes(self, params: PyTree) -> int:
        """Return the bytes that one region, with parameters so shaped, sends a step."""

        def make_message(gradient: PyTree) -> PyTree:
            memory = self.init(gradient)
            message, _ = self.send(gradient, memory, jax.random.key(0))
            # What is not decoded is summed as it is, in at least float32.
            return message if self.receive else jax.tree.map(widen, message)

        return message_bytes(jax.eval_shape(make_message, params))


def mean_gradients() -> PerStep:
    """Average the gradients uncompressed: data parallelism."""
    return PerStep(
        name="mean_gradients",
        init=lambda params: (),
        send=lambda gradient, memory, key: (gradient, memory),
        compressed_by=compressed_gradients,
    )


def compressed_gradients(compressor: Compressor) -> PerStep:
    """Average the compressed gradients, decoded in every region."""
    return PerStep(
        name="compressed_gradients",
        init=compressor.init,
        send=compressor.encode,
        receive=lambda messages: mean_of_decoded(messages, compressor),
        compressed_by=compressed_gradients,
    )
