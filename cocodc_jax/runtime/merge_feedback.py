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
from cocodc_jax.sync.fragments import Fragments
from cocodc_jax.sync.method import Method
from cocodc_jax.transforms.error_feedback import ErrorFeedbackState

PyTree = Any


def check(method: Method, fragments: Fragments, params: PyTree) -> None:
    """Refuse merges that remember, where messages have no residual to remember it in.

    Args:
      method: of the run.
      fragments: the cut of the parameters.
      params: shapes of one region's.

    Raises:
      ValueError: naming the argument, and what would be right.
    """
    if method.sync is None or not method.sync.merge.told_later:
        return
    part = jax.eval_shape(lambda x: fragments.take(x, 0), params)
    state = jax.eval_shape(method.sync.message.init, part)
    is_like = isinstance(state, ErrorFeedbackState) and jax.tree.map(
        lambda x: x.shape, state.residual
    ) == jax.tree.map(lambda x: x.shape, part)
    if not is_like:
        raise ValueError(
            f"merge_feedback=True needs messages of method={method.name!r} with error "
            "feedback of whole fragments, such as compress='ef+int4'"
        )


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
