"""Dynamic communication thresholding: top-k without a sort at every call.

    every `every`-th call:   t = the k-th largest |x| of the tensor, k = density * size
    every call:              send the entries with |x| >= t, at most capacity of them

The number of entries above an old threshold varies, but the message's size must not. So
it has room for `capacity = slack * k` entries, taken in order of position; unused room
is sent as padding. Entries beyond the capacity are not sent: wrap the compressor in
`error_feedback`, whose residual grows until the next sort finds them.

Source: arXiv 2010.08899 (thresholds per tensor, kept for L iterations, error feedback),
not checked against the authors' code. Differs from the paper: the capacity is fixed.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.transforms.compressor import (
    Compressor,
    Packed,
    check_floats,
    check_state,
    keep_finite,
    map_packed,
    stateless,
)
from cocodc_jax.transforms.numerics import (
    check_at_least,
    check_share,
    is_number,
    vary_like,
)
from cocodc_jax.transforms.packing import index_bits, pack, unpack

_BEYOND = np.iinfo(np.int32).max


class ThresholdState(NamedTuple):
    """Memory of `threshold`."""

    # int32 scalar, calls since the thresholds were taken; 0 before a sort.
    num_calls: jax.Array
    thresholds: tuple  # a float32 scalar for each leaf.


def threshold(
    density: float = 0.01,
    every: int = 10,
    slack: float = 1.5,
    values: Compressor | None = None,
) -> Compressor:
    """Send the values of each tensor that reach a threshold kept for some calls.

    A message has `round(slack * density * size)` values and as many packed indices a
    tensor (at least one, at most all). Zeros are never chosen. Under `jax.vmap` the
    sort runs at every call; under `jax.lax.map` and in `jax.shard_map` only when due.

    Args:
      density: share of a tensor's values that reach a fresh threshold, in (0, 1].
      every: calls per sort. (The paper has about a thousand training steps, from
        memory; a call is a sync here, which is rarer.)
      slack: room of a message in multiples of `density`, at least 1.
      values: stateless compressor for the values, `identity()` if None.

    >>> import jax.numpy as jnp
    >>> compressor = threshold(density=0.25, every=2, slack=2.0)
    >>> x = jnp.array([1.0, -3.0, 0.0, 2.0])
    >>> message, memory = compressor.encode(x, compressor.init(x))
    >>> print(compressor.decode(message), *memory.thresholds)
    [ 0. -3.  0.  0.] 3.0
    >>> message, memory = compressor.encode(2 * x, memory)  # two places, threshold 3
    >>> print(compressor.decode(message))
    [ 0. -6.  0.  4.]
    """
    check_share("density", density)
    if not (is_number(slack) and 1 <= slack < math.inf):
        raise ValueError(f"slack={slack!r} must be at least 1 and finite")

    check_at_least("every", every, 1)
    inner = stateless("values", values)
    name = f"threshold({inner.name})" if values else "threshold"

    def init(tree: Any) -> ThresholdState:
        zeros = tuple(jnp.zeros([], jnp.float32) for _ in jax.tree.leaves(tree))
        return ThresholdState(jnp.zeros([], jnp.int32), zeros)

    def encode(
        tree: Any, memory: Any, key: jax.Array | None = None
    ) -> tuple[Any, ThresholdState]:
        check_floats(name, tree)
        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
        shapes = [()] * len(leaves)
        check_state(name, memory, ThresholdState, lambda m: m.thresholds, tree, shapes)

        thresholds = jax.lax.cond(
            memory.num_calls == 0,
            lambda: tuple(_kth_largest(x, density) for x in leaves),
            lambda: vary_like(memory.thresholds, tuple(x.sum() for x in leaves)),
        )

        places = []
        chosen = []
        for x, t in zip(leaves, thresholds, strict=True):
            capacity = min(x.size, max(1, round(slack * density * x.size)))
            # Not "at least t": a nan reaches every threshold, so it is not hidden.
            size = _size(x)
            is_sent = ~(size < t) & (size != 0)
            places.append(_first_true(is_sent, capacity))
            chosen.append(x.reshape(-1).at[places[-1]].get(mode="fill", fill_value=0))

        encoded, _ = inner.encode(chosen, (), key)
        packed = []
        for x, i, v in zip(leaves, places, encoded, strict=True):
            indices = pack(i, index_bits(x.size + 1))
            packed.append(Packed({"indices": indices, "values": v}, x.shape, x.dtype))

        num_calls = (memory.num_calls + 1) % every
        message = jax.tree.unflatten(structure, packed)
        return message, ThresholdState(num_calls, thresholds)

    def decode_leaf(packed: Packed) -> jax.Array:
        size = math.prod(packed.shape)
        chosen = inner.decode(packed.arrays["values"])
        places = unpack(packed.arrays["indices"], index_bits(size + 1), chosen.size)
        return jnp.zeros(size, chosen.dtype).at[places].set(chosen, mode="drop")

    def decode(message: Any) -> Any:
        return map_packed(decode_leaf, message)

    return keep_finite(Compressor(name, init, encode, decode, is_sparse=True))


def _kth_largest(x, density):
    if not x.size:
        return jnp.zeros([], jnp.float32)
    k = max(1, round(density * x.size))
    return jax.lax.top_k(_size(x), k)[0][-1]


def _first_true(mask, count, width=32):
    """Find the positions of the first `count` True, in order, then mask.size.

    It equals `jnp.nonzero(mask, size=count, fill_value=mask.size)`, which scatters all
    of the mask. Here the j-th is looked up: first its block of `width`, then its
    position in the block.
    """
    blocks = jnp.pad(mask, (0, -mask.size % width)).reshape(-1, width)
    reached = jnp.cumsum(jnp.sum(blocks, axis=1, dtype=jnp.int32))
    nth = jnp.arange(1, count + 1, dtype=jnp.int32)
    block = _num_below(reached, nth)
    nth_inside = nth - jnp.pad(reached, (1, 0))[block]
    chosen = blocks.at[block].get(mode="fill", fill_value=False)
    inside = jnp.cumsum(chosen, axis=1, dtype=jnp.int32) >= nth_inside[:, None]
    return jnp.minimum(block * width + jnp.argmax(inside, axis=1), mask.size)


def _num_below(ascending, values):
    """Count how many of `ascending` are below each of `values`, all int32.

    It equals `jnp.searchsorted`, which JAX 0.10.2 cannot trace in a scan under a partly
    manual `shard_map`, as region programs have it.
    """
    count = jnp.zeros_like(values)
    for bit in reversed(range(ascending.size.bit_length())):
        more = count + (1 << bit)
        last = ascending.at[more - 1].get(mode="fill", fill_value=_BEYOND)
        count = jnp.where(last < values, more, count)
    return count


def _size(x):
    # float32 as the state is: rounding keeps the order, so the k-th reaches itself.
    return jnp.abs(x).astype(jnp.float32).reshape(-1)
