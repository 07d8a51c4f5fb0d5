"""How messages cross between regions: each region's in one piece, by one collective.

On the outer mesh, for syncs; and on the inner one for what is exchanged at every step,
where that is not better left to the compiler (`mesh.wants_one_piece`).


Uncompressed pseudo-gradients are summed where they are and all-reduced; compressed
messages are gathered as they are, and each process decodes them. Where a region is
several processes, each does so with its share of the columns, and what crossed is
gathered inside the region.

Either is the backend's own ("ring": gloo's passes partial sums or messages on, 2 (M -
1) or M - 1 of them one after the other, each of which waits for the network's delay),
or "direct". Then, to sum, each place sends every other its part of the vector, sums the
parts it gets, and sends the sum to all: the same bytes with two delays, and every place
has the same sum to the last bit. To gather, each sends its message to every other: the
same bytes with one delay.

What regions have measured (`sync/paced.py`) goes along in the same piece: behind a
compressed message as it is; behind a pseudo-gradient in a place of each region's own,
where the others add zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.runtime import parcel
from cocodc_jax.runtime.mesh import MEMBER, PROCESS
from cocodc_jax.sync.every_step import weighted_sum_of_decoded
from cocodc_jax.transforms.compressor import Compressor

PyTree = Any

ALL_REDUCES = ("direct", "ring")


def make_piece(
    message: PyTree, times: jax.Array | None, compressor: Compressor | None
) -> jax.Array:
    """What regions send, `[R, n]`.

    Args:
      message: leaves `[R, ...]`.
      times: seconds that each region has measured, float32 `[R, 2]`, or None.
      compressor: of the message; None for a pseudo-gradient as it is.
    """
    if times is not None and compressor is None:
        dtype = jax.tree.leaves(message)[0].dtype
        own = jnp.eye(len(times), dtype=dtype)
        times = own[:, :, None] * times[:, None].astype(dtype)
    return parcel.pack((message, times))


def make_combine(
    compressor: Compressor | None,
    everywhere: Sharding,
    shapes: PyTree,
    num_times: int = 0,
    all_reduce: str = "direct",
) -> Callable:
    """Makes the program that crosses the outer mesh.

    Args:
      compressor: of the messages; None for pseudo-gradients as they are.
      everywhere: whole on every process's outer device.
      shapes: of one region's message.
      num_times: regions whose times go along; 0 for none.
      all_reduce: "ring" or "direct".

    Returns:
      `combine(rows [R, n], weights [R]) -> (mean, times)`. `rows` are as `make_piece`
      gives them, with their regions' processes; columns after them are of no account.
      `times` are float32 `[R, 2]`, or None; those of a region of weight 0 are 0.
    """
    sent = (shapes, _times_shape(compressor, shapes, num_times))

    def combine(rows, weights):
        if compressor is not None:
            messages, times = parcel.unpack(gather(rows, everywhere, all_reduce), sent)
            return weighted_sum_of_decoded(messages, weights, compressor), times
        weights = weights.astype(rows.dtype)
        if all_reduce == "direct" and isinstance(everywhere, NamedSharding):
            total = _sum_of_rows(cast(Mesh, everywhere.mesh), rows, weights)
        else:
            total = jnp.tensordot(weights, rows, axes=1)
        mean, times = parcel.unpack(_whole(total, everywhere), sent)
        if times is not None:
            share = weights[:, None]
            known = jnp.where(share > 0, times / jnp.where(share > 0, share, 1), 0)
            times = known.astype(jnp.float32)
        return mean, times

    return combine


def _sum_of_rows(mesh: Mesh, rows: jax.Array, weights: jax.Array) -> jax.Array:
    """Weighted sum of `rows` `[R, n]` over all places, `[n]`, columns over members."""

    def of_place(rows, weights):
        own = jnp.tensordot(weights, rows, axes=1)
        return direct_sum(own, PROCESS, mesh.shape[PROCESS])

    # What every place has is not seen to be the same: all places make it alike.
    return jax.shard_map(
        of_place,
        mesh=mesh,
        in_specs=(P(PROCESS, MEMBER), P(PROCESS)),
        out_specs=P(MEMBER),
        check_vma=False,
    )(rows, weights)


def gather(rows: jax.Array, everywhere: Sharding, kind: str) -> jax.Array:
    """`rows` `[R, n]`, with their regions' processes, whole at all places.

    Args:
      rows: columns over members.
      everywhere: whole on every process's outer device.
      kind: one of `ALL_REDUCES`.
    """
    if kind == "direct" and isinstance(everywhere, NamedSharding):
        num = everywhere.mesh.shape[PROCESS]
        rows = jax.shard_map(
            lambda x: direct_gather(x, PROCESS, num),
            mesh=everywhere.mesh,
            in_specs=P(PROCESS, MEMBER),
            out_specs=P(None, MEMBER),
            check_vma=False,  # What every place has is not seen to be the same.
        )(rows)
    return _whole(rows, everywhere)


def _whole(x: jax.Array, everywhere: Sharding) -> jax.Array:
    # In two steps, so that the slow network carries each share once a region.
    if isinstance(everywhere, NamedSharding):
        shares = P(*(None,) * (x.ndim - 1), MEMBER)
        crossed = NamedSharding(everywhere.mesh, shares)
        x = jax.lax.with_sharding_constraint(x, crossed)
    return jax.lax.with_sharding_constraint(x, everywhere)


def direct_sum(x: jax.Array, axis_name: str, num: int) -> jax.Array:
    """The sum of `x` `[n]` over the `num` places of an axis, inside `shard_map`."""
    parts = jnp.pad(x, (0, -len(x) % num)).reshape(num, -1)
    summed = jax.lax.all_to_all(parts, axis_name, 0, 0).sum(0)
    return direct_gather(summed, axis_name, num)[: len(x)]


def direct_gather(x: jax.Array, axis_name: str, num: int) -> jax.Array:
    """The rows `x` `[r, ...]` of all `num` places of an axis, `[num * r, ...]`.

    One place's after the other's; inside `shard_map`.
    """
    copies = jnp.broadcast_to(x, (num, *x.shape))
    found = jax.lax.all_to_all(copies, axis_name, 0, 0)
    return found.reshape(-1, *x.shape[1:])


def times_bytes(compressor: Compressor | None, num_times: int) -> int:
    """Bytes that the times add to one region's message."""
    return 8 * (num_times if compressor is None else min(num_times, 1))


def _times_shape(
    compressor: Compressor | None, shapes: PyTree, num_times: int
) -> jax.ShapeDtypeStruct | None:
    if not num_times:
        return None
    if compressor is not None:
        return jax.ShapeDtypeStruct((2,), jnp.float32)
    dtype = jax.tree.leaves(shapes)[0].dtype
    return jax.ShapeDtypeStruct((num_times, 2), dtype)
