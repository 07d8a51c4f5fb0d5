"""A whole method as one Optax transform: `synchronized`.

For somebody's own training loop, in which regions are an axis: of `jax.vmap` on one
device or over a mesh (`spmd_axis_name`), or of a mesh inside of `jax.shard_map`. Each
update is the inner optimizer's step, and what is due after it:

    updates, state = inner.update(gradients, state)
    of each fragment, if its mean is due:    outer step, and merge    `core.sync.finish`
    of each fragment, if its slot has come:  send, and take the mean  `core.sync.start`

What is due, the program finds by itself (`sync.schedules.traced`), from numbers that
are equal in all regions, or their collectives would pair with the wrong ones and hang.
A fragment has a loop of its own for it, which goes round once or not at all: unlike the
branches of a conditional, which copy what they hand through, a loop that goes round no
time costs nothing.

Numbers are those of `RegionProgram`, but for what XLA rounds otherwise, and for draws:
keys are made of step and region here. The mean is taken as a fragment starts, and
applied when it is due: a compiler does not hide it behind the steps in between, as
`RegionProgram` does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cocodc_jax import methods
from cocodc_jax.core import reduce, regional, turn
from cocodc_jax.core.checks import (
    check_accumulation,
    check_feedback,
    check_inside,
    check_params,
    checked_fragments,
    unboxed,
)
from cocodc_jax.sync import moments
from cocodc_jax.sync.cutting import cut
from cocodc_jax.sync.fragments import Fragments
from cocodc_jax.sync.method import Method
from cocodc_jax.sync.needs import Supplies
from cocodc_jax.sync.outer import RegionalOuter
from cocodc_jax.sync.regions import Regions
from cocodc_jax.transforms.numerics import check_transform, vary_like

PyTree = Any


class SynchronizedState(NamedTuple):
    """State of `synchronized` in one region; tuples have an entry a fragment.

    Attributes:
      step: int32 scalar, updates done.
      inner: of the inner optimizer.
      per_step: of what is sent at every step, `()` if nothing is.
      times: what the schedule remembers, `traced.Times`.
      outer: outer parameters, at least float32.
      opt_states: of the outer optimizer.
      memories: of the compressors.
      means: what is on its way, or was last; `()` without a delay.
      copies: of the region's fragment while it is in flight, by name.
      stale: outer fragments that pseudo-gradients in flight were measured from.
      counts: int32 `[N]`, messages sent: of fragments and moments, or of steps.
      message_bytes: float32 `[N]`, bytes of each.
      norm: float32 scalar, of the last mean that was applied.
      correction_ratio: float32 scalar, of the last merge; 0 where it corrects nothing.
    """

    step: Any
    inner: Any
    per_step: Any
    times: Any
    outer: Any
    opt_states: Any
    memories: Any
    means: Any
    copies: Any
    stale: Any
    counts: Any
    message_bytes: Any
    norm: Any
    correction_ratio: Any


def synchronized(
    inner: optax.GradientTransformation | optax.MultiSteps,
    method: Method | str,
    *,
    axis_name: Any,
    num_regions: int | None = None,
    fragments: Fragments | None = None,
    supplies: Supplies = Supplies(),  # noqa: B008  (frozen)
) -> optax.GradientTransformationExtraArgs:
    """Train in several regions by `method`, with `inner` in each.

    `init` takes one region's parameters, the same for all, and needs no axis; `update`
    runs where `axis_name` is bound, and needs `params`. `optax.apply_updates` of what
    it gives are the merged parameters, but for the rounding of a sum in their dtype.
    Extra arguments are handed on to `inner`; where regions exchange something at every
    step `value` is the mean of theirs. A merge that needs the gradient of the last
    batch takes it of `value_fn(params) -> loss`, an extra argument of `update`.

    Args:
      inner: the optimizer of a region's own steps.
      method: from `cocodc_jax.methods`, or the name of one, for its defaults. Refused
        are regions one by one, times that the host measures, a rank that follows the
        updates, and regions left out of a mean.
      axis_name: of the regions.
      num_regions: M, to have it checked before anything is traced; None takes the
        axis's length.
      fragments: how to cut the parameters; by default as the method says.
      supplies: what only the user knows, for merges that need it.

    Raises:
      ValueError: naming what does not go together; of the axis and the parameters when
        they are known.

    >>> tx = synchronized(optax.sgd(0.1), "diloco", axis_name="region", num_regions=2)
    >>> state = tx.init({"w": jnp.zeros(3)})
    >>> int(sync_metrics(state)["fragments_in_flight"])
    0
    """
    check_transform("inner", inner, "optax.adamw(1e-3)")
    method = methods.get(method) if isinstance(method, str) else method
    check_inside(method, supplies)
    if num_regions is not None:
        method.bind(Regions.alike(num_regions))
    check_accumulation(inner, method)
    if isinstance(inner, optax.MultiSteps):
        each: Any = inner.init, inner.update
        inner = optax.GradientTransformationExtraArgs(*each)
    inner = optax.with_extra_args_support(inner)
    sync = method.sync
    strategy = sync.fragment_strategy if sync else "strided"

    def init(params: PyTree) -> SynchronizedState:
        check_params(params)
        found = unboxed(checked_fragments(method, params, fragments))
        check_feedback(method, found, params)
        nothing = jnp.zeros((), jnp.float32)
        counts = jnp.zeros(_num_counts(method), jnp.int32)
        state = SynchronizedState(
            step=jnp.zeros((), jnp.int32),
            inner=inner.init(params),
            per_step=method.per_step.init(params) if method.per_step else (),
            counts=counts,
            message_bytes=counts.astype(jnp.float32),
            norm=nothing,
            correction_ratio=nothing,
            **dict.fromkeys(_OF_FRAGMENTS, ()),
        )
        if sync is not None:
            if sync.moments and not moments.take(state.inner, ()):
                raise ValueError(
                    f"method={method.name!r} averages Adam's moments, but the inner "
                    "optimizer's state holds none; use optax.adamw"
                )
            state = state._replace(**turn.first(sync, found, params))
        # No array twice, nor one of the parameters: a state is often donated.
        return jax.tree.map(jnp.copy, state._replace(inner=()))._replace(
            inner=state.inner
        )

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, SynchronizedState]:
        if params is None:
            raise ValueError(
                "synchronized needs params: tx.update(grads, state, params)"
            )
        num = jax.lax.axis_size(axis_name)
        if num_regions not in (None, num):
            raise ValueError(
                f"num_regions={num_regions} differs from the {num} regions of "
                f"axis_name={axis_name!r}"
            )
        bound, sizes = method.bind(Regions.alike(num)), [0]
        found = unboxed(fragments or cut(params, method.num_fragments, strategy))
        step, times = reduce.same_in_all((state.step + 1, state.times), axis_name)
        state = state._replace(step=step, times=times)
        correct = regional.make_correct(bound.sync, found, num)
        if correct is not None:
            updates = correct(updates, params, (state.outer, state.opt_states))
        if bound.per_step:
            key = turn.region_key(step, axis_name)
            updates, kept = turn.exchange(
                bound.per_step, updates, state.per_step, key, axis_name
            )
            if "value" in extra:
                extra["value"] = turn.mean_of_all(extra["value"], axis_name)
            sizes = [bound.per_step.num_bytes(params) if num > 1 else 0]
            state = state._replace(per_step=kept, counts=state.counts + 1)
        updates, kept = inner.update(updates, state.inner, params, **extra)
        state = state._replace(inner=kept)
        if bound.sync:
            sizes = turn.num_bytes(bound.sync, state, num)
        sizes = vary_like(jnp.array(sizes, jnp.float32), state.message_bytes)
        state = state._replace(message_bytes=sizes)
        if bound.sync is None:
            return updates, state
        value_fn = extra.get("value_fn")
        if "gradient_fn" in bound.sync.merge.needs and value_fn is None:
            raise ValueError(
                f"method={method.name!r} needs the gradient of the last batch: pass "
                "tx.update(..., value_fn=lambda params: loss)"
            )
        due = turn.Turn(bound.sync, found, supplies, axis_name, num, value_fn)
        region = turn.Region(step, params, updates, kept)
        updates, state = due.events(region, state._replace(inner=()))
        kept = state.inner if bound.sync.moments else kept
        return updates, state._replace(inner=kept)

    return optax.GradientTransformationExtraArgs(init, update)


def sync_axes(
    method: Method | str, regional: Any = 0, shared: Any = None
) -> SynchronizedState:
    """Tell which parts of a state are a region's own, for `in_axes` or specs.

    What is equal in all regions need be there once: with `jax.vmap(step, in_axes=(0,
    sync_axes(method), 0), out_axes=...)` the outer model is not copied for each region,
    and with `sync_axes(method, P("region"), P())` a mesh has one for each device.

    Args:
      method: as given to `synchronized`.
      regional: stands for what is a region's own.
      shared: stands for what is equal in all.

    Returns:
      A prefix of the state.
    """
    method = methods.get(method) if isinstance(method, str) else method
    outer = method.sync and method.sync.outer
    is_regional = isinstance(outer, RegionalOuter)
    is_told_apart = is_regional and outer.group != "all"
    own = {"inner", "per_step", "memories", "copies", "correction_ratio"}
    own |= {"outer", "opt_states"} if is_regional else set()
    own |= {"means"} if is_told_apart else set()
    fields = SynchronizedState._fields
    return SynchronizedState(*(regional if x in own else shared for x in fields))


def sync_metrics(state: PyTree) -> dict[str, jax.Array]:
    """Return what the syncs of an optimizer's state came to.

    Args:
      state: a `SynchronizedState`, or one around it (`optax.chain`, `optax.masked`).

    Returns:
      `bytes_sent` by one region (float32: seven digits), the `norm` of the last mean
      pseudo-gradient applied, the `correction_ratio` of the last merge, and
      `fragments_in_flight`; scalars, or `[R]` of a state with regions in front.

    Raises:
      ValueError: if there is no such state in it, or several.
    """
    is_one = lambda x: isinstance(x, SynchronizedState)  # noqa: E731
    found = [x for x in jax.tree.leaves(state, is_leaf=is_one) if is_one(x)]
    if len(found) != 1:
        raise ValueError(
            f"state holds {len(found)} states of synchronized, but must hold one"
        )
    (state,) = found
    counts, sizes, step = map(
        jnp.asarray, (state.counts, state.message_bytes, state.step)
    )
    flying = jnp.zeros_like(step)
    if state.times:
        due = jnp.asarray(state.times.apply_step)
        flying = (due >= 0).sum(-1, dtype=jnp.int32)
    return {
        "bytes_sent": (counts * sizes).sum(-1),
        "norm": jnp.asarray(state.norm),
        "correction_ratio": jnp.asarray(state.correction_ratio),
        "fragments_in_flight": flying,
    }


_OF_FRAGMENTS = (
    "times", "outer", "opt_states", "memories", "means", "copies", "stale",
)  # fmt: skip


def _num_counts(method: Method) -> int:
    if method.sync is None:
        return 1
    return method.num_fragments + 2 * bool(method.sync.moments)
