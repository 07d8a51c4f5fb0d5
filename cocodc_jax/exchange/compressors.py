"""States of the regions' compressors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from cocodc_jax.core.state import SyncState
from cocodc_jax.exchange.sync_spec import SyncSpec
from cocodc_jax.sharding.local_regions import for_all_regions
from cocodc_jax.sync.fragments import Fragment
from cocodc_jax.sync.messages import Ranked
from cocodc_jax.sync.summed import SummedFactors

PyTree = Any


class Compressors:
    """Initial states and shardings of compressors, and programs that change ranks."""

    def __init__(self, spec: SyncSpec):
        """Compile nothing."""
        self._spec = spec
        self._resize: dict[tuple[int, int], Callable] = {}

    def init(self, parts: tuple[Fragment, ...], rank: int) -> tuple:
        """Return the initial states of the regions' compressors."""
        spread = functools.partial(for_all_regions, num_regions=self._spec.regions.num)
        message = self._spec.sync.message
        return tuple(
            message.of_regions(spread(message.init(part, rank))) for part in parts
        )

    def where(self, fragment_id: int, part: Fragment, rank: int = 0) -> PyTree:
        """Return the shardings of a fragment's compressor states."""
        (kept,) = jax.eval_shape(lambda x: self.init((x,), rank), part)
        return self._spec.shardings.of_regions(fragment_id, kept)

    def resized(self, sync: SyncState, rank: int) -> tuple:
        """Return the states of `sync` resized to messages of `rank`."""
        states = []
        for k, state in enumerate(sync.compressors):
            if (k, rank) not in self._resize:
                part = sync.outer.params[k]
                self._resize[k, rank] = self._make_resize(k, part, rank)
            states.append(self._resize[k, rank](state))
        return tuple(states)

    def _make_resize(self, fragment_id: int, part: Fragment, rank: int) -> Callable:
        message = self._spec.sync.message
        assert isinstance(message, Ranked | SummedFactors)
        shapes = jax.eval_shape(lambda x: x, part)
        return jax.jit(
            jax.vmap(lambda state: message.resize(state, shapes, rank)),
            out_shardings=self.where(fragment_id, shapes, rank),
        )
