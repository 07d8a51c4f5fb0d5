"""What regions do with an arriving fragment, and how far they have drifted by then.

Programs over the inner mesh: the merge rule of `sync/merge.py` mapped over regions,
with whatever else it wants to know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cocodc_jax.runtime.inner import Block, where_active
from cocodc_jax.runtime.mesh import REGION
from cocodc_jax.runtime.places import over_places, sum_over_places
from cocodc_jax.runtime.sources import Sources, needs_batch
from cocodc_jax.runtime.state import RegionState
from cocodc_jax.sync.fragments import Fragment, Fragments
from cocodc_jax.sync.merge import Merge, later_half

PyTree = Any


def make_merge(
    mesh: Mesh,
    fragments: Fragments,
    fragment: int,
    rule: Merge,
    delay_steps: int | None,
    sources: Sources,
    block: Block,
    is_regional: bool = False,
) -> Callable:
    """Makes the program that merges one fragment into the regions.

    Args:
      mesh: the inner mesh.
      fragments: the cut.
      fragment: which.
      rule: what each region does.
      delay_steps: tau; None is given with each call.
      sources: where the rule's extra arguments come from.
      block: the regions a device holds.
      is_regional: whether the outer fragment has the regions in front.

    Returns:
      `merge(params, rest, copies, outer, batch, learning_rate, takes, delay) ->
      (params, metrics)`: `params` of the regions, which may be donated; `rest` their
      `RegionState` without parameters, read only; `copies` the staged fragment and
      that of midway, each None unless the rule needs it; `batch` `[R, ...]`, the last
      one trained on, and `learning_rate` a float32 scalar, each None unless the rule
      needs it; `takes` bool `[R]`, the regions that merge, or None for all;
      `delay` an int32 scalar, at least 1, or None where `delay_steps` says it. Metrics
      are float32 `[R]`.
    """

    def one_region(local, staged, midway, outer, moment, params, batch, key_data, told):
        rate, delay = told
        extra = {}
        if midway is not None:
            assert delay_steps is not None
            extra |= later_half(staged, midway, local, delay_steps)
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
        steps = delay if delay_steps is None else delay_steps
        return rule.apply(local, staged, outer, delay_steps=steps, **extra)

    def merge(
        params: PyTree, rest: RegionState, copies, outer, batch, rate, takes, delay
    ):
        moment = None
        if "second_moment" in rule.needs:
            assert sources.second_moment is not None
            moments = sources.second_moment(rest.opt_state)
            moment = fragments.take(moments, fragment, lead=1)
        with_batch = needs_batch(rule.needs)
        with_key = with_batch or "key" in rule.needs
        told = (rate, delay)
        shared = told if is_regional else (outer, told)
        shared = jax.tree.map(lambda x: jax.lax.pcast(x, REGION, to="varying"), shared)
        outer, told = (outer, shared) if is_regional else shared
        local = fragments.take(params, fragment, lead=1)
        axes = (0, 0, 0, 0 if is_regional else None, 0, 0, 0, 0, None)
        merged, metrics = block.map(one_region, axes)(
            local,
            *copies,
            outer,
            moment,
            params if with_batch else None,
            batch if with_batch else None,
            rest.key if with_key else None,
            told,
        )
        if takes is not None:
            merged = where_active(takes, merged, local)
        return fragments.put(params, fragment, merged, lead=1), metrics

    of_outer = P(REGION) if is_regional else P()
    return over_places(
        merge,
        mesh,
        in_specs=(*(P(REGION),) * 3, of_outer, P(REGION), P(), P(REGION), P()),
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
        return sum_over_places(jnp.stack(sums))

    return over_places(
        drift,
        mesh,
        in_specs=(P(REGION), P()),
        out_specs=P(),
    )


def spread(params: PyTree) -> jax.Array:
    """How far regions are apart: RMS distance to their mean, over the mean's length.

    Args:
      params: of the regions, leaves `[R, ...]`.

    Returns:
      Float32 scalar, 0 where all are equal.
    """

    def squares(x):
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean = x.mean(0)
        return jnp.square(x - mean[None]).sum() / x.shape[0], jnp.square(mean).sum()

    each = [squares(x) for x in jax.tree.leaves(params)]
    apart, length = (sum(column) for column in zip(*each, strict=True))
    return jnp.sqrt(apart / length).astype(jnp.float32)
