"""How a fragment crosses regions: what leaves, what arrives, what is made of it.

With one outer model for all regions (`shared.py`), two programs for each fragment:

1. `send`, on the inner mesh: Delta = theta^g - theta^m of every region, encoded; the
   weighted mean over regions of what the messages decode to; and a staged copy where
   the merge wants it.
2. `outer_step`, on the outer device: theta^g <- OuterOptimizer(theta^g, mean Delta).

With outer parameters of each region's own (`regional.py`) both are programs over the
mesh, and what arrives may be the mean over a pair. The merge that follows is in
`merging.py`. Inner steps run between the programs.

A compressed message stays compressed on its way: what the compiler gathers from all
regions is the encoded arrays, and each place decodes them. Uncompressed
pseudo-gradients are averaged by an all-reduce, or by rings (`rings.py`).
Pseudo-gradients are old minus new and at least float32, whatever the parameters are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.runtime import crossing
from cocodc_jax.runtime.inner import Block
from cocodc_jax.runtime.mesh import REGION
from cocodc_jax.runtime.places import (
    from_all_places,
    mean_over_places,
    over_places,
    sum_over_places,
)
from cocodc_jax.runtime.rings import make_ring_sum
from cocodc_jax.sync.every_step import mean_of_decoded, weighted_sum_of_decoded
from cocodc_jax.sync.fragments import Fragment, Fragments
from cocodc_jax.sync.regional import RegionalOuter
from cocodc_jax.sync.rings import Rings
from cocodc_jax.transforms.compressor import Compressor
from cocodc_jax.transforms.numerics import vary_like

PyTree = Any


def outer_dtype(dtype: Any) -> Any:
    """The dtype of an outer parameter: its own, but at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def outer_parts(fragments: Fragments, params: PyTree) -> tuple[Fragment, ...]:
    """The outer fragments that a run begins with: copies of one region's parameters."""
    return tuple(
        jax.tree.map(
            lambda x: jnp.array(x, outer_dtype(x.dtype), copy=True),
            fragments.take(params, k),
        )
        for k in range(len(fragments))
    )


def message_key(key_data: jax.Array) -> jax.Array:
    """One region's key for rounding a message: its own fold of the region's key."""
    return jax.random.fold_in(jax.random.wrap_key_data(key_data), 4)


def make_send(
    mesh: Mesh,
    fragments: Fragments,
    fragment: int,
    block: Block,
    compressor: Compressor | None,
    keep_staged: bool,
    is_anchored: bool = False,
    rings: Rings | None = None,
    combines: bool = True,
) -> Callable:
    """Makes the program that sends one fragment, with one outer model.

    Args:
      mesh: the inner mesh.
      fragments: the cut.
      fragment: which.
      block: the regions a device holds.
      compressor: of each region's pseudo-gradient; None sends it as it is.
      keep_staged: whether to give a copy of the fragment as it is now.
      is_anchored: whether pseudo-gradients are taken from each region's anchor.
      rings: to sum uncompressed pseudo-gradients by; None is an all-reduce.
      combines: whether the program makes the mean; otherwise what it gives in its
        place are the messages of all regions, one piece each, for `crossing`.

    Returns:
      `send(params [R, ...], origin, state [R, ...], weights [R], keys [R, 2], times)
      -> (staged [R, ...] or None, mean, state)`. `origin` is the outer fragment, or the
      anchors `[R, ...]`; `times` float32 `[R, 2]`, what regions have measured, goes
      along with pieces, or is None. A region of weight 0 does not send, and keeps its
      state.
    """

    def of_regions(params, origin, state, weights, keys):
        staged = fragments.take(params, fragment, lead=1)
        delta = jax.tree.map(
            lambda o, x: (o if is_anchored else o[None]) - x.astype(o.dtype),
            origin,
            staged,
        )
        copy = staged if keep_staged else None
        if rings is not None:
            partial = _sum_of_block(delta, weights)
            return copy, jax.tree.map(lambda x: x[None], partial), state
        if compressor is None:
            return copy, _sum_of_all(delta, weights) if combines else delta, state
        message, state = block.map(encode)(delta, state, weights, keys)
        return copy, message, state

    def encode(delta, state, weight, key_data):
        assert compressor is not None
        message, new = compressor.encode(delta, state, message_key(key_data))
        new = jax.tree.map(lambda x, y: jnp.where(weight > 0, x, y), new, state)
        return message, vary_like(new, state)

    is_summed = compressor is None and rings is None and combines
    mapped = over_places(
        of_regions,
        mesh,
        in_specs=(P(REGION), P(REGION) if is_anchored else P(), *(P(REGION),) * 3),
        out_specs=(P(REGION), P() if is_summed else P(REGION), P(REGION)),
    )
    ring_sum = rings and make_ring_sum(mesh, rings)

    def send(params, origin, state, weights, keys, times=None):
        staged, out, state = mapped(params, origin, state, weights, keys)
        if ring_sum is not None:
            out = ring_sum(out)
        if not combines:
            return staged, crossing.make_piece(out, times, compressor), state
        if compressor is not None:
            # The weights too: else every message decoded would wait for its own.
            out, weights = _everywhere(mesh, (out, weights))
            out = weighted_sum_of_decoded(out, weights, compressor)
        return staged, out, state

    return send


def outer_step(
    optimizer: optax.GradientTransformation,
    params: Fragment,
    opt_state: PyTree,
    mean_pseudo_gradient: Fragment,
    reference: Fragment | None,
) -> tuple[PyTree, PyTree, jax.Array]:
    """The outer optimizer on one fragment; the mean pseudo-gradient is its gradient.

    Args:
      optimizer: given `stale_params=reference` where there is a reference.
      params: the outer fragment.
      opt_state: its state.
      mean_pseudo_gradient: old minus new.
      reference: the outer fragment that the pseudo-gradient was measured from, or None.

    Returns:
      New outer fragment, new optimizer state, and the mean pseudo-gradient's norm
      (float32 scalar).
    """
    extra = {} if reference is None else {"stale_params": reference}
    updates, opt_state = optax.with_extra_args_support(optimizer).update(
        mean_pseudo_gradient, opt_state, params, **extra
    )
    return optax.apply_updates(params, updates), opt_state, _norm(mean_pseudo_gradient)


def make_regional_send(
    mesh: Mesh,
    fragments: Fragments,
    fragment: int,
    block: Block,
    compressor: Compressor,
    keep_staged: bool,
    outer: RegionalOuter,
    partners: jax.Array,
) -> Callable:
    """Makes the program that sends one fragment, with outer models of regions' own.

    Args:
      mesh: the inner mesh.
      fragments: the cut.
      fragment: which.
      block: the regions a device holds.
      compressor: of the messages.
      keep_staged: whether to give a copy of the fragment as it is now.
      outer: the optimizer.
      partners: int `[N, R]`, the matchings to choose from: each region's partner.

    Returns:
      `send(params, outer_params, state, keys, matching) -> (staged, arrived, state)`,
      all with regions in front but, where every region gets the mean of all,
      `arrived`. `matching` is an int32 scalar, the row of `partners` to use.
    """
    is_paired = outer.group == "pairs"

    def one_region(outer_params, state, local, key_data):
        key = message_key(key_data)
        message, new = outer.send(outer_params, state, local, compressor, key)
        return message, vary_like(new, state)

    def of_regions(params, outer_params, state, keys, matching):
        staged = fragments.take(params, fragment, lead=1)
        message, state = block.map(one_region)(outer_params, state, staged, keys)
        if is_paired:
            theirs = _from_partner(message, matching, partners, block)
            message = block.map(mean_of_pair)(message, theirs)
        return staged if keep_staged else None, message, state

    def mean_of_pair(mine, theirs):
        both = compressor.decode(mine), compressor.decode(theirs)
        return jax.tree.map(lambda x, y: (x + y) / 2, *both)

    mapped = over_places(
        of_regions,
        mesh,
        in_specs=(*(P(REGION),) * 4, P()),
        out_specs=P(REGION),
    )

    def send(params, outer_params, state, keys, matching):
        staged, out, state = mapped(params, outer_params, state, keys, matching)
        if not is_paired:
            out = mean_of_decoded(_everywhere(mesh, out), compressor)
        return staged, out, state

    return send


def make_regional_step(mesh: Mesh, block: Block, outer: RegionalOuter) -> Callable:
    """`step(outer_params, state, arrived) -> (outer_params, state, norm)`, regional.

    `arrived` is what `send` gave; the norm is that of what arrived, over regions the
    root of the mean square.
    """
    is_paired = outer.group == "pairs"
    num_regions = block.size * mesh.shape[REGION]

    def step(outer_params, state, arrived):
        if not is_paired:
            arrived = jax.tree.map(
                lambda x: jax.lax.pcast(x, REGION, to="varying"), arrived
            )

        def receive(params, state, arrived):
            new, new_state = outer.receive(params, state, arrived, num_regions)
            new = jax.tree.map(lambda x, like: x.astype(like.dtype), new, params)
            return new, vary_like(new_state, state), _norm(arrived)

        axes = (0, 0, 0 if is_paired else None)
        params, state, norms = block.map(receive, axes)(outer_params, state, arrived)
        return params, state, jnp.sqrt(mean_over_places((norms**2).mean()))

    return over_places(
        step,
        mesh,
        in_specs=(P(REGION), P(REGION), P(REGION) if is_paired else P()),
        out_specs=(P(REGION), P(REGION), P()),
    )


def _sum_of_block(tree: PyTree, weights: jax.Array) -> PyTree:
    """Weighted, of `[block, ...]` leaves that are at least float32."""
    return jax.tree.map(
        lambda x: jnp.tensordot(weights.astype(x.dtype), x, axes=1), tree
    )


def _sum_of_all(tree: PyTree, weights: jax.Array) -> PyTree:
    """As `_sum_of_block`, over the regions of all places."""
    return sum_over_places(_sum_of_block(tree, weights))


def _everywhere(mesh: Mesh, messages: PyTree) -> PyTree:
    """Messages `[R, ...]` of all regions at every place: gathered as they are."""
    return jax.lax.with_sharding_constraint(messages, NamedSharding(mesh, P()))


def _from_partner(message, matching, partners, block: Block):
    """Each region's partner's message, inside `over_places`.

    With a region at each place a matching is one permutation of messages, and a region
    hears from nobody but its partner. A device that holds several regions gathers
    them all: there is no network to spare then.
    """
    if block.size == 1:
        branches = [
            functools.partial(
                jax.lax.ppermute, axis_name=REGION, perm=tuple(enumerate(row))
            )
            for row in partners.tolist()
        ]
        return jax.lax.switch(matching, branches, message)
    first = jax.lax.axis_index(REGION) * block.size
    mine = jax.lax.dynamic_slice_in_dim(partners[matching], first, block.size)
    return jax.tree.map(lambda x: jnp.take(x, mine, axis=0), from_all_places(message))


def _norm(tree: PyTree) -> jax.Array:
    return optax.tree_utils.tree_norm(tree).astype(jnp.float32)
