"""Find the layers in a parameter tree, by names and shapes.

A model repeats a layer, and its tree shows that in one of three ways:

- *numbered*: a list, or a dict with the keys 0, 1, 2 (`layers/0/...`);
- *named*: siblings with a number at the end (`layer_0/...`, `Block_1/...`);
- *stacked*: one subtree whose leaves all have the layers along their leading axis, as
  in a scanned model.

A subtree named `blocks` (the models of this package) always counts. Otherwise layers
are searched from the root downwards. Numbered and named ones count if most of them have
the same structure: at least two, and at least half of them, with leaves of the same
names. So an encoder and a decoder are not a stack of two layers, but each contains one.
A stacked subtree must have a name of one (`layers`, `blocks`, `stack`, `scan`), several
leaves, and among them one of three axes: by shapes alone the heads of an attention
would look like layers. What was found is logged once, at the level INFO; `blocks` of
`cut` overrides it.
"""

import functools
import logging
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from cocodc_jax.transforms.layers import BLOCKS, STACKED, number_below

_logger = logging.getLogger(__name__)

Path = tuple[str, ...]

# Siblings: a name that ends with a number.
_NUMBERED = re.compile(r"(.*?)_?(\d+)")


class Place(NamedTuple):
    """The layer of a leaf."""

    stack: str  # Path of the stack; for named layers their common name.
    # Its number; None for a leaf that holds all layers along its leading axis.
    layer: int | None


def find(
    leaves: Sequence[tuple[str, Any]], blocks: str | None = None
) -> dict[str, Place]:
    """Find the leaves of layers; refuse `blocks` if no stack has that name."""
    shapes = {tuple(path.split("/")): leaf.shape for path, leaf in leaves}
    found = _called(blocks or BLOCKS, shapes)
    if not found and blocks is not None:
        found = _named_so(blocks, shapes)
        if not found:
            raise ValueError(
                f"blocks={blocks!r} is no part of any parameter's path; they are "
                f"{['/'.join(path) for path in shapes]}"
            )
    if not found and blocks is None:
        found = dict(_look(shapes, (), list(shapes)))
        _say(tuple(sorted({place.stack for place in found.values()})))
    return {"/".join(path): place for path, place in found.items()}


@functools.cache
def _say(names: tuple[str, ...]) -> None:
    """Log once which subtrees a cut without `blocks` takes for layers."""
    _logger.info("layers found by names and shapes: %s", ", ".join(names) or "none")


def _called(name: str, shapes: dict[Path, tuple]) -> dict[Path, Place]:
    """Find what is below a path part of that name: numbered, else stacked."""
    found = {}
    for path in shapes:
        if name in path[:-1]:
            at = path.index(name) + 1
            found[path] = Place("/".join(path[:at]), number_below(path[at]))
    return found


def _named_so(name: str, shapes: dict[Path, tuple]) -> dict[Path, Place]:
    """Find `name_0`, `name_1`, ... at any depth."""
    found = {}
    for path in shapes:
        for at, part in enumerate(path[:-1]):
            stem, number = _split(part)
            if number is not None and stem == name.rstrip("_"):
                found[path] = Place("/".join((*path[:at], stem)), number)
                break
    return found


def _look(shapes: dict[Path, tuple], root: Path, below: list[Path]):
    """Yield the places of leaves below `root`, outermost stacks first."""
    depth = len(root)
    children: dict[str, list[Path]] = {}
    for path in below:
        if len(path) > depth + 1:  # A single leaf is not a layer.
            children.setdefault(path[depth], []).append(path)
    families: dict[str, dict[int, str]] = {}
    for child in children:
        stem, number = _split(child)
        if number is not None:
            families.setdefault(stem, {})[number] = child
    is_list = "" in families
    if root and not is_list and _is_stacked(root[-1], [shapes[p] for p in below]):
        yield from ((path, Place("/".join(root), None)) for path in below)
        return
    for stem, members in families.items():
        if not _are_layers([children[child] for child in members.values()], depth + 1):
            continue
        stack = "/".join((*root, stem) if stem else root)
        for number, child in members.items():
            for path in children.pop(child):
                yield path, Place(stack, number)
    for child, paths in children.items():
        yield from _look(shapes, (*root, child), paths)


def _split(part: str) -> tuple[str, int | None]:
    """Split a name from the number at its end, if it has one."""
    match = _NUMBERED.fullmatch(part)
    return (match[1], int(match[2])) if match else (part, None)


def _are_layers(members: list[list[Path]], depth: int) -> bool:
    """Return whether most members have leaves of the same names."""
    kinds = Counter(frozenset(path[depth:] for path in paths) for paths in members)
    most = max(kinds.values())
    return most >= 2 and 2 * most >= len(members)


def _is_stacked(name: str, shapes: list[tuple]) -> bool:
    """Return whether leaves have a stack's name, and share an axis of layers."""
    if not STACKED.search(name) or len(shapes) < 2:
        return False
    lengths = {shape[0] if shape else 0 for shape in shapes}
    return len(lengths) == 1 and lengths.pop() > 1 and any(len(s) > 2 for s in shapes)
