"""The seam between a trainer and the engine, which `RegionSync` and `Window` share."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

from cocodc_jax.core.state import AppliedSync, SyncState, TrainState
from cocodc_jax.engine.sync_program import SyncProgram
from cocodc_jax.region_sync.layout import Layout
from cocodc_jax.region_sync.trees import Selection


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["sync", "keys"],
    meta_fields=["step", "next_step", "bytes_sent"],
    drop_fields=["applied"],
)
@dataclasses.dataclass(frozen=True)
class RegionSyncState:
    """State of the syncs, which a trainer keeps next to its own.

    Attributes:
      sync: outer model, fragments in flight, compressors; arrays and the schedule.
      keys: PRNG key data of the regions, uint32 `[R, 2]`.
      step: steps that the trainer has done.
      next_step: the step of the next event, until which `after_step` does nothing.
      bytes_sent: bytes that one region has sent.
      applied: the syncs that the last `after_step` merged.
    """

    sync: SyncState
    keys: jax.Array
    step: int = 0
    next_step: int = 0
    bytes_sent: int = 0
    applied: tuple[AppliedSync, ...] = ()


@dataclasses.dataclass(frozen=True)
class Seam:
    """The arrays that cross the seam, their placement, and the engine behind it.

    Attributes:
      selection: which leaves of the trainer's tree are averaged.
      layout: how they are placed on the trainer's devices.
      program: the engine.
    """

    selection: Selection
    layout: Layout
    program: SyncProgram

    def steps_to_event(self, state: RegionSyncState) -> int:
        """Return the steps until the next event."""
        return state.next_step - state.step

    def state_of(
        self,
        run: TrainState,
        keys: jax.Array | None = None,
        applied: tuple[AppliedSync, ...] = (),
    ) -> RegionSyncState:
        """Return the trainer's part of the engine's state."""
        assert run.sync is not None
        assert self.program.method.schedule is not None
        return RegionSyncState(
            sync=run.sync,
            keys=run.region.key if keys is None else keys,
            step=run.step,
            next_step=self.program.method.schedule.next_step(run.sync.schedule),
            bytes_sent=run.bytes_sent,
            applied=applied,
        )

    def keys_at(self, state: RegionSyncState, step: int) -> jax.Array:
        """Return the regions' PRNG key data of a step, uint32 `[R, 2]`."""
        return _keys_at(state.keys, np.int32(step))


@jax.jit
def _keys_at(keys: jax.Array, step: jax.Array) -> jax.Array:
    """Return the regions' keys of a step, from those of the run."""

    def key_at_step(key_data: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data), step)
        return jax.random.key_data(key)

    return jax.vmap(key_at_step)(keys)
