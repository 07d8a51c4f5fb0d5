"""Fragments of a parameter tree: take them out, and put them back.

A fragment is a set of full leaves, and of rows of leaves that stack several blocks, or
experts, along an axis, as in a scanned model. It is a flat dict from path to array, so
that anything written for trees (Optax, compressors) works on it. `cutting.py` decides
which leaves and rows go together.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.expert_leaves import expert_axis
from cocodc_jax.transforms.layers import named_leaves, unboxed_paths

PyTree = Any
Fragment = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class LeafSlice:
    """One leaf's part of a fragment.

    Attributes:
      path: the leaf's path, parts joined by "/".
      leaf: the leaf's index in `jax.tree.leaves` order.
      rows: indices along one axis of the leaf, or None for all of it.
      num_params: number of parameters.
      num_bytes: their bytes in the leaf's dtype.
      axis: of `rows`, that of layers (0 in most models) or of experts.
    """

    path: str
    leaf: int
    rows: tuple[int, ...] | None
    num_params: int
    num_bytes: int
    axis: int = 0


@dataclasses.dataclass(frozen=True)
class Fragments:
    """A partition of a parameter tree: every number is in exactly one fragment.

    Attributes:
      treedef: structure of the tree that was cut.
      slices: for each fragment, its leaf slices in leaf order.
      shares_experts: whether devices share the axis of experts, so that a range of them
        is on several.
    """

    treedef: Any
    slices: tuple[tuple[LeafSlice, ...], ...]
    shares_experts: bool = False

    def __len__(self) -> int:
        return len(self.slices)

    @property
    def num_params(self) -> tuple[int, ...]:
        """Parameters in each fragment."""
        return tuple(sum(part.num_params for part in parts) for parts in self.slices)

    @property
    def num_bytes(self) -> tuple[int, ...]:
        """Bytes of each fragment in the parameters' own dtypes."""
        return tuple(sum(part.num_bytes for part in parts) for parts in self.slices)

    def take(self, tree: PyTree, fragment_id: int, lead: int = 0) -> Fragment:
        """Take one fragment out of `tree`, of the structure that was cut.

        Each leaf has `lead` leading axes (1 if leaves have a region axis). Stacked
        leaves keep their layer axis. Full leaves are the tree's own arrays.
        """
        leaves = self.treedef.flatten_up_to(tree)
        return {
            part.path: _take_rows(leaves[part.leaf], part.rows, lead + part.axis)
            for part in self.slices[fragment_id]
        }

    def put(
        self, tree: PyTree, fragment_id: int, value: Fragment, lead: int = 0
    ) -> PyTree:
        """Return `tree` with one fragment replaced by `value`, as from `take`.

        Under jit with `tree` donated, rows are written in place.
        """
        leaves = self.treedef.flatten_up_to(tree)
        for part in self.slices[fragment_id]:
            is_shared = self.shares_experts and expert_axis(part.path) == part.axis
            old = leaves[part.leaf]
            new = value[part.path]
            axis = lead + part.axis
            leaves[part.leaf] = _put_rows(old, part.rows, new, axis, is_shared)
        return self.treedef.unflatten(leaves)

    def only(self, tree: PyTree, fragment_id: int) -> PyTree:
        """Return `tree` with None for every leaf that has no part of a fragment.

        `take` and `put` of that fragment work on it. A program with fewer arguments has
        less to pass through.
        """
        leaves = self.treedef.flatten_up_to(tree)
        held = {part.leaf for part in self.slices[fragment_id]}
        return self.treedef.unflatten(
            [leaf if i in held else None for i, leaf in enumerate(leaves)]
        )

    def over(self, tree: PyTree, changed: PyTree) -> PyTree:
        """Return `tree` with the leaves of `changed`, see `only`."""
        leaves = self.treedef.flatten_up_to(tree)
        others = self.treedef.flatten_up_to(changed)
        pairs = zip(leaves, others, strict=True)
        return self.treedef.unflatten([b if b is not None else a for a, b in pairs])

    def join(self, fragments: Sequence[Fragment]) -> PyTree:
        """Assemble the full tree from all of its fragments."""
        shares: dict[int, list[tuple[LeafSlice, jax.Array]]] = {}
        for slices, fragment in zip(self.slices, fragments, strict=True):
            for part in slices:
                shares.setdefault(part.leaf, []).append((part, fragment[part.path]))
        return self.treedef.unflatten(
            [_join_rows(shares[leaf]) for leaf in sorted(shares)]
        )


def fitted(fragments: Fragments, params: PyTree) -> Fragments:
    """Return a cut of a tree as one of a tree with the same leaves in other containers.

    Flax NNX gives an optimizer's `init` its variables, and `update` the arrays in them.
    A cut of either, or of a pure dict, is one of the other, leaf by leaf. Fragments of
    other leaves stay as they are, see `check_partition`.
    """
    structure = jax.tree.structure(params)
    if fragments.treedef == structure:
        return fragments

    count = fragments.treedef.num_leaves
    before = unboxed_paths(fragments.treedef.unflatten([0] * count))
    now = unboxed_paths(params)
    if len(set(now)) < len(now) or sorted(before) != sorted(now):
        return fragments

    index = {path: i for i, path in enumerate(now)}
    paths = [path for path, _ in named_leaves(params)]

    def moved(part: LeafSlice) -> LeafSlice:
        leaf = index[before[part.leaf]]
        return dataclasses.replace(part, leaf=leaf, path=paths[leaf])

    slices = tuple(
        tuple(sorted(map(moved, parts), key=lambda part: part.leaf))
        for parts in fragments.slices
    )
    return dataclasses.replace(fragments, treedef=structure, slices=slices)


def check_partition(fragments: Fragments, params: PyTree) -> None:
    """Refuse fragments of another tree, or that are no partition of this one.

    Rows in no fragment would silently never be averaged.
    """
    remedy = "use fragments=cut(params, num_fragments) of these params"
    try:
        leaves = fragments.treedef.flatten_up_to(params)
    except ValueError as error:
        raise ValueError(
            f"fragments were cut of {fragments.treedef}, but params has the structure "
            f"{jax.tree.structure(params)}; {remedy}"
        ) from error

    held: list[list[LeafSlice]] = [[] for _ in leaves]
    for part in (part for slices in fragments.slices for part in slices):
        if not 0 <= part.leaf < len(leaves):
            raise ValueError(
                f"fragments has {part.path!r} as leaf {part.leaf}, but params has "
                f"{len(leaves)} leaves; {remedy}"
            )
        held[part.leaf].append(part)

    for (path, leaf), parts in zip(named_leaves(params), held, strict=True):
        rows = [part.rows for part in parts]
        if rows == [None] or 0 in leaf.shape:
            continue

        axes = {part.axis for part in parts}
        axis = axes.pop() if len(axes) == 1 else 0
        length = leaf.shape[axis] if leaf.ndim > axis and not axes else 0

        held_rows = sorted(row for part_rows in rows for row in part_rows or ())
        if not rows or None in rows or held_rows != list(range(length)):
            shown = held_rows if None not in rows else rows
            raise ValueError(
                f"fragments has of params' leaf {path!r}, of shape {leaf.shape}, the "
                f"rows {shown}, but every row must be in exactly one fragment; {remedy}"
            )


def _stride(rows: tuple[int, ...]) -> int | None:
    """Return the common distance of `rows`, or None."""
    steps = {b - a for a, b in zip(rows, rows[1:], strict=False)} or {1}
    return steps.pop() if len(steps) == 1 else None


def _take_rows(x: jax.Array, rows: tuple[int, ...] | None, axis: int) -> jax.Array:
    if rows is None:
        return x

    stride = _stride(rows)
    if stride is None:
        return jnp.take(x, jnp.array(rows), axis=axis)
    return jax.lax.slice_in_dim(x, rows[0], rows[-1] + 1, stride, axis)


def _put_rows(
    x: jax.Array,
    rows: tuple[int, ...] | None,
    value: jax.Array,
    axis: int,
    is_shared: bool,
) -> jax.Array:
    value = value.astype(x.dtype)
    if rows is None or (is_shared and len(rows) == x.shape[axis]):
        return value
    if is_shared:  # For an update in place XLA would gather all experts.
        at = (*(slice(None),) * axis, jnp.array(rows))
        rows_of = jnp.asarray(x).at[at]
        return rows_of.set(value, unique_indices=True, indices_are_sorted=True)
    if _stride(rows) == 1:
        return jax.lax.dynamic_update_slice_in_dim(x, value, rows[0], axis)

    # One in-place write per row: a strided `.at[].set` lowers to a scatter.
    for i, row in enumerate(rows):
        row_value = jax.lax.slice_in_dim(value, i, i + 1, axis=axis)
        x = jax.lax.dynamic_update_slice_in_dim(x, row_value, row, axis)
    return x


def _join_rows(shares: list[tuple[LeafSlice, jax.Array]]) -> jax.Array:
    first, value = shares[0]
    if first.rows is None:
        return value

    rows = [row for part, _ in shares for row in part.rows or ()]
    stacked = jnp.concatenate([value for _, value in shares], axis=first.axis)
    return jnp.take(stacked, np.argsort(rows), axis=first.axis)
