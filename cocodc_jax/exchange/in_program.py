"""Exchange through one compiled program: it sends messages and averages them.

`crossings.py` has the collectives. Where regions share a fabric, `leave` and `arrive`
enclose the inner steps instead (`program/segment.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.exchange.base import Exchange, Sent, Times
from cocodc_jax.exchange.crossings import make_crossing
from cocodc_jax.exchange.pseudo_gradient import abstract_sent, start_step_of
from cocodc_jax.exchange.sync_spec import SyncSpec
from cocodc_jax.sharding import transfer
from cocodc_jax.sharding.mesh import regional
from cocodc_jax.sync.needs import STAGED
from cocodc_jax.sync.schedules.base import Event

PyTree = Any


class InProgram(Exchange):
    """Compiled programs that send fragments and average them."""

    shares_mesh = True

    def __init__(self, spec: SyncSpec, in_one_buffer: bool):
        """Compile nothing; for `in_one_buffer` see `make_crossing`."""
        super().__init__(spec)
        self._in_one_buffer = in_one_buffer
        self._programs: dict[tuple[int, int], Callable] = {}

    def send(
        self, event: Event, weights: tuple[float, ...], times: Times, *arrays: Any
    ) -> Sent:
        """Send a fragment; see `Exchange.send`."""
        del times  # Only the outer mesh sends times.
        region, stale_params, compressor_state = arrays
        k, rank = event.fragment_id, event.rank
        if (k, rank) not in self._programs:
            self._programs[k, rank] = self._make(k, rank, compressor_state)
        staged, mean, state, told = self._programs[k, rank](
            region.params,
            stale_params,
            compressor_state,
            self.weights(weights),
            region.key,
            start_step_of(self._spec, event),
        )
        return staged, mean, told, state

    def list_programs(self, fragment_id: int, *arrays: Any) -> tuple[Callable, tuple]:
        """Return the program that sends a fragment; see `Exchange.list_programs`."""
        program = self._make(fragment_id, 0, arrays[-1])
        return program, abstract_sent(self._spec, *arrays)

    def _make(self, fragment_id: int, rank: int, compressor_state: PyTree) -> Callable:
        shardings = self._spec.shardings
        keeps = STAGED in self._spec.sync.copies
        out_shardings = (
            shardings.staged[fragment_id] if keeps else None,
            shardings.fragments[fragment_id],
            shardings.of_regions(fragment_id, compressor_state),
            NamedSharding(self._spec.mesh, P()),
        )
        crossing = make_crossing(self._spec, fragment_id, rank, self._in_one_buffer)

        def sent(*arguments):
            staged, crossed, state = crossing.leave(*arguments)
            mean, told = crossing.arrive(crossed, arguments[-1])
            return staged, mean, state, told

        return jax.jit(sent, out_shardings=out_shardings)

    def weights(self, weights: tuple[float, ...]) -> jax.Array:
        """Place the regions' weights on the mesh."""
        return self._placed(weights)

    @functools.lru_cache(maxsize=64)  # noqa: B019  (lives as long as the programs)
    def _placed(self, weights: tuple[float, ...]) -> jax.Array:
        return transfer.put(np.array(weights, float), regional(self._spec.mesh))
