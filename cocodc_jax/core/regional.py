"""Outer models of the regions' own: a message sent, a mean taken in, steps bent.

As `sync.py` has it for the model that regions share, of one region and one fragment;
see `sync.outer.RegionalOuter`.
"""

from __future__ import annotations

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
    """Make one region's message, where outer models are the regions' own.

    Args:
      outer: the optimizer.
      compressor: of the messages.
      part: the region's own fragment.
      params: its outer fragment.
      state: of the outer optimizer.
      key_data: of the region's PRNG key.

    Returns:
      The message, and the state after it.
    """
    message, new = outer.send(params, state, part, compressor, message_key(key_data))
    return message, vary_like(new, state)


def receive(
    outer: RegionalOuter,
    params: Fragment,
    state: PyTree,
    arrived: PyTree,
    num_regions: int,
) -> tuple[Fragment, PyTree, jax.Array]:
    """Step one region's own outer model with what arrived.

    Returns:
      The outer fragment and the state after it, and the norm of what arrived, a float32
      scalar.
    """
    new, new_state = outer.receive(params, state, arrived, num_regions)
    new = jax.tree.map(lambda x, like: x.astype(like.dtype), new, params)
    norm = optax.tree_utils.tree_norm(arrived).astype(jnp.float32)
    return new, vary_like(new_state, state), norm


def make_correct(
    sync: Sync | None, fragments: Fragments, num_regions: int
) -> Callable | None:
    """Make what a region's outer model does to its gradients, if it does anything.

    Returns:
      `correct(gradient, params, outer) -> gradient` of one region, all but `outer`, the
      outer fragments and their states, trees like the parameters; None where gradients
      stay as they are.
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
