"""How a fragment leaves the regions where all share one outer model.

Either one program of the inner mesh makes the mean, or one encodes the messages there
and another crosses the outer mesh (`crossing.py`), while the inner mesh goes on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from cocodc_jax.runtime import crossing, exchange, transfer
from cocodc_jax.runtime.inner import Block
from cocodc_jax.runtime.layout import Layout, place
from cocodc_jax.runtime.mesh import regional
from cocodc_jax.runtime.rings import ring_bytes
from cocodc_jax.runtime.state import InFlight
from cocodc_jax.sync.fragments import Fragment, Fragments
from cocodc_jax.sync.methods import Method
from cocodc_jax.transforms.compressor import message_bytes

PyTree = Any


class Sends:
    """The compiled programs that send fragments, and what they send."""

    def __init__(
        self,
        method: Method,
        fragments: Fragments,
        layout: Layout,
        block: Block,
        crosses_outside: bool,
        all_reduce: str,
    ):
        """Compiles nothing yet.

        Args:
          method: with one outer model.
          fragments: the cut.
          layout: where everything lives.
          block: the regions a device holds.
          crosses_outside: whether messages cross on the outer mesh.
          all_reduce: how they cross there, see `crossing.py`.
        """
        assert method.schedule is not None
        self._method, self._fragments, self._layout = method, fragments, layout
        self._block = block
        self._crosses_outside = crosses_outside
        self._all_reduce = all_reduce
        self._num_regions = block.size * layout.mesh.shape["region"]
        self._num_times = self._num_regions if method.schedule.measures else 0
        self._programs: dict[tuple[int, int], Callable] = {}

    def program(
        self, fragment: int, part: Fragment, kept: PyTree, rank: int
    ) -> Callable:
        """The program that sends `fragment`, made once.

        Args:
          fragment: which.
          part: the outer fragment.
          kept: shapes of what the regions' compressors keep, `[R, ...]`.
          rank: of the messages, where the schedule sets one.

        Returns:
          `send(params, origin, state, weights, keys, times) -> (staged, (mean, told),
          state)`, see `exchange.make_send`; `weights` a tuple, one a region, and
          `times` the two numbers that this process has measured. `told` is
          `InFlight.times`.
        """
        if (fragment, rank) not in self._programs:
            where = self._layout.of_regions(fragment, kept)
            self._programs[fragment, rank] = self._make(fragment, part, where, rank)
        return self._programs[fragment, rank]

    def _make(self, fragment: int, part: Fragment, kept: PyTree, rank: int) -> Callable:
        keep_staged = self._method.merge.needs_staged
        send = exchange.make_send(
            self._layout.mesh,
            self._fragments,
            fragment,
            self._block,
            self._method.compressor_at(rank),
            keep_staged,
            self._method.is_asynchronous,
            self._method.rings,
            not self._crosses_outside,
        )
        layout = self._layout
        staged = layout.staged[fragment] if keep_staged else None
        if not self._crosses_outside:
            arrives = layout.fragments[fragment]
            whole = jax.jit(send, out_shardings=(staged, arrives, kept))

            def send_inside(params, origin, state, weights, keys, times):
                del times  # Schedules that measure have their messages cross outside.
                inside = self._weights(weights, regional(layout.mesh))
                copy, mean, state = whole(params, origin, state, inside, keys)
                return copy, (mean, None), state

            return send_inside
        lane = layout.lane(fragment)
        encode = jax.jit(send, out_shardings=(staged, layout.region.key, kept))
        combine = jax.jit(
            crossing.make_combine(
                self._method.compressor_at(rank),
                lane.host,
                self._message_shapes(part, rank),
                self._num_times,
                self._all_reduce,
            ),
            out_shardings=lane.host,
        )

        def send_outside(params, origin, state, weights, keys, times):
            inside = self._weights(weights, regional(layout.mesh))
            told = self._of_own_regions(times) if self._num_times else None
            copy, pieces, state = encode(params, origin, state, inside, keys, told)
            rows = transfer.gather_rows(pieces, lane.rows)
            return copy, combine(rows, self._weights(weights, lane.host)), state

        return send_outside

    @functools.lru_cache(maxsize=64)  # noqa: B019  (lives as long as the programs)
    def _weights(self, weights: tuple[float, ...], sharding: Sharding) -> jax.Array:
        return transfer.put(np.array(weights, float), sharding)

    def _of_own_regions(self, times: tuple[float, float]) -> jax.Array:
        """Regional `[R, 2]`; the rows of other processes are as they say."""
        where = cast(Sharding, self._layout.region.key)
        shape = (self._num_regions, 2)
        rows = np.broadcast_to(np.asarray(times, np.float32), shape)
        return jax.make_array_from_callback(shape, where, rows.__getitem__)

    def num_bytes(self, part: Fragment, rank: int) -> int:
        """Bytes that one region sends for a sync of a fragment like `part`.

        One message, or where regions stand in rings all that a region passes on: its
        own part of the sum and the sums, 2 (M - 1) / M of the fragment.

        Args:
          part: shapes of the outer fragment.
          rank: of the message, where the schedule sets one.
        """
        if self._method.rings:
            return ring_bytes(self._method.rings, part, self._num_regions)
        compressor = self._method.compressor_at(rank)
        size = message_bytes(self._message_shapes(part, rank))
        return size + crossing.times_bytes(compressor, self._num_times)

    def _message_shapes(self, part: Fragment, rank: int) -> PyTree:
        """Of one region's message of a fragment like `part`."""
        compressor = self._method.compressor_at(rank)
        if compressor is None:
            return jax.eval_shape(lambda x: x, part)
        state = jax.eval_shape(compressor.init, part)
        key = jax.eval_shape(lambda: jax.random.key(0))
        return jax.eval_shape(compressor.encode, part, state, key)[0]

    def abstract_flight(
        self, fragment: int, params: PyTree, part: Fragment
    ) -> InFlight:
        """Shapes and shardings of a fragment in flight.

        Args:
          fragment: which.
          params: abstract parameters of the regions, `[R, ...]`.
          part: the outer fragment, abstract.
        """
        layout = self._layout
        staged = None
        if self._method.merge.needs_staged:
            staged = jax.eval_shape(
                lambda x: self._fragments.take(x, fragment, lead=1), params
            )
            staged = place(staged, layout.staged[fragment])
        arrives: Any = layout.fragments[fragment]
        if self._crosses_outside:
            arrives = layout.on_host(fragment, part)
        mean = place(part, arrives)
        told: Any = None
        if self._num_times:
            told = jax.ShapeDtypeStruct(
                (self._num_regions, 2),
                jnp.float32,
                sharding=layout.lane(fragment).host,
            )
        reference = part if self._method.needs_reference else None
        return InFlight(staged, mean, reference, times=told)
