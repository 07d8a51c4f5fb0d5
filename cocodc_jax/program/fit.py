"""Adapt a state to another program: keep it, average it, or cut it differently."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.engine import transfer
from cocodc_jax.sync.accumulation import NONE, Accumulation
from cocodc_jax.sync.fragments import Fragments
from cocodc_jax.sync.inner_counts import at_steps, has_counts
from cocodc_jax.sync.model_state import is_float
from cocodc_jax.transforms.layers import named_leaves
from cocodc_jax.transforms.numerics import widen

PyTree = Any


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


def at_step(
    opt_state: PyTree, steps_done: np.ndarray, accumulation: Accumulation = NONE
) -> PyTree:
    """Set the step counts of an optimizer's schedules, and nothing else.

    Moments and the counts of their bias correction stay. Inside of an accumulation of k
    gradients (`optax.MultiSteps`) a schedule counts updates, so it is set to 1 / k of
    the steps; where k is not known, it stays.

    Args:
      opt_state: of the optimizer, leaves `[R, ...]`.
      steps_done: int `[R]`, steps of each region.
      accumulation: the optimizer's.
    """

    def put(count: np.ndarray, old: jax.Array) -> jax.Array:
        # One array each: the state is donated.
        return transfer.put(count.astype(old.dtype), old.sharding)

    if not has_counts(opt_state):
        return opt_state
    return at_steps(opt_state, steps_done, accumulation.periods, put)


def mean_over_all(x: jax.Array) -> jax.Array:
    """Average over the leading region axis; of counters take the maximum.

    Of PRNG keys take the first.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x[0]
    return widen(x).mean(0).astype(x.dtype) if is_float(x) else x.max(0)


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
