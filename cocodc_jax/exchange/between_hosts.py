"""Exchange over the outer mesh: between hosts, concurrently with the inner steps.

One program encodes every region's message on the inner mesh into a flat buffer, each
device its own part (`flat_buffer.ShardBuffer`). Each process moves the columns of its
own devices to its outer device. Another program communicates there with the
corresponding processes of the other regions and averages those columns, while the inner
mesh computes. The matching part of the outer state is there too. The result goes back
to each device's shard.

Uncompressed pseudo-gradients are all-reduced. Compressed messages are all-gathered, and
each process decodes them. Arrays that every device of a region holds in full are shared
out evenly over its processes, and the result is gathered inside the region.

Measured times travel in the same flat buffer: appended to a compressed message; for a
pseudo-gradient in separate columns of each region, to which the others add zeros.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.sharding import Sharding, SingleDeviceSharding

from cocodc_jax.exchange import flat_buffer
from cocodc_jax.exchange.base import Exchange, Sent, SyncSpec, Times
from cocodc_jax.exchange.collectives import (
    gather_from_processes,
    sum_over_processes,
)
from cocodc_jax.exchange.flat_buffer import ShardBuffer
from cocodc_jax.exchange.pseudo_gradient import (
    in_specs,
    make_messages,
    make_restore,
    robust_mean,
    with_length,
)
from cocodc_jax.sharding.mesh import REGION, regional
from cocodc_jax.sharding.outer_mesh import outer_device, process_grid
from cocodc_jax.sharding.region_map import region_shard_map
from cocodc_jax.sync.fragments import Fragment
from cocodc_jax.sync.robust import VERDICT, without
from cocodc_jax.sync.schedules.base import Event
from cocodc_jax.transforms.compressor import Compressor

PyTree = Any


class OnOuterMesh(Exchange):
    """Compiled programs that encode fragments and average them between hosts."""

    is_alone = False  # Whether the outer mesh has one of several elastic regions.

    def __init__(self, spec: SyncSpec, all_reduce: str):
        """Compile nothing; `all_reduce` is one of `collectives.ALL_REDUCES`."""
        super().__init__(spec)
        self.all_reduce = all_reduce
        self._num_times = spec.regions.num if spec.is_measured else 0
        self._programs: dict[tuple[int, int], tuple[Callable, Callable]] = {}

    def send(
        self, event: Event, weights: tuple[float, ...], times: Times, *arrays: Any
    ) -> Sent:
        """Send a fragment; see `Exchange.send`."""
        staged, buffer, state, arriving = self.encoded(event, weights, times, *arrays)
        channel = self._spec.shardings.channel(event.fragment_id)
        rows = self._spec.devices.gather_rows(buffer, channel.rows)
        mean, measured, told = arriving(rows, weights)
        told = told if measured is None else {**told, "times": measured}
        return staged, mean, told, state

    def encoded(
        self, event: Event, weights: tuple[float, ...], times: Times, *arrays: Any
    ) -> tuple[Fragment | None, jax.Array, PyTree, Callable]:
        """Encode a fragment without sending it; arguments as for `send`.

        Returns:
          The staged copy; the buffer to send, `[R, n]`; the compressors' state after
          it; and a function from all regions' rows and weights on the outer device to
          `(mean, times, verdicts)`.
        """
        region, stale_params, compressor_state = arrays
        k, rank = event.fragment_id, event.rank
        if (k, rank) not in self._programs:
            self._programs[k, rank] = self._make(k, rank, compressor_state)
        encode, combine = self._programs[k, rank]
        host = self.places(k)[0]
        told = self._of_own_regions(times) if self._num_times else None
        inside = self._spec.devices.weights(weights, regional(self._spec.mesh))
        start_step = self._spec.start_step(event)
        staged, buffer, state = encode(
            region.params,
            stale_params,
            compressor_state,
            inside,
            region.key,
            start_step,
            told,
        )
        return staged, buffer, state, self._arriving(combine, host, start_step)

    def arriving(self, sync_id: tuple[int, int], rank: int) -> tuple[Callable, Any]:
        """Return the function that averages a sync, and the shape of the rows sent."""
        k, start_step = sync_id
        host, sent = self.places(k)[0], self._message_shapes(k, rank)
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), sent)
        like = jax.eval_shape(flat_buffer.pack, one)
        draws = self._spec.sync.message.average.draws
        step = np.int32(start_step) if draws else None
        return self._arriving(self._make_combine(k, rank), host, step), like

    def _arriving(
        self, combine: Callable, host: Sharding, start_step: np.int32 | None
    ) -> Callable:
        place = self._spec.devices.weights
        return lambda rows, weights: combine(rows, place(weights, host), start_step)

    def _make(self, k: int, rank: int, kept: PyTree) -> tuple[Callable, Callable]:
        """Make the programs that encode, but do not send, and that average.

        `kept` are the compressors' states, `[R, ...]`. A flat buffer without a layout
        is replicated inside each region.
        """
        spec, layout = self._spec, self._layout(k, rank)
        compressor = spec.sync.message.compressor(rank)
        of_shard = make_messages(spec, k, rank)
        outgoing = region_shard_map(
            of_shard, spec.mesh, in_specs=in_specs(spec), out_specs=P(REGION)
        )

        def encode(params, stale_params, state, weights, keys, start_step, times):
            staged, out, state = outgoing(
                params, stale_params, state, weights, keys, start_step
            )
            return staged, make_buffer(out, times, compressor, layout), state

        where = layout.sharding if layout else spec.shardings.region.key
        jitted = spec.devices.jit(
            encode,
            f"send fragment {k}",
            self.num_bytes(k, rank),
            out_shardings=(spec.staged(k), where, spec.shardings.of_regions(k, kept)),
        )
        return jitted, self._make_combine(k, rank)

    def _message_shapes(self, k: int, rank: int) -> PyTree:
        """Return shapes of one region's message, with its length for a robust mean."""
        spec = self._spec
        encoded = spec.sync.message.encoded(spec.outer_shapes[k], rank)
        return with_length(spec, encoded, rank)

    def _layout(self, k: int, rank: int) -> ShardBuffer | None:
        """Return a message's layout over a region's devices, or None for one device.

        Elastic regions pass full messages to threads, from one device.
        """
        spec, mesh = self._spec, self._spec.mesh
        is_whole = mesh.size == mesh.shape[REGION] or process_grid(mesh) is None
        if self.is_alone or is_whole:
            return None
        is_encoded = spec.sync.message.compressor(rank) is not None
        shapes = self._message_shapes(k, rank)
        sent = sent_shapes(is_encoded, shapes, self._num_times)
        where = spec.shardings.of_all(k, sent)
        return ShardBuffer.of(mesh, sent, jax.tree.map(lambda x: x.spec, where))

    @functools.cache  # noqa: B019  (as long as the programs)
    def _make_combine(self, k: int, rank: int) -> Callable:
        """Make `(rows, weights, start_step) -> (mean, times, verdicts)`."""
        spec, host, robust = self._spec, self.places(k)[0], self._spec.sync.robust
        is_summed = spec.sync.message.compressor(rank) is None
        mean_of = None if is_summed else functools.partial(robust_mean, spec, rank)
        shapes, layout = self._message_shapes(k, rank), self._layout(k, rank)
        crossing = make_combine(
            mean_of, host, shapes, self._num_times, self.all_reduce, layout
        )
        restore = make_restore(spec, k)
        # Each process its part, if a region's processes shard the outer state.
        mean = host if self.is_alone else spec.place.lay(k, spec.outer_shapes[k])

        def combine(rows, weights):
            told = {}
            if robust is not None and is_summed:
                sizes = [math.prod(x.shape) for x in jax.tree.leaves(shapes)]
                # A message's length is its last leaf.
                at = (
                    sum(sizes[:-1]) if layout is None else layout.column(len(sizes) - 1)
                )
                lengths = jax.lax.with_sharding_constraint(rows[:, at], host)
                told[VERDICT], weights = robust.judge(lengths, weights)
                rows = without(rows, weights)
            mean, times = crossing(rows, weights)
            if not is_summed:
                mean, told = mean
            elif robust is not None:
                mean = mean.message
            return mean, times, told

        def arriving(rows, weights, start_step):
            mean, times, told = combine(rows, weights)
            return restore(mean, start_step), times, told

        return spec.devices.jit(arriving, out_shardings=(mean, host, host))

    def places(self, k: int) -> tuple[Sharding, Sharding]:
        """Return the sharding that a fragment is averaged in, and that of its mean."""
        host = self._spec.shardings.channel(k).host
        if self.is_alone and not host.is_fully_addressable:
            return SingleDeviceSharding(outer_device(self._spec.mesh)), host
        return host, host

    def _of_own_regions(self, times: tuple[float, float]) -> jax.Array:
        """Place `times` as regional `[R, 2]`; other processes set their own rows."""
        where = cast(Sharding, self._spec.shardings.region.key)
        shape = (self._num_times, 2)
        rows = np.broadcast_to(np.asarray(times, np.float32), shape)
        return self._spec.devices.put(rows, where)


def make_buffer(
    message: PyTree,
    times: jax.Array | None,
    compressor: Compressor | None,
    layout: ShardBuffer | None = None,
) -> jax.Array:
    """Pack what regions send into a flat buffer, `[R, n]`; see `sent_shapes`.

    `times` are measured seconds of each region, float32 `[R, 2]`, or None; with a
    `layout` each device packs its shards.
    """
    if times is not None and compressor is None:
        dtype = jax.tree.leaves(message)[0].dtype
        own = jnp.eye(len(times), dtype=dtype)
        times = own[:, :, None] * times[:, None].astype(dtype)
    sent = (message, times)
    return flat_buffer.pack(sent) if layout is None else layout.pack(sent)


def make_combine(
    mean_of: Callable[[PyTree, jax.Array], PyTree] | None,
    everywhere: Sharding,
    shapes: PyTree,
    num_times: int = 0,
    all_reduce: str = "direct",
    layout: ShardBuffer | None = None,
) -> Callable:
    """Make the program that averages messages over the outer mesh.

    Args:
      mean_of: `mean_of(messages, weights)`, the mean of all regions' encoded messages;
        None for uncompressed pseudo-gradients.
      everywhere: sharding that replicates to every process's outer device.
      shapes: of one region's message.
      num_times: regions whose times are sent too; 0 for none.
      all_reduce: one of `collectives.ALL_REDUCES`.
      layout: of the rows, unless they are a `flat_buffer`.

    Returns:
      `combine(rows [R, n], weights [R]) -> (mean, times)`. `rows` are `make_buffer`'s,
      on their regions' processes; further columns are ignored. `times` are float32
      `[R, 2]`, or None; those of a region of weight 0 are 0.
    """
    sent = sent_shapes(mean_of is not None, shapes, num_times)
    how = everywhere, all_reduce, layout is not None

    def combine(rows, weights):
        if mean_of is None:
            weights = weights.astype(rows.dtype)
            crossed = sum_over_processes(rows, weights, *how)
        else:
            crossed = gather_from_processes(rows, *how)
        if layout is None:
            message, times = flat_buffer.unpack(crossed, sent)
        else:
            message, times = layout.unpack(crossed, everywhere)
        if mean_of is not None:
            return mean_of(message, weights), times
        if times is not None:
            share = weights[:, None]
            known = jnp.where(share > 0, times / jnp.where(share > 0, share, 1), 0)
            times = known.astype(jnp.float32)
        return message, times

    return combine


def sent_shapes(
    is_encoded: bool, shapes: PyTree, num_times: int
) -> tuple[PyTree, jax.ShapeDtypeStruct | None]:
    """Return the shapes of all that one region sends."""
    if not num_times:
        return shapes, None
    if is_encoded:
        return shapes, jax.ShapeDtypeStruct((2,), jnp.float32)
    dtype = jax.tree.leaves(shapes)[0].dtype
    return shapes, jax.ShapeDtypeStruct((num_times, 2), dtype)
