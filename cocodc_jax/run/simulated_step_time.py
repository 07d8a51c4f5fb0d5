"""Simulate an accelerator's step time, with the host's cores free meanwhile.

If all regions of the lab share a few cores, computing takes time from sending and
relaying, which no deployment does. A paced loss computes the same numbers, and makes
each gradient last a given time, asleep. One callback reads the clock before the loss. A
second one sleeps after the gradient until the time is over, and so before any exchange
at every step. Waiting elsewhere is not counted.

Data dependencies enforce the order. The first callback takes the parameters and returns
the 0 that is added to the batch. The second takes the gradient and returns the
predicate of a conditional that passes the gradient on. Adding a number to the gradient
instead made XLA compile the optimizer differently, and changed the last bits.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

from cocodc_jax.sharding.local_regions import LocalRegions
from cocodc_jax.sharding.mesh import INSIDE
from cocodc_jax.sync.needs import LossFn

PyTree = Any

_INT = jax.ShapeDtypeStruct((), jnp.int32)
_BOOL = jax.ShapeDtypeStruct((), jnp.bool_)
_ZERO_MS = time.monotonic_ns() // 1_000_000  # int32 counts 24 days from here


def paced(loss_fn: LossFn, step_seconds: float, block: LocalRegions) -> LossFn:
    """Return the same loss with a gradient that takes at least a given time.

    Call it like `inner_step.make_step`: in a `jax.shard_map` over regions, with one
    device per region. Reverse mode only. If the program itself takes longer, nothing
    sleeps.

    Args:
      loss_fn: `(params, batch, key) -> (loss, aux)` of one region; leaves of the batch
        are integers.
      step_seconds: of the gradients of all regions of a block.
      block: number of regions on a device.
    """
    # In turn, each takes its share of the time.
    seconds = step_seconds / block.size if block.one_by_one else step_seconds

    def until(began_ms, *_):
        time.sleep(max(0.0, seconds - (_now_ms() - int(began_ms)) / 1000))
        return np.bool_(True)

    @jax.custom_vjp
    def gate(params, began_ms):
        return params

    def backward(began_ms, grads):
        is_over = _call(until, _BOOL, began_ms, *_parts(grads))
        return jax.lax.cond(is_over, lambda g: g, _never, grads), None

    gate.defvjp(lambda params, began_ms: (params, began_ms), backward)

    def paced_loss(params, batch, key):
        before = _parts(jax.lax.stop_gradient(params))
        began_ms, zero = _call(_begin, (_INT, _INT), *before)
        batch = jax.tree.map(lambda x: x + zero.astype(x.dtype), batch)
        return loss_fn(gate(params, began_ms), batch, key)

    return paced_loss


def _begin(*_):
    return np.int32(_now_ms()), np.int32(0)


def _never(grads: PyTree) -> PyTree:
    """Return a value that the compiler cannot prove equal to the gradient."""
    return jax.tree.map(jnp.negative, grads)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000 - _ZERO_MS


def _call(function, result, *arguments):
    """Return a callback; JAX requires it to be manual over all mesh axes."""
    inside = jax.shard_map(
        lambda *x: io_callback(function, result, *x),
        axis_names=set(INSIDE),
        in_specs=P(),
        out_specs=P(),
    )
    return inside(*arguments)


def _parts(tree: PyTree) -> list[jax.Array]:
    """Return one number of each leaf, which is ready when the leaf is."""
    return [x.ravel()[0] for x in jax.tree.leaves(tree)]
