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
    old_kinds = _kinds(old, lead)
    new_kinds = _kinds(new, lead)
    for path in sorted(old_kinds.keys() | new_kinds.keys()):
        was = old_kinds.get(path, "not there")
        now = new_kinds.get(path, "not there")
        if was != now:
            return f"{path} was {was} and is {now}"

    if jax.tree.structure(old) != jax.tree.structure(new):
        return "it is of another kind"
    return None


def _kinds(tree: PyTree, lead: int) -> dict[str, str]:
    """Return the dtypes and shapes of all leaves by path, without leading axes."""
    return {path: f"{x.dtype}{list(x.shape[lead:])}" for path, x in named_leaves(tree)}


def at_step(
    opt_state: PyTree, steps_done: np.ndarray, accumulation: Accumulation = NONE
) -> PyTree:
    """Set the step counts of an optimizer's schedules; change nothing else.

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
    """Average over the leading region axis.

    The result is the maximum for counters, and the first for PRNG keys.
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
    parameters. Other leaves, such as counters, become their maximum over the fragments.
    """
    flat_states = []
    for state, slices in zip(states, old.slices, strict=True):
        paths = {part.path for part in slices}
        flat_states.append(_flattened(state, paths))
    _, treedef = flat_states[0]
    if any(other != treedef for _, other in flat_states):
        return None

    columns = list(zip(*(nodes for nodes, _ in flat_states), strict=True))
    for column in columns:
        are_parts = [isinstance(node, dict) for node in column]
        if any(are_parts) != all(are_parts):
            return None
        if not all(are_parts) and any(jnp.ndim(node) for node in column):
            return None

    def cut(columns: list[tuple]) -> list[list]:
        """Return the nodes of each new fragment's state."""
        nodes_of_fragments = [[] for _ in range(len(new))]
        for column in columns:
            if isinstance(column[0], dict):
                whole = old.join(column)
                nodes = [new.take(whole, k) for k in range(len(new))]
            else:
                nodes = [jnp.stack(column).max(0)] * len(new)
            for k, node in enumerate(nodes):
                nodes_of_fragments[k].append(node)
        return nodes_of_fragments

    return tuple(treedef.unflatten(nodes) for nodes in jax.jit(cut)(columns))


def _flattened(state: PyTree, paths: set[str]) -> tuple[list, Any]:
    """Flatten a fragment's state, with dicts of its paths as leaves."""
    return jax.tree.flatten(
        state, is_leaf=lambda x: isinstance(x, dict) and set(x) == paths
    )
