"""Exchange through one compiled program: it sends messages and averages them.

The collectives have two halves (`Crossing`): `leave` encodes a fragment and starts its
collective; `arrive` computes the mean pseudo-gradient from the result. Between them is
nothing, or, where regions share a fabric, a scan of inner steps that hides the
collective (`program/segment.py`).

Uncompressed pseudo-gradients use an all-reduce, several rings, or two all-reduces of
low-rank factors. A compressed message stays compressed: the encoded arrays are
all-gathered, and each device decodes them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.core import reduce
from cocodc_jax.core.reduce import ring_sum
from cocodc_jax.exchange import flat_buffer
from cocodc_jax.exchange.base import (
    Exchange,
    Sent,
    SyncSpec,
    Times,
    Weights,
    filter_block,
    make_messages,
    make_restore,
    over_regions,
    robust_mean,
    with_length,
)
from cocodc_jax.sharding.mesh import INSIDE, REGION, regional
from cocodc_jax.sharding.region_map import everywhere, psum_over_regions, sum_of_block
from cocodc_jax.sync.schedules.base import Event
from cocodc_jax.sync.summed import ByRings, SummedFactors

PyTree = Any


class Crossing(NamedTuple):
    """How a fragment crosses regions."""

    # `leave(params, stale_params, state, weights, keys, start_step) -> (staged,
    # crossed, state)`, with arguments and other results as for
    # `make_messages`; `crossed` is on every device that needs it.
    leave: Callable
    # `arrive(crossed, start_step) -> (mean, verdicts)`: the mean pseudo-gradient, and
    # the verdicts by name.
    arrive: Callable


def make_crossing(
    spec: SyncSpec, fragment_id: int, rank: int, in_one_buffer: bool = False
) -> Crossing:
    """Make the `Crossing` of a fragment's message.

    With `in_one_buffer` all arrays of a compressed message are one transfer, which
    inner steps can hide.
    """
    message = spec.sync.message
    if message.compressor(rank) is not None:
        return make_decoded(spec, fragment_id, rank, in_one_buffer)
    outgoing = make_messages(spec, fragment_id, rank)
    restore = make_restore(spec, fragment_id)
    is_by_rings = isinstance(message, ByRings)
    by_rings = make_ring_sum(spec.mesh, message) if is_by_rings else None

    def of_shard(params, stale_params, state, weights, *rest):
        staged, sent, state = outgoing(params, stale_params, state, weights, *rest)
        delta, weights, told = filter_block(spec, sent, weights)

        def summed(each):
            return psum_over_regions(sum_of_block(each, weights))

        if isinstance(message, SummedFactors):
            mean, state = reduce.factored(
                delta, state, weights, summed, spec.local.map, lambda x: x[0]
            )
        elif by_rings is None:
            mean = summed(delta)
        else:
            mean = jax.tree.map(lambda x: x[None], sum_of_block(delta, weights))
        return staged, (mean, told), state

    mapped = over_regions(spec, of_shard, (P(REGION) if by_rings else P(), P()))

    def leave(*arguments):
        staged, (mean, told), state = mapped(*arguments)
        return staged, (by_rings(mean) if by_rings else mean, told), state

    def arrive(crossed, start_step):
        mean, told = crossed
        return restore(mean, start_step), told

    return Crossing(leave, arrive)


def make_decoded(
    spec: SyncSpec, fragment_id: int, rank: int, in_one_buffer: bool
) -> Crossing:
    """Make the `Crossing` of messages that are all-gathered and decoded everywhere."""
    encoded = over_regions(spec, make_messages(spec, fragment_id, rank), P(REGION))
    restore = make_restore(spec, fragment_id)

    def leave(params, stale_params, state, weights, *rest):
        staged, message, state = encoded(params, stale_params, state, weights, *rest)
        # The weights too: otherwise decoding each message waits for its weight.
        return staged, cross((message, weights)), state

    def arrive(crossed, start_step):
        message, weights = join(crossed)
        mean, told = robust_mean(spec, rank, message, weights)
        return restore(mean, start_step), told

    if not in_one_buffer:
        cross, join = functools.partial(everywhere, spec.mesh), lambda crossed: crossed
        return Crossing(leave, arrive)
    shapes = spec.sync.message.encoded(spec.outer_shapes[fragment_id], rank)
    shapes = with_length(spec, shapes, rank)
    weight = jax.ShapeDtypeStruct((), jnp.result_type(float))
    cross = functools.partial(shares_everywhere, spec.mesh)
    join = functools.partial(joined, spec.mesh, shapes=(shapes, weight))
    return Crossing(leave, arrive)


def shares_everywhere(mesh: Mesh, messages: PyTree) -> jax.Array:
    """All-gather messages of all regions as one flat buffer, a share to each device.

    Returns `[D, R / D, n]`, D the size of the region axis: columns sharded over the
    devices of each region, so that no byte crosses twice between two regions. It keeps
    the layout of the all-gather: any change of it must come after the steps that hide
    the collective.
    """
    buffer = flat_buffer.pack(messages)
    num_shares = math.prod(mesh.shape[axis] for axis in INSIDE)
    buffer = jnp.pad(buffer, ((0, 0), (0, -buffer.shape[1] % num_shares)))
    # Otherwise XLA would shard, gather and shard parts of it again.
    buffer = jax.lax.with_sharding_constraint(buffer, regional(mesh))
    # The type system cannot see that all shards are equal.
    return jax.shard_map(
        lambda rows: jax.lax.all_gather(rows, REGION),
        mesh=mesh,
        in_specs=P(REGION, INSIDE),
        out_specs=P(None, None, INSIDE),
        check_vma=False,
    )(buffer)


def joined(mesh: Mesh, buffer: jax.Array, shapes: PyTree) -> PyTree:
    """Gather the shares of a buffer inside each region; unpack it, `[R, ...]`."""
    buffer = everywhere(mesh, buffer)
    return flat_buffer.unpack(buffer.reshape(-1, buffer.shape[-1]), shapes)


def make_ring_sum(mesh: Mesh, rings: ByRings) -> Callable[[PyTree], PyTree]:
    """Make the sum over the shards: leaves `[D, ...]`, an entry each, to `[...]`."""

    def of_shard(tree):
        return ring_sum(jax.tree.map(lambda x: x[0], tree), rings, REGION)

    # All shards hold equal sums, but a permutation's result is typed as varying and
    # cannot be cast back. So this program, which does nothing else, is unchecked; a
    # test compares the shards bit for bit.
    return jax.shard_map(
        of_shard,
        mesh=mesh,
        axis_names={REGION},
        in_specs=P(REGION),
        out_specs=P(),
        check_vma=False,
    )


class InProgram(Exchange):
    """Compiled programs that send fragments and average them; see `make_crossing`."""

    shares_mesh = True

    def __init__(self, spec: SyncSpec, in_one_buffer: bool):
        super().__init__(spec)
        self._in_one_buffer = in_one_buffer

    def send(self, event: Event, weights: Weights, times: Times, *arrays: Any) -> Sent:
        """Send a fragment; see `Exchange.send`."""
        del times  # Only the outer mesh sends times.
        staged, mean, state, told = self._run(event, weights, arrays)
        return staged, mean, told, state

    def _make(self, fragment_id: int, rank: int, compressor_state: PyTree) -> Callable:
        spec, shardings = self._spec, self._spec.shardings
        crossing = make_crossing(spec, fragment_id, rank, self._in_one_buffer)

        def sent(*arguments):
            staged, crossed, state = crossing.leave(*arguments)
            mean, told = crossing.arrive(crossed, arguments[-1])
            return staged, mean, state, told

        return spec.devices.jit(
            sent,
            f"send fragment {fragment_id}",
            self.num_bytes(fragment_id, rank),
            out_shardings=(
                spec.staged(fragment_id),
                shardings.fragments[fragment_id],
                shardings.of_regions(fragment_id, compressor_state),
                NamedSharding(spec.mesh, P()),
            ),
        )
