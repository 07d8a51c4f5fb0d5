"""The leaves of a transformer's tree that are stacks of layers, found by their paths.

A scanned model keeps the blocks' leaves stacked along a leading layer axis
(`blocks/mlp/up` is [layers, in, out]); an unscanned one has a subtree for each block
(`blocks/0/mlp/up`). Rules for a tensor apply to each layer of a stack.

Names are a guess. For another name than `blocks`, the logger of this module warns once.
Functions that use the guess have an argument that overrides it: `blocks`, or
`has_layers(path) -> bool`.
"""

import functools
import logging
import re
from typing import Any

import jax
from jax.tree_util import FlattenedIndexKey, GetAttrKey

_logger = logging.getLogger(__name__)

BLOCKS = "blocks"
EMBEDDING = r"(?<!un)embed"
# Names of a subtree that may be a stack of layers, and of a single layer. Scanned
# layers have parts with numbers too, such as `blocks/norm1` and `blocks/Dense_0`.
STACKED = re.compile(r"layers|blocks|stack|scan", re.IGNORECASE)
_LAYER = re.compile(r"(|layer|block|.*(layers|blocks|stack))_?(\d+)", re.IGNORECASE)
# Below a stack's name, any name of a layer; `ScanDecoderLayer_0` itself is a stack.
_BELOW = re.compile(r".*layer_?(\d+)", re.IGNORECASE)


def path_of(keys) -> str:
    """Join the keys on the way to a leaf by "/"."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def named_leaves(tree) -> list[tuple[str, Any]]:
    """Return every leaf with its path, parts joined by "/".

    The flat dict of a fragment, whose keys are paths, gives the same as a nested tree.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(path_of(keys), leaf) for keys, leaf in leaves]


def without_box(keys):
    """Drop the attribute of a box, which holds the array, from a leaf's keys.

    It is `value` of a Flax box, and has no name in Haliax's `NamedArray`. An entry of a
    dict may be called `value` too, and stays.
    """
    is_flax = keys[-1:] == (GetAttrKey("value"),)
    is_haliax = len(keys) > 1 and keys[-1] == FlattenedIndexKey(0)
    return keys[:-1] if is_flax or is_haliax else keys


def unboxed_paths(tree) -> list[str]:
    """Return the path of every leaf, equal whether Flax boxes are around it or not."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [path_of(without_box(keys)) for keys, _ in leaves]


def distinct_leaves(tree) -> list[tuple[str, Any]]:
    """Return every leaf with its path; refuse two of one, {"a/b": x, "a": {"b": y}}."""
    leaves = named_leaves(tree)
    seen = set()
    for path, _ in leaves:
        if path in seen:
            raise ValueError(
                f"the tree has two leaves whose path is {path!r} once its parts are "
                "joined by '/'; rename one of them"
            )
        seen.add(path)
    return leaves


def nodes_of(kind: type, tree) -> list:
    """Return every node of a kind, such as an optimizer's state in that of a chain."""
    is_one = lambda x: isinstance(x, kind)  # noqa: E731
    return list(filter(is_one, jax.tree.leaves(tree, is_leaf=is_one)))


def is_block(path: str, blocks: str = BLOCKS) -> bool:
    """Return whether a leaf is of one block or several."""
    return blocks in path.split("/")


def is_stack(path: str, blocks: str = BLOCKS) -> bool:
    """Return whether a leaf's first axis counts layers.

    Such leaves are below `blocks`, or below the first part whose name fits `STACKED`.

    >>> is_stack("blocks/mlp/up"), is_stack("blocks/0/mlp/up"), is_stack("blocks")
    (True, False, False)
    >>> is_stack("blocks/DecoderLayer_0/mlp/up")
    False
    """
    parts = path.split("/")
    above = [part for part in parts[:-1] if part == blocks or STACKED.search(part)]
    if not above:
        return False

    stack = blocks if blocks in above else above[0]
    after = parts[parts.index(stack) + 1]
    if layer_number(stack) is not None or number_below(after) is not None:
        return False

    if stack != blocks:
        _say_of_stack("/".join(parts[: parts.index(stack) + 1]))
    return True


@functools.cache
def _say_of_stack(stack: str) -> None:
    """Warn once that a subtree counts as a stack of layers by its name alone."""
    _logger.warning(
        "the leaves below %r are taken for layers stacked along their first axis, by "
        "their name: each layer counts as a tensor of its own. If they are not, pass "
        "has_layers=lambda path: False to what compresses or compensates them",
        stack,
    )


def layer_number(part: str) -> int | None:
    """Return the number of a layer, from its part of a path; None if it is none."""
    match = _LAYER.fullmatch(part)
    return int(match[3]) if match else None


def number_below(part: str) -> int | None:
    """Return the number of a layer whose name is right below that of a stack.

    >>> number_below("DecoderLayer_1"), number_below("Dense_1")
    (1, None)
    """
    match = _BELOW.fullmatch(part)
    return int(match[1]) if match else layer_number(part)


def is_matrix(path: str, num_axes: int, blocks: str = BLOCKS) -> bool:
    """Return whether a leaf, or each layer of it, has at least two axes."""
    return num_axes - is_stack(path, blocks) >= 2
