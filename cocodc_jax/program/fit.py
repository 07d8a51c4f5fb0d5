"""Adapt a state to another program: keep it, average it, or cut it differently."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.sharding import transfer
from cocodc_jax.sync.fragments import Fragments
from cocodc_jax.sync.model_state import is_float
from cocodc_jax.transforms.layers import named_leaves
from cocodc_jax.transforms.numerics import widen

PyTree = Any

# Optax states, not all public, whose `count` is a schedule's position.
_SCHEDULED = (
    "ScaleByScheduleState",
    "WrappedScheduleState",
    "InjectHyperparamsState",
    "InjectStatefulHyperparamsState",
)


def difference(old: PyTree, new: PyTree, lead: int = 0) -> str | None:
    """Describe how two trees of arrays differ; None if they have the same shapes."""
    there, here = (
        {path: f"{x.dtype}{list(x.shape[lead:])}" for path, x in named_leaves(tree)}
        for tree in (old, new)
    )
    for path in sorted(there.keys() | here.keys()):
        was, now = (each.get(path, "not there") for each in (there, here))
        if was != now:
            return f"{path} was {was} and is {now}"
    is_alike = jax.tree.structure(old) == jax.tree.structure(new)
    return None if is_alike else "it is of another kind"


def at_step(opt_state: PyTree, steps_done: np.ndarray) -> PyTree:
    """Set the step counts of an optimizer's schedules, and nothing else.

    Moments and the counts of their bias correction stay.
    """

    def count(x: Any) -> jax.Array:  # One array each: the state is donated.
        return transfer.put(steps_done.astype(x.count.dtype), x.count.sharding)

    found = jax.tree.leaves(opt_state, is_leaf=_is_scheduled)
    return _counted(count, opt_state) if any(map(_is_scheduled, found)) else opt_state


def with_counts(opt_state: PyTree, counted: PyTree) -> PyTree:
    """Return a state with the schedule counts of another state."""
    return _counted(lambda _, like: like.count, opt_state, counted)


def _counted(count_of: Callable, *states: PyTree) -> PyTree:
    """Return the first state, its schedules at `count_of` those of all states."""

    def one(x: Any, *others: Any) -> Any:
        if not _is_scheduled(x):
            return x
        # Schedules may be nested.
        inside = [
            _counted(count_of, *fields) for fields in zip(x, *others, strict=True)
        ]
        return type(x)(*inside)._replace(count=count_of(x, *others))

    return jax.tree.map(one, *states, is_leaf=_is_scheduled)


def _is_scheduled(x: Any) -> bool:
    return type(x).__name__ in _SCHEDULED


def mean_over_all(x: jax.Array) -> jax.Array:
    """Average over the leading region axis; of counters take the maximum."""
    return widen(x).mean(0).astype(x.dtype) if is_float(x) else x.max(0)


def shardings_of(tree: PyTree) -> PyTree:
    """Return the shardings of arrays, or of their shapes."""
    return jax.tree.map(lambda x: x.sharding, tree)


def inside(tree: PyTree) -> PyTree:
    """Return the shardings of one region's part of leaves `[R, ...]`."""
    return jax.tree.map(
        lambda x: NamedSharding(x.sharding.mesh, P(*x.sharding.spec[1:])), tree
    )


def recut(
    states: tuple[PyTree, ...], old: Fragments, new: Fragments
) -> tuple[PyTree, ...] | None:
    """Join the states of fragments and cut them as `new` does.

    Subtrees shaped like a fragment (a dict of its paths) are joined to a tree like the
    parameters. Of other leaves, such as counters, the maximum is taken.
    """
    paths = [{part.path for part in slices} for slices in old.slices]
    flat = [
        jax.tree.flatten(
            state, is_leaf=lambda x, own=own: isinstance(x, dict) and set(x) == own
        )
        for state, own in zip(states, paths, strict=True)
    ]
    _, first = flat[0]
    if any(treedef != first for _, treedef in flat):
        return None
    columns = list(zip(*(nodes for nodes, _ in flat), strict=True))
    for column in columns:
        are_parts = [isinstance(node, dict) for node in column]
        if any(are_parts) != all(are_parts):
            return None
        if not all(are_parts) and any(jnp.ndim(node) for node in column):
            return None

    each = range(len(new))

    def cut(columns):
        rows = []
        for column in columns:
            if isinstance(column[0], dict):
                whole = old.join(column)
                rows.append([new.take(whole, k) for k in each])
            else:
                rows.append([jnp.stack(column).max(0)] * len(each))
        return [[row[k] for row in rows] for k in each]

    return tuple(first.unflatten(nodes) for nodes in jax.jit(cut)(columns))
