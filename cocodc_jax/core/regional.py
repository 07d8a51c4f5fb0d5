"""Regional outer models: send a message, receive a mean, correct inner gradients.

The counterpart of `sync.py` for `sync.outer.RegionalOuter`, of one region and fragment.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.core.sync import message_key
from cocodc_jax.sync.fragments import Fragment, Fragments
from cocodc_jax.sync.method import Sync
from cocodc_jax.sync.outer import RegionalOuter
from cocodc_jax.transforms.compressor import Compressor
from cocodc_jax.transforms.numerics import vary_like

PyTree = Any


def send(
    outer: RegionalOuter,
    compressor: Compressor,
    part: Fragment,
    params: Fragment,
    state: PyTree,
    key_data: jax.Array,
) -> tuple[PyTree, PyTree]:
    """Make one region's message of its local `part` and outer `params`."""
    message, new = outer.send(params, state, part, compressor, message_key(key_data))
    return message, vary_like(new, state)


def receive(
    outer: RegionalOuter,
    params: Fragment,
    state: PyTree,
    arrived: PyTree,
    num_regions: int,
) -> tuple[Fragment, PyTree, jax.Array]:
    """Step one region's own outer model; the last result is the norm of the mean."""
    new, new_state = outer.receive(params, state, arrived, num_regions)
    new = jax.tree.map(lambda x, like: x.astype(like.dtype), new, params)
    norm = optax.tree_utils.tree_norm(arrived).astype(jnp.float32)
    return new, vary_like(new_state, state), norm


def make_correct(
    sync: Sync | None, fragments: Fragments, num_regions: int
) -> Callable | None:
    """Make `correct(gradient, params, outer) -> gradient` of one region, or None.

    There `outer` has the outer fragments, and their states.
    """
    outer = sync and sync.outer
    if not isinstance(outer, RegionalOuter) or outer.correct is None:
        return None
    of_fragment = outer.correct

    def correct(gradient: PyTree, params: PyTree, kept: PyTree) -> PyTree:
        for k, (part, state) in enumerate(zip(*kept, strict=True)):
            own = fragments.take(gradient, k)
            local = fragments.take(params, k)
            bent = of_fragment(own, local, part, state, num_regions)
            bent = jax.tree.map(lambda x, like: x.astype(like.dtype), bent, own)
            gradient = fragments.put(gradient, k, bent)
        return gradient

    return correct
