"""What pipeline stages send one another: activations forward, gradients back.

`Links` are the collectives. `Hop` sends activations and their gradients through a
codec, for example one that keeps the values above a threshold:

    ahead:  message, a <- encode(x, a);    the next stage computes with decode(message)
    back:   message, b <- encode(dL/dy, b);  this one goes on with decode(message)

so the gradient is taken as if decoding inverted encoding (straight through). a and b
are the codec's memory (thresholds, residuals of error feedback) of one stage within a
step. The backward pass goes through the microbatches in reverse, and so does b.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cocodc_jax.models.config import TransformerConfig
from cocodc_jax.models.subspace import Subspace

# Axes of the mesh that the loss is called under.
STAGE = "stage"
REGION = "region"


def stage_bytes(
    config: TransformerConfig,
    num_stages: int,
    batch: int,
    length: int,
    subspace: Subspace | None = None,
    num_ways: int = 2,
) -> int:
    """Count the bytes that a region's S stages send one another for a batch.

    Every position crosses S - 1 borders, with its target (and with a subspace its
    token). Then S - 1 of S parts of the last stage's result go to the other stages.
    With gradients, everything but the ids is also sent back. The zeros of idle ticks
    are not counted, nor are gradients of parameters that every stage has.

    Args:
      config: of the model.
      num_stages: S.
      batch: sequences of a region's batch.
      length: positions of a sequence.
      subspace: in which activations are sent; None sends them in full.
      num_ways: 2 with gradients, 1 without.
    """
    width = subspace.rank if subspace else config.width
    num_ids = 2 if subspace else 1
    a_position = num_ways * width * jnp.dtype(config.compute_dtype).itemsize
    positions = batch * (length + -(-length // num_stages))
    return (num_stages - 1) * positions * (a_position + 4 * num_ids)


@dataclasses.dataclass(frozen=True)
class Links:
    """Collectives between S stages, and between R regions if messages are routed."""

    num_stages: int
    num_regions: int

    def send(self, message: Any, shift: jax.Array, is_back: bool = False) -> Any:
        """Send a message to the next stage, `shift` regions on; stage 0 gets zeros.

        With `is_back`, to the stage and region that such a message came from; the last
        stage then gets zeros.
        """
        regions = self.num_regions
        stages = self.num_stages

        def shifted(shift: int) -> Callable[[Any], Any]:
            pairs = [
                (r * stages + s, (r + shift) % regions * stages + s + 1)
                for r in range(regions)
                for s in range(stages - 1)
            ]
            pairs = [(b, a) for a, b in pairs] if is_back else pairs
            axes = STAGE if regions == 1 else (REGION, STAGE)

            return lambda x: jax.lax.ppermute(x, axes, pairs)

        if regions == 1:
            return shifted(0)(message)
        return jax.lax.switch(shift, [*map(shifted, range(regions))], message)


@dataclasses.dataclass(frozen=True)
class StageCodec:
    """How activations and their gradients are encoded between stages.

    Attributes:
      init: `init(x) -> state`, of float32 or small whole numbers.
      encode: `encode(x, state) -> (message, state)`, static shapes.
      decode: `decode(message) -> x`.
      num_bytes: `num_bytes(message) -> float32 scalar`, the bytes that are really sent.
    """

    init: Callable[[jax.Array], Any]
    encode: Callable[[jax.Array, Any], tuple[Any, Any]]
    decode: Callable[[Any], jax.Array]
    num_bytes: Callable[[Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Hop:
    """Sends one stage's activations to the next through a codec."""

    links: Links
    codec: StageCodec

    def init(self, x: jax.Array) -> tuple[Any, jax.Array]:
        """Return the first state and bytes sent; floats, as cotangents must be."""
        return _floats(self.codec.init(jnp.zeros_like(x))), jnp.float32(0)

    def __call__(
        self,
        x: jax.Array,
        ahead: Any,
        back: Any,
        shift: jax.Array,
        has_sent: jax.Array,
        has_received: jax.Array,
    ) -> tuple[jax.Array, Any, Any]:
        """Send activations to the next stage; their gradients return the same way.

        Args:
          x: the activations.
          ahead: the codec's memory for activations, and the bytes sent.
          back: the same for gradients.
          shift: regions to the receiver's.
          has_sent: whether the activations are of a microbatch, not of an idle tick.
          has_received: whether those that arrive are.

        Returns:
          The received activations, and `ahead` and `back` for the next microbatch.
        """

        @jax.custom_vjp
        def hop(x, ahead, back, shift, has_sent, has_received):
            message, ahead = self._encode(x, ahead, has_sent)
            return self.codec.decode(self.links.send(message, shift)), ahead, back

        def forward(x, ahead, back, shift, has_sent, has_received):
            out = hop(x, ahead, back, shift, has_sent, has_received)
            return out, (ahead, shift, has_sent, has_received)

        def backward(residuals, cotangents):
            ahead, shift, has_sent, has_received = residuals
            gradient, _, (change, num_bytes) = cotangents

            first, none = self.init(gradient)
            state = jax.tree.map(jnp.add, first, change)
            message, (state, sent) = self._encode(gradient, (state, none), has_received)
            change = jax.tree.map(jnp.subtract, state, first)

            gradient = self.codec.decode(self.links.send(message, shift, is_back=True))

            # An idle tick's activations have no gradient, whatever the codec sent.
            gradient = jnp.where(has_sent, gradient, jnp.zeros_like(gradient))
            nothing = jax.tree.map(jnp.zeros_like, ahead)
            return gradient, nothing, (change, num_bytes + sent), None, None, None

        hop.defvjp(forward, backward)
        return hop(x, ahead, back, shift, has_sent, has_received)

    def _encode(
        self, x: jax.Array, memory: tuple[Any, jax.Array], is_message: jax.Array
    ) -> tuple[Any, Any]:
        floats, num_bytes = memory
        like = jax.eval_shape(self.codec.init, x)
        state = jax.tree.map(lambda f, s: f.astype(s.dtype), floats, like)
        message, state = self.codec.encode(x, state)

        new_memory = (_floats(state), num_bytes + self.codec.num_bytes(message))
        kept_memory = jax.tree.map(
            lambda new, old: jnp.where(is_message, new, old), new_memory, memory
        )
        return message, kept_memory


def _floats(state: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), state)
