"""How a region's devices share what the model computes with, not only what it keeps.

`sharding.py` says how parameters lie. With them and the batch over one axis a compiler
may as well gather the batch as the weights, and does: activations of the whole region
then stand on each device. A `Layout` says what is meant. Activations stay divided over
the batch, and over heads, features and vocabulary; a weight is gathered over the data
axis where it is used, in the compute dtype, and its gradient summed and divided again
at once (fully sharded data parallelism, ZeRO stage 3, arXiv 1910.02054).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class Layout:
    """Axes inside a region.

    Attributes:
      data: over which the batch lies, and the width of weights.
      model: over which heads, features and vocabulary lie.
      num_data: devices along the data axis.
    """

    data: str = "data"
    model: str = "model"
    num_data: int = 1


def divide(x: jax.Array, layout: Layout | None, *others: str | None) -> jax.Array:
    """Keep activations `[B, ...]` divided over the batch.

    Args:
      x: whose leading axis is the batch.
      layout: None leaves everything to the compiler.
      others: axes for the other sides of `x`, none by default.
    """
    if layout is None:
        return x
    others = others or (None,) * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, P(layout.data, *others))


def gather_reads(w_DF: jax.Array, layout: Layout | None) -> jax.Array:
    """Gather a weight that multiplies the residual width, `[D, F]`."""
    if layout is None:
        return w_DF
    whole, divided = P(None, layout.model), P(layout.data, layout.model)
    return _gather(w_DF, whole, divided)


def gather_writes(w_FD: jax.Array, layout: Layout | None) -> jax.Array:
    """Gather a weight that gives the residual width, `[F, D]`."""
    if layout is None:
        return w_FD
    whole, divided = P(layout.model, None), P(layout.model, layout.data)
    return _gather(w_FD, whole, divided)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(w: jax.Array, whole: P, divided: P) -> jax.Array:
    """Lay out as `whole`, and the cotangent as `divided`."""
    return jax.lax.with_sharding_constraint(w, whole)


def _gather_forward(w, whole, divided):
    return _gather(w, whole, divided), None


def _gather_backward(whole, divided, _, cotangent):
    # Else it would be as `whole`: summed on every device, and cut afterwards.
    return (jax.lax.with_sharding_constraint(cotangent, divided),)


_gather.defvjp(_gather_forward, _gather_backward)
