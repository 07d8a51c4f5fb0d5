"""Error feedback of the merge: what it leaves out goes into the next message.

See `core.sync.remember`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from cocodc_jax.core import sync as core
from cocodc_jax.runtime.devices.mesh import REGION
from cocodc_jax.runtime.devices.region_map import region_shard_map
from cocodc_jax.runtime.exchange.compressors import Compressors
from cocodc_jax.runtime.setting import Setting

PyTree = Any


def make_remember(setting: Setting, fragment_id: int) -> Callable:
    """Make what remembers what the merge of a fragment will leave out, not yet jitted.

    Args:
      setting: of the run.
      fragment_id: which fragment.

    Returns:
      `remember(params, staged, state) -> state`: `params` of the regions before the
      merge, the copy from when the sync started, and the regions' compressors' state
      `[R, ...]`.
    """
    share = setting.sync.merge.told_later

    def remember(params, staged, state):
        local = setting.fragments.take(params, fragment_id, lead=1)
        return core.remember(share, local, staged, state)

    regions = P(REGION)
    return region_shard_map(
        remember, setting.mesh, in_specs=(regions,) * 3, out_specs=regions
    )


def jit_remember(setting: Setting, fragment_id: int) -> Callable:
    """Compile `make_remember` as a program of its own, which donates the state."""
    part = setting.outer_shapes[fragment_id]
    return jax.jit(
        make_remember(setting, fragment_id),
        donate_argnums=2,
        out_shardings=Compressors(setting).where(fragment_id, part),
    )
