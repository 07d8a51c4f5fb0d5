"""Find the layers in a parameter tree, by names and shapes.

A model repeats a layer, and its tree shows that in one of three ways:

- *numbered*: a list, or a dict with the keys 0, 1, 2 (`layers/0/...`);
- *named*: siblings with a number at the end (`layer_0/...`, `Block_1/...`);
- *stacked*: one subtree whose leaves all have the layers along the same axis, as in a
  scanned model: the leading one, or the next (MaxText's `param_scan_axis: 1`).

A subtree named `blocks` (the models of this package) always counts. Otherwise layers
are searched from the root downwards. Numbered and named ones count if most of them have
the same structure: at least two, and at least half of them, with leaves of the same
names. So an encoder and a decoder are not a stack of two layers, but each contains one.
A stacked subtree must be named as one (`layers`, `blocks`, `stack`, `scan`) and have
several leaves, at least one of them with three axes: by shapes alone the heads of an
attention would look like layers. Its layers are along the first of the two axes that
has one length in all leaves. The stacks are logged once, at the level INFO; `blocks`
and `layer_axis` of `cut` override them.
"""

import functools
import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cocodc_jax.transforms.layers import BLOCKS, STACKED, number_below

_logger = logging.getLogger(__name__)

Path = tuple[str, ...]

# Siblings: a name that ends with a number.
_NUMBERED = re.compile(r"(.*?)_?(\d+)")


class Place(NamedTuple):
    """The layer of a leaf."""

    stack: str  # Path of the stack; for named layers with their common name.
    # The layer's number; None for a leaf that holds all layers along `axis`.
    layer: int | None
    axis: int = 0


# Axes along which a stack may have its layers, unless the user says another one.
_AXES = (0, 1)


def find(
    leaves: Sequence[tuple[str, Any]],
    blocks: str | None = None,
    layer_axis: int | None = None,
) -> dict[str, Place]:
    """Find the leaves of layers; refuse `blocks` if no stack has that name."""
    shapes = {tuple(path.split("/")): leaf.shape for path, leaf in leaves}
    axes = _AXES if layer_axis is None else (layer_axis,)
    places = _called(blocks or BLOCKS, shapes, axes)
    if not places and blocks is not None:
        places = _named_so(blocks, shapes)
        if not places:
            raise ValueError(
                f"blocks={blocks!r} is no part of any parameter's path; they are "
                f"{['/'.join(path) for path in shapes]}"
            )
    if not places and blocks is None:
        places = dict(_look(shapes, (), list(shapes), axes))
        _say(tuple(sorted({(x.stack, x.axis) for x in places.values()})))

    is_stacked = any(place.layer is None for place in places.values())
    if layer_axis is not None and not is_stacked:
        raise ValueError(
            f"layer_axis={layer_axis} is of layers that are stacked in one leaf, and "
            "no stack was found in these parameters: name it by blocks=NAME, or leave "
            "layer_axis out"
        )
    return {"/".join(path): place for path, place in places.items()}


@functools.cache
def _say(stacks: tuple[tuple[str, int], ...]) -> None:
    """Log once which subtrees a cut without `blocks` takes for layers."""
    names = (f"{name} (along axis {axis})" if axis else name for name, axis in stacks)
    _logger.info("layers found by names and shapes: %s", ", ".join(names) or "none")


def _called(
    name: str, shapes: dict[Path, tuple], axes: Sequence[int]
) -> dict[Path, Place]:
    """Find the leaves below a path part of that name: numbered, else stacked."""
    places = {}
    stacked: dict[str, list[Path]] = {}
    for path in shapes:
        if name in path[:-1]:
            at = path.index(name) + 1
            place = Place("/".join(path[:at]), number_below(path[at]))
            places[path] = place
            if place.layer is None:
                stacked.setdefault(place.stack, []).append(path)

    for paths in stacked.values():
        axis = _common_axis([shapes[path] for path in paths], axes)
        if axis is None:  # The cut says which leaf differs.
            axis = axes[0]
        for path in paths:
            places[path] = places[path]._replace(axis=axis)
    return places


def _named_so(name: str, shapes: dict[Path, tuple]) -> dict[Path, Place]:
    """Find `name_0`, `name_1`, ... at any depth."""
    places = {}
    for path in shapes:
        for at, part in enumerate(path[:-1]):
            stem, number = _split(part)
            if number is not None and stem == name.rstrip("_"):
                places[path] = Place("/".join((*path[:at], stem)), number)
                break
    return places


def _look(
    shapes: dict[Path, tuple], root: Path, below: list[Path], axes: Sequence[int]
):
    """Yield the places of leaves below `root`, outermost stacks first."""
    depth = len(root)
    children: dict[str, list[Path]] = {}
    for path in below:
        if len(path) > depth + 1:  # A single leaf is not a layer.
            children.setdefault(path[depth], []).append(path)
    families = _families(children)

    # All layers in each leaf.
    is_list = "" in families
    if root and not is_list:
        axis = _stack_axis(root[-1], [shapes[path] for path in below], axes)
        if axis is not None:
            yield from ((path, Place("/".join(root), None, axis)) for path in below)
            return

    # Numbered or named layers.
    for stem, members in families.items():
        if not _are_layers([children[child] for child in members.values()], depth + 1):
            continue
        stack = "/".join((*root, stem) if stem else root)
        for number, child in members.items():
            for path in children.pop(child):
                yield path, Place(stack, number)

    # Stacks further below.
    for child, paths in children.items():
        yield from _look(shapes, (*root, child), paths, axes)


def _families(children: Iterable[str]) -> dict[str, dict[int, str]]:
    """Group the names that end in a number by what comes before it.

    >>> _families(["layer_0", "layer_1", "head"])
    {'layer': {0: 'layer_0', 1: 'layer_1'}}
    """
    families: dict[str, dict[int, str]] = {}
    for child in children:
        stem, number = _split(child)
        if number is not None:
            families.setdefault(stem, {})[number] = child
    return families


def _split(part: str) -> tuple[str, int | None]:
    """Split a name from the number at its end, if it has one."""
    match = _NUMBERED.fullmatch(part)
    return (match[1], int(match[2])) if match else (part, None)


def _are_layers(members: list[list[Path]], depth: int) -> bool:
    """Return whether most members have leaves of the same names."""
    kinds = Counter(frozenset(path[depth:] for path in paths) for paths in members)
    most = max(kinds.values())
    return most >= 2 and 2 * most >= len(members)


def _stack_axis(name: str, shapes: list[tuple], axes: Sequence[int]) -> int | None:
    """Return the axis of layers of leaves below a stack's name; None if not a stack."""
    if not STACKED.search(name) or len(shapes) < 2:
        return None
    if not any(len(shape) > 2 for shape in shapes):
        return None
    axis = _common_axis(shapes, axes)
    # A single layer is not a stack, and then no other axis counts layers.
    return axis if axis is not None and shapes[0][axis] > 1 else None


def _common_axis(shapes: list[tuple], axes: Sequence[int]) -> int | None:
    """Return the first axis that has one length in all shapes, or None.

    Along the first one of `axes` there may be one layer, along others two or more.
    """
    for axis in axes:
        lengths = {shape[axis] if axis < len(shape) else 0 for shape in shapes}
        least = 1 if axis == axes[0] else 2
        if len(lengths) == 1 and lengths.pop() >= least:
            return axis
    return None
