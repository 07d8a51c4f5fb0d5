"""Boxes around the leaves of a state: they say how it is sharded.

Flax Linen and NNX keep the names of a parameter's mesh axes in a box around its array
(`nn.Partitioned`, `nnx.Param`), Haliax those of its logical axes (`NamedArray`), and a
trainer derives the shardings of its whole state from them. Optax's states have the
boxes of the parameters, as they are made by `jax.tree.map`. A fragment is a flat dict
of bare arrays, so its part of a state is put into boxes as it is made, and taken out of
them for an update.
"""

from typing import Any

import jax

from cocodc_jax.transforms.layers import path_of

PyTree = Any


def with_boxes(tree: PyTree, params: PyTree) -> PyTree:
    """Put leaves that are shaped like a boxed parameter into a box like its own.

    Args:
      tree: values of fragments, whose leaves have the parameter's path as their key. An
        encoded one has another number of axes, and stays as it is.
      params: the parameters, boxed or not.
    """
    boxes = {}
    for keys, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_box):
        leaves = jax.tree.leaves(node)
        if _is_box(node) and len(leaves) == 1:
            boxes[path_of(keys)] = (jax.tree.structure(node), leaves[0].ndim)
    if not boxes:
        return tree

    def boxed(keys: tuple[Any, ...], leaf: jax.Array) -> Any:
        path = getattr(keys[-1], "key", None)
        if path not in boxes:
            return leaf

        structure, ndim = boxes[path]
        return structure.unflatten([leaf]) if leaf.ndim == ndim else leaf

    return jax.tree_util.tree_map_with_path(boxed, tree)


def without_boxes(tree: PyTree) -> PyTree:
    """Return a tree with every box replaced by the array in it."""

    def bare(node: Any) -> Any:
        return jax.tree.leaves(node)[0] if _is_box(node) else node

    return jax.tree.map(bare, tree, is_leaf=_is_box)


def _is_box(node: Any) -> bool:
    """Return whether a node is Linen's `AxisMetadata`, an NNX variable or Haliax's."""
    is_flax = hasattr(node, "replace_boxed") or hasattr(node, "get_metadata")
    return is_flax or _is_named_array(node)


def _is_named_array(node: Any) -> bool:
    """Return whether a node is Haliax's `NamedArray`, with an array in it."""
    is_one = hasattr(type(node), "tree_unflatten") and hasattr(node, "axis_names")
    return is_one and getattr(node, "array", None) is not None


# Where NNX has the names of an array's axes, of this release and of older ones.
_NAMES = ("out_sharding", "sharding_names", "sharding")


def without_region_axis(tree: PyTree) -> PyTree:
    """Return the first region's values of leaves `[M, ...]`.

    Boxes that name the axis of regions lose that name.
    """
    return jax.tree.map(lambda x: x[0], without_region_name(tree))


def without_region_name(tree: PyTree) -> PyTree:
    """Return leaves `[M, ...]` in boxes that do not name the axis of regions.

    Under a `jax.vmap` over that axis, a box then has a name for each axis.
    """

    def unnamed(node: Any) -> Any:
        return _without_first_name(node) if _is_box(node) else node

    return jax.tree.map(unnamed, tree, is_leaf=_is_box)


def with_region_axis(tree: PyTree, params: PyTree) -> PyTree:
    """Give boxes of `without_region_name(params)` the name of the axis again.

    Args:
      tree: values of all regions, leaves `[M, ...]`, in boxes of one region's.
      params: the parameters of all regions.
    """
    boxes = {
        jax.tree.structure(_without_first_name(node)): jax.tree.structure(node)
        for node in jax.tree.leaves(params, is_leaf=_is_box)
        if _is_box(node)
    }

    def named(node: Any) -> Any:
        if not _is_box(node):
            return node
        structure = jax.tree.structure(node)
        return boxes.get(structure, structure).unflatten(jax.tree.leaves(node))

    return jax.tree.map(named, tree, is_leaf=_is_box)


def _without_first_name(box: Any) -> Any:
    """Drop the first name of a box if it has one for every axis of its array."""
    (array,) = jax.tree.leaves(box)
    if _is_named_array(box):
        names = box.axis_names
        is_full = len(names) == array.ndim
        return type(box).tree_unflatten(names[1:], (array,)) if is_full else box

    if hasattr(box, "replace_boxed"):
        names = getattr(box, "names", None) or ()
        return box.replace(names=names[1:]) if len(names) == array.ndim else box

    metadata = box.get_metadata()
    changed = {}
    for key in _NAMES:
        names = metadata.get(key)
        if names is None or len(names) != array.ndim:
            continue
        is_plain = isinstance(names, tuple)
        changed[key] = names[1:] if is_plain else type(names)(*names[1:])
    return box.from_metadata(array, {**metadata, **changed}) if changed else box
