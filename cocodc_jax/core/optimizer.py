"""A whole method as one Optax transform: `synchronized`.

It is for your own training loop. Regions are a mapped axis: of `jax.vmap`, on one
device or over a mesh (`spmd_axis_name`), or of a mesh inside `jax.shard_map`. Each
update takes an inner optimizer step, then applies the events that are due:

    updates, state = inner.update(gradients, state)
    each fragment whose mean is due:    outer step and merge    `core.sync.finish`
    each fragment whose slot has come:  encode and reduce       `core.sync.start`

The compiled program decides what is due, from numbers that are equal in all regions
(`sync.schedules.traced`). Each fragment runs in a loop of zero or one iterations for
its arrival, and in one for its departure. A `lax.cond` copies the operands that its
branches pass through; a loop of zero iterations costs nothing.

Results equal those of `RegionProgram` up to XLA's rounding and random draws, whose keys
are derived from step and region here. The mean is computed when a fragment starts, and
applied when it is due. Unlike in `RegionProgram`, it does not overlap with the inner
steps in between.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from cocodc_jax import methods
from cocodc_jax.core import turn
from cocodc_jax.core.auto_axes import with_auto_axes
from cocodc_jax.core.axis import same_in_all
from cocodc_jax.core.boxes import with_boxes, without_boxes
from cocodc_jax.core.checks import (
    check_accumulation,
    check_arrays,
    check_counts,
    check_feedback,
    check_inner_state,
    check_inside,
    check_params,
    checked_fragments,
    unboxed,
)
from cocodc_jax.core.sync import make_correct
from cocodc_jax.sync import inner_keys, moments
from cocodc_jax.sync.accumulation import NONE, of_multi_steps
from cocodc_jax.sync.accumulation import find as find_accumulation
from cocodc_jax.sync.cutting import cut
from cocodc_jax.sync.fragments import Fragments
from cocodc_jax.sync.method import Method
from cocodc_jax.sync.needs import UserInputs
from cocodc_jax.sync.outer import RegionalOuter
from cocodc_jax.sync.regions import Regions
from cocodc_jax.transforms.extra_args import with_named_extras
from cocodc_jax.transforms.layers import named_leaves
from cocodc_jax.transforms.numerics import check_transform, vary_like

PyTree = Any


class SynchronizedState(NamedTuple):
    """State of `synchronized` in one region; tuples have one entry per fragment."""

    step: Any  # int32 scalar, updates done.
    inner: Any  # State of the inner optimizer.
    per_step: Any  # State of the exchange at every step, `()` if there is none.
    times: Any  # The schedule's state, `traced.Times`.
    outer: Any  # Outer parameters, at least float32.
    opt_states: Any  # States of the outer optimizer.
    memories: Any  # States of the compressors.
    means: Any  # Means in flight, or the last ones; `()` without a delay.
    copies: Any  # Copies of the region's fragment while it is in flight, by name.
    # Outer fragments that the pseudo-gradients in flight were measured from.
    stale: Any
    counts: Any  # int32 `[N]`, messages sent: by fragment and moment, or by step.
    message_bytes: Any  # float32 `[N]`, bytes of each message.
    norm: Any  # float32 scalar, norm of the last applied mean.
    # float32 scalar, from the last merge; 0 if it corrects nothing.
    correction_ratio: Any


def synchronized(
    inner: optax.GradientTransformation | optax.MultiSteps,
    method: Method | str,
    *,
    axis_name: Any,
    num_regions: int | None = None,
    fragments: Fragments | None = None,
    user_inputs: UserInputs = UserInputs(),  # noqa: B008  (frozen)
) -> optax.GradientTransformationExtraArgs:
    """Train in several regions by `method`, with `inner` as each region's optimizer.

    `init` takes one region's parameters, equal in all regions, and needs no axis.
    `update` needs `params`, and runs where `axis_name` is bound. Pass its updates to
    `optax.apply_updates` to get the merged parameters, up to rounding in their dtype.
    Extra arguments are passed on to `inner`, if it takes them. If the method exchanges
    messages at every step, `value` is averaged over regions first; otherwise random
    state of `inner` (PRNG keys) is drawn anew for each region at the first update. A
    merge that needs the gradient of the last batch takes it from the extra argument
    `value_fn(params) -> loss`, and one that needs the model's outputs takes the batch
    from `batch`.

    Mesh axes may be Auto, Explicit or Manual. A region whose parameters are not finite
    stays so, as updates are added to them: `optax.apply_if_finite` around `inner`
    drops bad updates before.

    Args:
      inner: optimizer of a region's own steps.
      method: from `cocodc_jax.methods`, or the name of one, with its defaults. Not
        supported: asynchronous regions, measured schedules, adaptive rank, and robust
        means. Ignored: the placement of a `SharedOuter`, which the caller's mesh
        decides, and `Method.inner`, also its learning rate for steps by signs.
      axis_name: name of the region axis.
      num_regions: M, checked before tracing; None takes the axis size.
      fragments: how to cut the parameters; by default as the method does.
      user_inputs: inputs that only the user can provide, for merges that need them, and
        `on_merge` for an `inner` that holds a copy of the parameters.

    >>> tx = synchronized(optax.sgd(0.1), "diloco", axis_name="region", num_regions=2)
    >>> state = tx.init({"w": jnp.zeros(3)})
    >>> int(sync_metrics(state)["fragments_in_flight"])
    0
    """
    check_transform("inner", inner, "optax.adamw(1e-3)")
    if isinstance(method, str):
        method = methods.get(method)
    check_inside(method, user_inputs)
    if num_regions is not None:
        method.bind(Regions.alike(num_regions))

    optimizer: Any = inner
    if isinstance(inner, optax.MultiSteps):
        init_fn: Any = inner.init
        update_fn: Any = inner.update
        optimizer = optax.GradientTransformationExtraArgs(init_fn, update_fn)
    check_accumulation(of_multi_steps(optimizer), method)

    inner_tx = with_named_extras(optimizer)
    sync = method.sync
    strategy = sync.fragment_strategy if sync else "strided"

    def init(params: PyTree) -> SynchronizedState:
        check_arrays(params)
        check_params(params)
        cut_fragments = checked_fragments(method, params, fragments)
        cut_fragments = unboxed(cut_fragments, params)
        check_feedback(method, cut_fragments, params)
        if of_multi_steps(optimizer) is NONE:  # Else it is checked already.
            check_accumulation(find_accumulation(optimizer, params), method)
        check_inner_state(optimizer, method, params, user_inputs)
        check_counts(method, cut_fragments, user_inputs, params)

        num_of_moments = 2 if sync and sync.moments else 0
        counts = jnp.zeros(method.num_fragments + num_of_moments, jnp.int32)
        zero = jnp.zeros((), jnp.float32)
        state = SynchronizedState(
            step=jnp.zeros((), jnp.int32),
            inner=inner_tx.init(params),
            per_step=method.per_step.init(params) if method.per_step else (),
            counts=counts,
            message_bytes=counts.astype(jnp.float32),
            norm=zero,
            correction_ratio=zero,
            **dict.fromkeys(("times", *turn.OF_FRAGMENTS), ()),
        )

        if sync is not None:
            if sync.moments and not moments.take(state.inner, ()):
                raise ValueError(
                    f"method={method.name!r} averages Adam's moments, but the inner "
                    "optimizer's state holds none; use optax.adamw"
                )
            columns = turn.first(sync, cut_fragments, params)
            state = state._replace(**with_boxes(columns, params))

        # The state may be donated: no buffer occurs twice or aliases the parameters.
        copied = jax.tree.map(jnp.copy, state._replace(inner=()))
        return copied._replace(inner=state.inner)

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, SynchronizedState]:
        if params is None:
            raise ValueError(
                "synchronized needs params: tx.update(grads, state, params)"
            )

        parts = {name: getattr(state, name) for name in turn.OF_FRAGMENTS}
        bare = state._replace(**without_boxes(parts))
        new_updates, new_state = update_bare(updates, bare, params, **extra)

        leaves = jax.tree.leaves({name: getattr(new_state, name) for name in parts})
        boxed = jax.tree.structure(parts).unflatten(leaves)
        return new_updates, new_state._replace(**boxed)

    def update_bare(
        updates: PyTree, state: Any, params: PyTree, **extra: Any
    ) -> tuple[PyTree, SynchronizedState]:
        num = jax.lax.axis_size(axis_name)
        if num_regions not in (None, num):
            raise ValueError(
                f"num_regions={num_regions} differs from the {num} regions of "
                f"axis_name={axis_name!r}"
            )

        bound = method.bind(Regions.alike(num))
        cut_fragments = fragments or cut(params, method.num_fragments, strategy)
        cut_fragments = unboxed(cut_fragments, params)

        step, times = same_in_all((state.step + 1, state.times), axis_name)
        is_first = step == 1
        inner_state = state.inner
        if num > 1 and not bound.per_step and inner_keys.has_keys(inner_state):
            inner_state = turn.with_own_keys(inner_state, is_first, axis_name)

        correct = make_correct(bound.sync, cut_fragments, num)
        if correct is not None:
            updates = correct(updates, params, (state.outer, state.opt_states))

        per_step_state = state.per_step
        counts = state.counts
        sizes = [0]
        if bound.per_step:
            updates, per_step_state = turn.exchange(
                per_step=bound.per_step,
                gradients=updates,
                kept=state.per_step,
                key=turn.region_key(step, axis_name),
                axis_name=axis_name,
            )
            if "value" in extra:
                extra["value"] = turn.mean_of_all(extra["value"], axis_name)
            sizes = [bound.per_step.num_bytes(params) if num > 1 else 0]
            counts = counts + 1

        updates, inner_state = inner_tx.update(updates, inner_state, params, **extra)
        state = state._replace(
            step=step,
            inner=inner_state,
            per_step=per_step_state,
            times=times,
            counts=counts,
        )
        if bound.sync:
            sizes = turn.num_bytes(bound.sync, state, num)
        message_bytes = vary_like(jnp.array(sizes, jnp.float32), state.message_bytes)
        state = state._replace(message_bytes=message_bytes)
        if bound.sync is None:
            return updates, state

        value_fn = extra.get("value_fn")
        if "gradient_fn" in bound.sync.merge.needs and value_fn is None:
            raise ValueError(
                f"method={method.name!r} needs the gradient of the last batch: pass "
                "tx.update(..., value_fn=lambda params: loss)"
            )
        batch = extra.get("batch")
        if bound.sync.merge.needs & {"model_fn", "output_loss_fn"} and batch is None:
            raise ValueError(
                f"method={method.name!r} needs the model's outputs of the last batch: "
                "pass tx.update(..., batch=batch)"
            )

        due = turn.Turn(
            sync=bound.sync,
            fragments=cut_fragments,
            user_inputs=user_inputs,
            axis_name=axis_name,
            num_regions=num,
            value_fn=value_fn,
            batch=batch,
        )
        region = turn.Region(
            step=step, params=params, updates=updates, inner=inner_state
        )
        return due.events(region, state._replace(inner=()))

    update_auto: Any = with_auto_axes(update)
    return optax.GradientTransformationExtraArgs(init, update_auto)


def sync_metrics(state: PyTree) -> dict[str, jax.Array]:
    """Return metrics of the syncs in an optimizer state.

    Args:
      state: a `SynchronizedState`, or a state that contains one (`optax.chain`,
        `optax.masked`, an `nnx.Optimizer`, its `nnx.State` or a pure dict of that).

    Returns:
      `bytes_sent` by one region (float32: seven digits), the `norm` of the last applied
      mean pseudo-gradient, the `correction_ratio` of the last merge, and
      `fragments_in_flight`. Scalars, or `[R]` if the state has a region axis.
    """
    leaves = jax.tree.leaves(state, is_leaf=_is_state)
    states = [node for node in leaves if _is_state(node)]
    if len(states) != 1:
        raise ValueError(
            f"state holds {len(states)} states of synchronized, but must hold one"
        )

    fields = _fields_of(states[0])
    step = jnp.asarray(fields["step"])
    counts = jnp.asarray(fields["counts"])
    message_bytes = jnp.asarray(fields["message_bytes"])

    in_flight = jnp.zeros_like(step)
    if times := fields.get("times"):
        apply_step = jnp.asarray(_fields_of(times)["apply_step"])
        in_flight = (apply_step >= 0).sum(-1, dtype=jnp.int32)

    return {
        "bytes_sent": (counts * message_bytes).sum(-1),
        "norm": jnp.asarray(fields["norm"]),
        "correction_ratio": jnp.asarray(fields["correction_ratio"]),
        "fragments_in_flight": in_flight,
    }


# Fields that hold arrays whatever the method.
_ALWAYS = {"step", "counts", "message_bytes", "norm", "correction_ratio"}


def _is_state(node: Any) -> bool:
    """Return whether a node is a state; Flax NNX makes mappings of named tuples."""
    if isinstance(node, Mapping):
        return _ALWAYS <= set(node) <= set(SynchronizedState._fields)
    return isinstance(node, SynchronizedState)


def _fields_of(node: Any) -> Mapping[str, Any]:
    return node if isinstance(node, Mapping) else node._asdict()


def sync_axes(
    method: Method | str,
    regional: Any = 0,
    shared: Any = None,
    state: PyTree = None,
) -> Any:
    """Return a prefix of the state that marks regional and shared parts.

    Use it for `in_axes` or specs, so that what is equal in all regions (the outer
    model, its optimizer, means in flight) has one copy, and no region axis on a mesh:
    `jax.vmap(step, in_axes=(0, sync_axes(method), 0), out_axes=...)`, or
    `sync_axes(method, P("region"), P())`. `regional` is for parts that differ between
    regions, `shared` for those that are equal.

    The result is a `SynchronizedState`, or, if a tree `state` is passed that contains
    one, a prefix of that tree, whose other leaves are regional. There the state may be
    a mapping, as in an `nnx.State`, which has no named tuples.
    """
    if isinstance(method, str):
        method = methods.get(method)
    outer = method.sync.outer if method.sync else None

    regional_fields = {"inner", "per_step", "memories", "copies", "correction_ratio"}
    if isinstance(outer, RegionalOuter):
        regional_fields |= {"outer", "opt_states"}
        if outer.group != "all":
            regional_fields.add("means")
    axes = {
        name: regional if name in regional_fields else shared
        for name in SynchronizedState._fields
    }
    if state is None:
        return SynchronizedState(**axes)

    def of_node(node: Any) -> Any:
        if not _is_state(node):
            return regional
        if isinstance(node, Mapping):
            make: Any = type(node)
            return make({name: axes[name] for name in node})
        return SynchronizedState(**axes)

    return jax.tree.map(of_node, state, is_leaf=_is_state)


def sync_shardings(
    tree: PyTree, shardings: PyTree, axes: PyTree = 0, axis_name: str = "region"
) -> PyTree:
    """Return shardings for all regions' values, from those of one region's parameters.

    A leaf is sharded like the parameter whose path its own path ends with, if its shape
    can be: moments of the inner optimizer, and outer parameters, momenta and messages.
    All other leaves are replicated inside a region. The result is for `out_shardings`
    of a function under `jax.vmap`.

    Args:
      tree: one region's values, or their shapes from `jax.eval_shape`: an optimizer
        state, or a training state that contains it.
      shardings: `NamedSharding` of each parameter of one region, a tree.
      axes: prefix of `tree` with 0 for values that have a region axis in front and None
        for those that are equal in all regions, see `sync_axes`.
      axis_name: name of the mesh's region axis.
    """
    by_path: dict[str, NamedSharding] = {}
    for path, sharding in named_leaves(shardings):
        by_path[_path(path)] = sharding
        by_path[path] = sharding
    if not by_path:
        raise ValueError("shardings has no leaves; pass those of one region's params")
    mesh = next(iter(by_path.values())).mesh

    def of_leaf(path: str, x: Any, axis: int | None) -> NamedSharding:
        spec = _spec_of_end(path, by_path)
        if len(spec) > x.ndim or not _divides(NamedSharding(mesh, spec), x.shape):
            spec = PartitionSpec()
        lead = () if axis is None else (axis_name,)
        return NamedSharding(mesh, PartitionSpec(*lead, *spec))

    is_none = lambda x: x is None  # noqa: E731
    axis_of_leaf = jax.tree.leaves(
        jax.tree.broadcast(axes, tree, is_none), is_leaf=is_none
    )
    leaves = [
        of_leaf(path, x, axis)
        for (path, x), axis in zip(named_leaves(tree), axis_of_leaf, strict=True)
    ]
    return jax.tree.structure(tree).unflatten(leaves)


def _spec_of_end(path: str, by_path: dict[str, NamedSharding]) -> PartitionSpec:
    """Return the spec of the parameter whose path a leaf's own path ends with."""
    for full_path in (path, _path(path)):
        parts = full_path.split("/")
        for i in range(len(parts)):
            end = "/".join(parts[i:])
            if end in by_path:
                return by_path[end].spec
    return PartitionSpec()


def _path(path: str) -> str:
    return path.removesuffix("/value")  # Of a Flax box, around the array.


def _divides(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True
