"""How a fragment crosses regions: start a sync, step the outer optimizer, merge.

Three programs for each fragment, kept apart so that inner steps run between them:

1. `start`, on the inner mesh: Delta = theta^g - theta^m, its mean over the region
   axis (the one collective), and a staged copy where the merge wants it.
2. `outer`, on the outer device: theta^g <- OuterOptimizer(theta^g, mean Delta).
3. `merge`, on the inner mesh: each region takes the new theta^g in by its rule.

Pseudo-gradients are old minus new and at least float32, whatever the parameters are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cocodc_jax.runtime.inner import Block, mean_over_regions
from cocodc_jax.runtime.mesh import REGION
from cocodc_jax.runtime.sources import Sources, needs_batch
from cocodc_jax.runtime.state import RegionState
from cocodc_jax.sync.fragments import Fragment, Fragments
from cocodc_jax.sync.merge import Merge

PyTree = Any


def outer_dtype(dtype: Any) -> Any:
    """The dtype of an outer parameter: its own, but at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def make_start(
    mesh: Mesh, fragments: Fragments, fragment: int, keep_staged: bool
) -> Callable:
    """`start(params [R, ...], outer) -> (staged [R, ...], mean_pseudo_gradient)`.

    `staged` is None unless `keep_staged`, so that no copy is made for nothing.
    """

    def start(params: PyTree, outer: Fragment):
        staged = fragments.take(params, fragment, lead=1)
        delta = jax.tree.map(lambda o, x: o[None] - x.astype(o.dtype), outer, staged)
        return staged if keep_staged else None, mean_over_regions(delta)

    return jax.shard_map(
        start,
        mesh=mesh,
        axis_names={REGION},
        in_specs=(P(REGION), P()),
        out_specs=(P(REGION), P()),
    )


def outer_step(
    optimizer: optax.GradientTransformation,
    params: Fragment,
    opt_state: PyTree,
    mean_pseudo_gradient: Fragment,
) -> tuple[PyTree, PyTree, jax.Array]:
    """The outer optimizer on one fragment; the mean pseudo-gradient is its gradient.

    Returns:
      New outer fragment, new optimizer state, and the mean pseudo-gradient's norm
      (float32 scalar).
    """
    updates, opt_state = optimizer.update(mean_pseudo_gradient, opt_state, params)
    norm = optax.tree_utils.tree_norm(mean_pseudo_gradient).astype(jnp.float32)
    return optax.apply_updates(params, updates), opt_state, norm


def make_merge(
    mesh: Mesh,
    fragments: Fragments,
    fragment: int,
    rule: Merge,
    delay_steps: int,
    sources: Sources,
    block: Block,
) -> Callable:
    """`merge(params, rest, staged, outer, batch, learning_rate) -> (params, metrics)`.

    Args of the result: `params` of the regions, which may be donated; `rest` their
    `RegionState` without parameters, read only; `staged` None unless the rule needs
    it; `batch` `[R, ...]`, the last one trained on, and `learning_rate` a float32
    scalar, each None unless the rule needs it. Metrics are float32 `[R]`.
    """

    def one_region(local, staged, outer, moment, params, batch, key_data, rate):
        extra = {}
        if "learning_rate" in rule.needs:
            extra["learning_rate"] = rate
        if "second_moment" in rule.needs:
            extra["second_moment"] = moment
        if key_data is not None:
            # A key of its own: 0 and 1 would give the two that the next step splits.
            key = jax.random.wrap_key_data(key_data)
            extra["key"] = jax.random.fold_in(key, 2)
        if batch is not None:
            whole = functools.partial(fragments.put, params, fragment)
            extra |= sources.of_batch(rule.needs, whole, batch, extra["key"])
        return rule.apply(local, staged, outer, delay_steps=delay_steps, **extra)

    def merge(params: PyTree, rest: RegionState, staged, outer, batch, rate):
        moment = None
        if "second_moment" in rule.needs:
            assert sources.second_moment is not None
            moments = sources.second_moment(rest.opt_state)
            moment = fragments.take(moments, fragment, lead=1)
        with_batch = needs_batch(rule.needs)
        with_key = with_batch or "key" in rule.needs
        outer, rate = jax.tree.map(
            lambda x: jax.lax.pcast(x, REGION, to="varying"), (outer, rate)
        )
        merged, metrics = block.map(one_region, (0, 0, None, 0, 0, 0, 0, None))(
            fragments.take(params, fragment, lead=1),
            staged,
            outer,
            moment,
            params if with_batch else None,
            batch if with_batch else None,
            rest.key if with_key else None,
            rate,
        )
        return fragments.put(params, fragment, merged, lead=1), metrics

    return jax.shard_map(
        merge,
        mesh=mesh,
        axis_names={REGION},
        in_specs=(P(REGION), P(REGION), P(REGION), P(), P(REGION), P()),
        out_specs=(P(REGION), P(REGION)),
    )


def make_drift(mesh: Mesh, fragments: Fragments) -> Callable:
    """`drift(params [R, ...], outer fragments) -> [K]`, summed over the regions.

    Mean |theta^g - theta^m| per parameter of each fragment: CoCoDC's change rate,
    measured now, at the price of a reduction of K scalars.
    """

    def drift(params: PyTree, outer: tuple[Fragment, ...]):
        sums = []
        for k, part in enumerate(outer):
            local = fragments.take(params, k, lead=1)
            gaps = jax.tree.map(
                lambda o, x: jnp.abs(o[None] - x.astype(o.dtype)).sum(), part, local
            )
            sums.append(sum(jax.tree.leaves(gaps)) / fragments.num_params[k])
        return jax.lax.psum(jnp.stack(sums), REGION)

    return jax.shard_map(
        drift,
        mesh=mesh,
        axis_names={REGION},
        in_specs=(P(REGION), P()),
        out_specs=P(),
    )
