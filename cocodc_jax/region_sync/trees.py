"""The trained arrays of a trainer's tree, as a flat dict from path to array.

A trainer's tree may hold boxes (`nn.Partitioned`, `nnx.Param`, Haliax's named arrays),
Equinox modules with functions in them, None, counters and PRNG keys. Regions average
its floating-point arrays. Every other leaf stays the region's own, and keeps its place
in the tree that comes back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cocodc_jax.sync.fragments import Fragments, LeafSlice, fitted
from cocodc_jax.transforms.layers import path_of, unboxed_paths, without_box

PyTree = Any
# From path, parts joined by "/", to array.
Leaves = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which leaves of a tree regions average; made once, from the first parameters.

    Attributes:
      treedef: structure of the tree.
      paths: for each leaf of the tree its path, or None if it stays the region's own.
    """

    treedef: Any
    paths: tuple[str | None, ...]

    @classmethod
    def of(cls, params: PyTree) -> Selection:
        """Select the floating-point arrays.

        Raises:
          ValueError: if there are none, a leaf is complex, or two have one path.
        """
        leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
        paths = tuple(
            path_of(without_box(keys)) if _is_trained(keys, leaf) else None
            for keys, leaf in leaves
        )

        trained = [path for path in paths if path is not None]
        if not trained:
            raise ValueError(
                "params has no floating-point arrays: there is nothing to average"
            )
        twice = sorted({path for path in trained if trained.count(path) > 1})
        if twice:
            raise ValueError(
                f"params has two leaves whose path is {twice[0]!r} once its parts are "
                "joined by '/'; rename one of them"
            )
        return cls(treedef, paths)

    def take(self, params: PyTree) -> Leaves:
        """Return the selected arrays, by path.

        Raises:
          ValueError: if the tree has another structure.
        """
        leaves = self._leaves(params)
        return {
            path: leaf
            for path, leaf in zip(self.paths, leaves, strict=True)
            if path is not None
        }

    def put(self, params: PyTree, arrays: Leaves) -> PyTree:
        """Return `params` with the selected arrays replaced, by path."""
        leaves = [
            leaf if path is None else arrays[path]
            for path, leaf in zip(self.paths, self._leaves(params), strict=True)
        ]
        return self.treedef.unflatten(leaves)

    def map_others(self, function: Callable[[Any], Any], params: PyTree) -> PyTree:
        """Apply a function to the leaves that are not averaged."""
        leaves = [
            function(leaf) if path is None else leaf
            for path, leaf in zip(self.paths, self._leaves(params), strict=True)
        ]
        return self.treedef.unflatten(leaves)

    def fragments(self, fragments: Fragments) -> Fragments:
        """Return a cut of the trainer's tree as one of the flat dict.

        The cut may be of the tree's arrays without their boxes.

        Raises:
          ValueError: if it was cut from another tree, or has a leaf that is not
            averaged.
        """
        num_leaves = self.treedef.num_leaves
        fitting = fitted(fragments, self.treedef.unflatten([0] * num_leaves))
        if fitting.treedef != self.treedef:
            raise ValueError(
                f"params has {_difference(fitting.treedef, self.treedef)} than the "
                "tree that fragments were cut of; use fragments=cut(params, "
                "num_fragments)"
            )

        names = sorted(path for path in self.paths if path is not None)
        index = {name: i for i, name in enumerate(names)}

        def of_flat_dict(part: LeafSlice) -> LeafSlice:
            path = self.paths[part.leaf]
            if path is None:
                raise ValueError(
                    f"fragments has the leaf {part.path!r}, which is not of floating "
                    "point and so is not averaged; cut a tree without it"
                )
            return dataclasses.replace(part, path=path, leaf=index[path])

        slices = []
        for parts in fitting.slices:
            moved = [of_flat_dict(part) for part in parts]
            slices.append(tuple(sorted(moved, key=lambda part: part.leaf)))
        treedef = jax.tree.structure(dict.fromkeys(names, 0))
        return dataclasses.replace(fitting, treedef=treedef, slices=tuple(slices))

    def _leaves(self, params: PyTree) -> list[Any]:
        leaves, treedef = jax.tree.flatten(params)
        if treedef != self.treedef:
            raise ValueError(
                f"params has {_difference(self.treedef, treedef)} than the tree that "
                "this RegionSync was made for"
            )
        return leaves


def _difference(made_for: Any, other: Any) -> str:
    """Describe the first difference of two structures; a full one would fill pages."""
    before = _paths(made_for)
    now = _paths(other)
    more = [path for path in now if path not in before]
    less = [path for path in before if path not in now]
    if more:
        return f"another leaf, {more[0]!r},"
    if less:
        return f"a leaf less, {less[0]!r},"
    return "the same leaves in other containers, or with other metadata,"


def _paths(treedef: Any) -> list[str]:
    """Return the paths of the leaves of a structure."""
    return unboxed_paths(treedef.unflatten([0] * treedef.num_leaves))


def _is_trained(keys: tuple[Any, ...], leaf: Any) -> bool:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return False
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        raise ValueError(
            f"params has a leaf {path_of(keys)!r} of dtype {leaf.dtype}: keep its real "
            "and its imaginary part as two leaves"
        )
    return jnp.issubdtype(leaf.dtype, jnp.floating)
