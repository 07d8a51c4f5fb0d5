"""Exchange over the outer mesh: between hosts, concurrently with the inner steps.

One program encodes every region's message on the inner mesh into a flat buffer, each
device its own part (`shard_buffer.py`). Each process moves the columns of its own
devices to its outer device. Another program communicates there with the corresponding
processes of the other regions and averages those columns (`combine.py`), while the
inner mesh computes. The matching part of the outer state is there too. The result goes
back to each device's shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from cocodc_jax.exchange import flat_buffer
from cocodc_jax.exchange.base import Exchange, Sent, Times
from cocodc_jax.exchange.combine import make_buffer, sent_shapes
from cocodc_jax.exchange.pseudo_gradient import (
    abstract_sent,
    jit_messages,
    make_restore,
    start_step_of,
)
from cocodc_jax.exchange.robust_mean import make_robust_combine, with_length
from cocodc_jax.exchange.shard_buffer import ShardBuffer
from cocodc_jax.exchange.sync_spec import SyncSpec
from cocodc_jax.sharding import transfer
from cocodc_jax.sharding.mesh import REGION, regional
from cocodc_jax.sharding.outer_mesh import outer_device, process_grid
from cocodc_jax.sync.fragments import Fragment
from cocodc_jax.sync.schedules.base import Event

PyTree = Any


class OnOuterMesh(Exchange):
    """Compiled programs that encode fragments and average them between hosts."""

    def __init__(self, spec: SyncSpec, all_reduce: str, is_alone: bool = False):
        """Compile nothing."""
        super().__init__(spec)
        self.all_reduce = all_reduce
        self._is_alone = is_alone
        self._num_times = spec.regions.num if spec.is_measured else 0
        self._programs: dict[tuple[int, int], tuple[Callable, Callable]] = {}

    def send(
        self, event: Event, weights: tuple[float, ...], times: Times, *arrays: Any
    ) -> Sent:
        """Send a fragment; see `Exchange.send`."""
        staged, buffer, state, arriving = self.encoded(event, weights, times, *arrays)
        channel = self._spec.shardings.channel(event.fragment_id)
        rows = transfer.gather_rows(buffer, channel.rows)
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
        inside = self._weights(weights, regional(self._spec.mesh))
        start_step = start_step_of(self._spec, event)
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

    def list_programs(self, fragment_id: int, *arrays: Any) -> tuple[Callable, tuple]:
        """Return the program that encodes a fragment; see `Exchange.list_programs`.

        The one that communicates runs on the host's CPU.
        """
        spec = self._spec
        encode, _ = self._make(fragment_id, 0, arrays[-1])
        told = None
        if self._num_times:
            where = cast(Sharding, spec.shardings.region.key)
            told = jax.ShapeDtypeStruct(
                (self._num_times, 2), np.float32, sharding=where
            )
        return encode, (*abstract_sent(spec, *arrays), told)

    def arriving(self, sync_id: tuple[int, int], rank: int) -> tuple[Callable, Any]:
        """Return the function that averages a sync, and the shape of the rows sent."""
        k, start_step = sync_id
        draws = self._spec.sync.message.average.draws
        host = self.places(k)[0]
        sent = self._message_shapes(k, rank)
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), sent)
        like = jax.eval_shape(flat_buffer.pack, one)
        step = np.int32(start_step) if draws else None
        return self._arriving(self._make_combine(k, rank), host, step), like

    def _arriving(
        self, combine: Callable, host: Sharding, start_step: np.int32 | None
    ) -> Callable:
        return lambda rows, weights: combine(
            rows, self._weights(weights, host), start_step
        )

    def _make(self, k: int, rank: int, kept: PyTree) -> tuple[Callable, Callable]:
        layout = self._layout(k, rank)
        compressor = self._spec.sync.message.compressor(rank)
        pack = functools.partial(make_buffer, compressor=compressor, layout=layout)
        where = layout.sharding if layout else None
        encode = jit_messages(self._spec, k, rank, kept, pack, where)
        return encode, self._make_combine(k, rank)

    def _message_shapes(self, k: int, rank: int) -> PyTree:
        """Return shapes of one region's message, with its length for a robust mean."""
        spec = self._spec
        encoded = spec.sync.message.encoded(spec.outer_shapes[k], rank)
        return with_length(spec, encoded, rank)

    def _layout(self, k: int, rank: int) -> ShardBuffer | None:
        """Return a message's layout over a region's devices, or None for one device.

        Elastic regions pass full messages to threads, from one device.
        """
        spec = self._spec
        mesh = spec.mesh
        is_whole = mesh.size == mesh.shape[REGION] or process_grid(mesh) is None
        if self._is_alone or is_whole:
            return None
        is_encoded = spec.sync.message.compressor(rank) is not None
        shapes = self._message_shapes(k, rank)
        sent = sent_shapes(is_encoded, shapes, self._num_times)
        where = spec.shardings.of_all(k, sent)
        return ShardBuffer.of(mesh, sent, jax.tree.map(lambda x: x.spec, where))

    @functools.cache  # noqa: B019  (as long as the programs)
    def _make_combine(self, k: int, rank: int) -> Callable:
        spec = self._spec
        message = spec.sync.message
        host = self.places(k)[0]
        combine = make_robust_combine(
            spec,
            rank,
            host,
            message.encoded(spec.outer_shapes[k], rank),
            self._num_times,
            self.all_reduce,
            self._layout(k, rank),
        )
        restore = make_restore(spec, k)
        # Each process its part, if a region's processes shard the outer state.
        mean = host
        if not self._is_alone:
            mean = spec.place.lay(k, spec.outer_shapes[k])

        def arriving(rows, weights, start_step):
            mean, times, told = combine(rows, weights)
            return restore(mean, start_step), times, told

        return jax.jit(arriving, out_shardings=(mean, host, host))

    def places(self, k: int) -> tuple[Sharding, Sharding]:
        """Return the sharding that a fragment is averaged in, and that of its mean."""
        host = self._spec.shardings.channel(k).host
        if self._is_alone and not host.is_fully_addressable:
            return SingleDeviceSharding(outer_device(self._spec.mesh)), host
        return host, host

    @functools.lru_cache(maxsize=64)  # noqa: B019  (lives as long as the programs)
    def _weights(self, weights: tuple[float, ...], sharding: Sharding) -> jax.Array:
        return transfer.put(np.array(weights, float), sharding)

    def _of_own_regions(self, times: tuple[float, float]) -> jax.Array:
        """Place `times` as regional `[R, 2]`; other processes set their own rows."""
        where = cast(Sharding, self._spec.shardings.region.key)
        shape = (self._num_times, 2)
        rows = np.broadcast_to(np.asarray(times, np.float32), shape)
        return jax.make_array_from_callback(shape, where, rows.__getitem__)
