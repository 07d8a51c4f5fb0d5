"""Exchange over the outer mesh: between hosts, concurrently with the inner steps.

One program encodes every region's message on the inner mesh into a flat buffer, each
device its own part (`flat_buffer.ShardBuffer`). Each process moves the columns of its
own devices to its outer device, where the matching part of the outer state is. Another
program averages them there with those of the other regions' corresponding processes,
while the inner mesh computes: uncompressed pseudo-gradients are all-reduced; compressed
messages are all-gathered and decoded by each process. The result goes back to each
device's shard.

Measured times travel in the same flat buffer: appended to a compressed message; for a
pseudo-gradient in separate columns of each region, to which the others add zeros.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.sharding import Sharding, SingleDeviceSharding

from cocodc_jax.core import sync as core
from cocodc_jax.core.sync import Extras
from cocodc_jax.engine import flat_buffer
from cocodc_jax.engine.collectives import gather_from_processes, sum_over_processes
from cocodc_jax.engine.crossing import (
    Exchange,
    Leaving,
    Sending,
    Sent,
    SyncSpec,
    key_of,
    over_regions,
    with_length,
)
from cocodc_jax.engine.flat_buffer import ShardBuffer
from cocodc_jax.engine.mesh import REGION, outer_device, process_grid
from cocodc_jax.sync.fragments import PyTree
from cocodc_jax.sync.robust import VERDICT, without
from cocodc_jax.sync.schedules.base import Event


class OnOuterMesh(Exchange):
    """Compiled programs that encode fragments and average them between hosts."""

    is_alone = False  # Whether the outer mesh has one of several elastic regions.

    def __init__(self, spec: SyncSpec, all_reduce: str):
        super().__init__(spec)

        dtypes_of_parts = [
            {x.dtype.name for x in jax.tree.leaves(part)} for part in spec.outer_shapes
        ]
        dtypes = sorted(max(dtypes_of_parts, key=len))
        if len(dtypes) > 1 and spec.sync.message.compressor() is None:
            raise ValueError(  # Bytes would be summed.
                f"parameters of {' and '.join(dtypes)} cannot be averaged between "
                "hosts; use one dtype, exchange='program', or compressed messages"
            )

        self.all_reduce = all_reduce  # One of `collectives.ALL_REDUCES`.
        self._num_times = spec.regions.num if spec.is_measured else 0

        # Caches of the object, so that they end with it.
        self.row_shape = functools.cache(self._row_shape)
        self._combine = functools.cache(self._make_combine)

    def send(self, sending: Sending) -> Sent:
        """Send a fragment; see `Exchange.send`."""
        return core.start(_OuterCrossing(self, sending))

    def leave(self, sending: Sending) -> tuple[tuple[Any, jax.Array], PyTree]:
        """Encode a fragment without sending it.

        Returns its copies and the buffer to send, `[R, n]`, and the compressors'
        state after it.
        """
        spec = self._spec
        times = None
        if self._num_times:  # Other processes set their own rows.
            rows = np.array([sending.times] * self._num_times, np.float32)
            times = spec.devices.put(rows, cast(Sharding, spec.shardings.region.key))

        copies, buffer, memory = self._run(sending, times)
        return (copies, buffer), memory

    def cross(self, event: Event, buffer: jax.Array) -> jax.Array:
        """Move a buffer's rows to the outer devices."""
        channel = self._spec.shardings.channel(event.fragment_id)
        return self._spec.devices.gather_rows(buffer, channel.rows)

    def arriving(self, sync_id: tuple[int, int], rank: int) -> Callable:
        """Return the function that averages a sync.

        It takes all regions' rows, on the outer device, and the weights; it returns the
        mean and what arrives with it.
        """
        k, start_step = sync_id
        combine = self._combine(k, rank)
        sharding, _ = self.places(k)
        step = self._spec.start_step(start_step)

        def average(
            rows: jax.Array, weights: tuple[float, ...]
        ) -> tuple[PyTree, Extras]:
            return combine(rows, self._spec.devices.weights(weights, sharding), step)

        return average

    def _row_shape(self, k: int, rank: int) -> jax.ShapeDtypeStruct:
        """Return the shape of one region's row, `[1, n]`, without times."""
        shapes = self._message_shapes(self._spec.at(rank), k)
        row = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), shapes
        )
        return jax.eval_shape(flat_buffer.pack, row)

    def _make(self, spec: SyncSpec, fragment_id: int, memory: PyTree) -> Callable:
        """Make the program that encodes, and packs the message and times.

        A flat buffer without a layout is replicated inside each region.
        """
        layout = self._layout(spec, fragment_id)
        encode_all = over_regions(spec, fragment_id, P(REGION), leaves=False)

        def encode(leaving: Leaving, times: Any) -> tuple[Extras, jax.Array, PyTree]:
            copies, message, memory = encode_all(leaving)
            buffer = make_buffer(message, times, spec.is_gathered, layout)
            return copies, buffer, memory

        return spec.devices.jit(
            encode,
            f"send fragment {fragment_id}",
            self._bytes(spec, fragment_id),
            out_shardings=(
                spec.kept_shardings(fragment_id),
                layout.sharding if layout else spec.shardings.region.key,
                spec.shardings.of_regions(fragment_id, memory),
            ),
        )

    def _message_shapes(self, spec: SyncSpec, k: int) -> PyTree:
        """Return shapes of one region's message, with its length for a robust mean."""
        return with_length(spec, spec.sync.message.encoded(spec.outer_shapes[k]))

    def _layout(self, spec: SyncSpec, k: int) -> ShardBuffer | None:
        """Return a message's layout over a region's devices, or None for one device.

        Elastic regions pass full messages to threads, from one device.
        """
        mesh = spec.mesh
        is_whole = mesh.size == mesh.shape[REGION] or process_grid(mesh) is None
        if self.is_alone or is_whole:
            return None

        shapes = self._message_shapes(spec, k)
        sent = sent_shapes(spec.is_gathered, shapes, self._num_times)
        shardings = spec.shardings.of_all(k, sent)
        return ShardBuffer.of(mesh, sent, jax.tree.map(lambda x: x.spec, shardings))

    def _make_combine(self, k: int, rank: int) -> Callable:
        """Make `(rows, weights, start_step) -> (mean, what arrives with it)`."""
        spec = self._spec.at(rank)
        sync = spec.sync
        robust = sync.robust
        host, _ = self.places(k)
        shapes = self._message_shapes(spec, k)
        layout = self._layout(spec, k)
        mean_of = None
        if spec.is_gathered:
            mean_of = functools.partial(core.mean_of_gathered, sync)
        crossing = make_combine(
            mean_of,
            host,
            shapes,
            num_times=self._num_times,
            all_reduce=self.all_reduce,
            layout=layout,
        )

        def filtered(
            rows: jax.Array, weights: jax.Array
        ) -> tuple[jax.Array, jax.Array, Extras]:
            """Filter uncompressed messages by their lengths."""
            if robust is None:
                return sync.counted(rows, weights), weights, {}

            # A message's length is its last leaf; only times follow it.
            *leaves, _ = jax.tree.leaves(shapes)
            if layout is not None:
                column = layout.pieces[len(leaves)].start
            else:
                column = sum(math.prod(x.shape) for x in leaves)
            lengths = jax.lax.with_sharding_constraint(rows[:, column], host)
            verdict, counted = robust.judge(lengths, weights)
            return without(rows, counted), counted, {VERDICT: verdict}

        like = spec.outer_shapes[k]

        def combine(
            rows: jax.Array, weights: jax.Array, start_step: Any
        ) -> tuple[PyTree, Extras]:
            if spec.is_gathered:
                (mean, extras), times = crossing(rows, weights)
            else:
                rows, weights, extras = filtered(rows, weights)
                mean, times = crossing(rows, weights)
                if robust is not None:
                    mean = mean.message

            if times is not None:
                extras = {**extras, "times": times}

            key = key_of(k, start_step)
            return sync.message.average.after(mean, like, key), extras

        # Each process has its part, if a region's processes shard the outer state.
        of_mean = host if self.is_alone else spec.place.lay(k, like)
        return spec.devices.jit(combine, out_shardings=(of_mean, host))

    def places(self, k: int) -> tuple[Sharding, Sharding]:
        """Return the sharding that a fragment is averaged in, and that of its mean."""
        host = self._spec.shardings.channel(k).host

        if self.is_alone and not host.is_fully_addressable:
            return SingleDeviceSharding(outer_device(self._spec.mesh)), host
        return host, host


@dataclasses.dataclass(frozen=True)
class _OuterCrossing:
    """A `core.sync.Crossing` whose stages are programs, and moves between devices."""

    exchange: OnOuterMesh
    sending: Sending

    def leave(self) -> tuple[tuple[Any, jax.Array], PyTree]:
        return self.exchange.leave(self.sending)

    def cross(self, left: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        copies, buffer = left
        return copies, self.exchange.cross(self.sending.event, buffer)

    def arrive(self, crossed: tuple[Any, jax.Array]) -> tuple[PyTree, Extras]:
        copies, rows = crossed
        event = self.sending.event
        arriving = self.exchange.arriving(event.sync_id, event.rank)
        mean, extras = arriving(rows, self.sending.weights)
        return mean, copies | extras


def make_buffer(
    message: PyTree, times: Any, is_gathered: bool, layout: ShardBuffer | None = None
) -> jax.Array:
    """Pack what regions send, and their times `[R, 2]`, if any; see `sent_shapes`."""
    if times is not None and not is_gathered:
        # Each region has columns for all, and zeros in those of the others.
        dtype = jax.tree.leaves(message)[0].dtype
        is_own = jnp.eye(len(times), dtype=dtype)
        times = is_own[:, :, None] * times[:, None].astype(dtype)

    pack = layout.pack if layout else flat_buffer.pack
    return pack((message, times))


def make_combine(
    mean_of: Callable[[PyTree, jax.Array], PyTree] | None,
    everywhere: Sharding,
    shapes: PyTree,
    num_times: int = 0,
    all_reduce: str = "direct",
    layout: ShardBuffer | None = None,
) -> Callable:
    """Make the program that averages messages over the outer mesh.

    `combine(rows [R, n], weights [R]) -> (mean, times)`: `rows` are `make_buffer`'s, on
    their regions' processes; further columns are ignored. `times` are float32 `[R, 2]`,
    or None; those of a region of weight 0 are 0. `mean_of(messages, weights)` is the
    mean of all regions' encoded messages, None for uncompressed pseudo-gradients.
    `everywhere` replicates to every process's outer device, `shapes` are of one
    region's message, `num_times` is the number of regions whose times are sent too.
    """
    is_encoded = mean_of is not None
    sent = sent_shapes(is_encoded, shapes, num_times)
    in_shares = layout is not None

    def combine(rows: jax.Array, weights: jax.Array) -> tuple[PyTree, Any]:
        if is_encoded:
            crossed = gather_from_processes(rows, everywhere, all_reduce, in_shares)
        else:
            weights = weights.astype(rows.dtype)
            crossed = sum_over_processes(
                rows, weights, everywhere, all_reduce, in_shares
            )

        if layout is None:
            message, times = flat_buffer.unpack(crossed, sent)
        else:
            message, times = layout.unpack(crossed, everywhere)
        if mean_of is not None:
            return mean_of(message, weights), times

        if times is not None:  # They were multiplied by their region's weight.
            share = weights[:, None]
            unscaled = jnp.where(share > 0, times / jnp.where(share > 0, share, 1), 0)
            times = unscaled.astype(jnp.float32)
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
