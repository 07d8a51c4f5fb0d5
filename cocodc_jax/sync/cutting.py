"""Cut a parameter tree into K fragments, which are synchronized separately.

A fragment is a set of *units*, which are never cut: one transformer block, or one of
the other entries next to a stack of blocks (embedding, final norm, head). Blocks may be
separate subtrees (`blocks/0/...`, `layer_0/...`) or stacked along an axis, as in a
scanned model; a fragment of a stacked leaf is a set of its rows. `stacks.py` finds the
leaves of blocks, whatever their names and depth.

Units are assigned to fragments

- *strided*: unit i to fragment i mod K (Streaming DiLoCo's default),
- *sequential*: consecutive units together,
- *balanced*: largest unit first, each to the fragment with the fewest bytes so far,
- *balanced_tensors*: the same with single tensors (of one block each, if blocks are
  stacked), so that fragments have nearly equal sizes and can outnumber blocks,
- *experts*: for mixtures of experts. The dense parts, with the routers, get a share of
  the K fragments in proportion to their bytes, at least one, and are strided over them.
  Each other fragment has a range of the experts of all layers,
- *routers*: two fragments, of which the second has the routers of all layers (`diloco`
  with a `router_interval`).

Source: Streaming DiLoCo (Douillard et al., arXiv 2501.18512, section 2.2), and the
unit order [embedding, blocks, norm, head] of CoCoDC (arXiv 2504.17672).
"""

import collections
import dataclasses
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from cocodc_jax.expert_leaves import expert_axis, is_router
from cocodc_jax.sync import stacks
from cocodc_jax.sync.fragments import Fragments, LeafSlice, PyTree
from cocodc_jax.transforms.layers import (
    BLOCKS,
    EMBEDDING,
    distinct_leaves,
    unboxed_paths,
)
from cocodc_jax.transforms.numerics import check_choice

Strategy = Literal["strided", "sequential", "balanced", "balanced_tensors", "experts"]
STRATEGIES = get_args(Strategy)

# For methods only: its two fragments have different periods.
ROUTERS = "routers"

# Order of the units in the network, which differs from that of their names.
UNIT_ORDER = (EMBEDDING, BLOCKS, "norm", "head")


def cut(
    params: PyTree,
    num_fragments: int,
    strategy: str = "strided",
    blocks: str | None = None,
    layer_axis: int | None = None,
) -> Fragments:
    """Cut `params` into fragments of full units.

    Args:
      params: tree of arrays or `jax.ShapeDtypeStruct`s (shapes are enough).
      num_fragments: K, at least 1. At most the number of blocks if `blocks` is given or
        a path has a part `blocks`, else of units; of tensors for "balanced_tensors".
      strategy: one of `STRATEGIES`, or "routers".
      blocks: name of the path part below which blocks are, either numbered or stacked
        along an axis, or the common prefix of numbered names (`layer` of `layer_0`,
        `layer_1`); None finds them, see `stacks`.
      layer_axis: axis of stacked layers in one region's leaves, 0 or more. None: axis 1
        if all leaves of a stack have one length along it and not along axis 0, else 0.

    >>> layer = {"w": jnp.zeros((2, 2))}
    >>> params = {"params": {f"layer_{i}": layer for i in range(4)}}
    >>> fragments = cut(params, 2)
    >>> list(fragments.take(params, 0))
    ['params/layer_0/w', 'params/layer_2/w']
    >>> list(fragments.take(params, 1))
    ['params/layer_1/w', 'params/layer_3/w']
    """
    check_choice("fragment_strategy", strategy, (*STRATEGIES, ROUTERS))
    _check_layer_axis(layer_axis)
    if strategy == ROUTERS:
        return _cut_routers(params, num_fragments)
    units = _units(params, blocks, layer_axis)
    if strategy == "experts":
        return _cut_experts(params, units, num_fragments)

    if strategy == "balanced_tensors":
        units = [
            _Unit((part,), unit.is_block) for unit in units for part in unit.slices
        ]
        most = len(units)
        pieces = "tensors"
    elif num_blocks := _num_named_blocks(units, blocks):
        most = num_blocks
        pieces = "blocks"
    else:
        most = len(units)
        pieces = "layers"

    if not hasattr(num_fragments, "__index__") or not 1 <= num_fragments <= most:
        raise ValueError(
            f"num_fragments={num_fragments!r} does not fit a model of {most} {pieces}; "
            f"use 1 to {most}, or say what the blocks are: "
            "fragments=cut(params, num_fragments, blocks=NAME), or "
            "cut_by_patterns(params, patterns)"
        )

    groups = _grouped(units, num_fragments, strategy)
    return Fragments(jax.tree.structure(params), tuple(groups))


def cut_by_patterns(params: PyTree, patterns: Sequence[str]) -> Fragments:
    """Cut `params` by regular expressions, one fragment per pattern.

    A leaf belongs to the first pattern that `re.search` finds in its path. Each leaf
    must have one, and each pattern a leaf.
    """
    groups: list[list[LeafSlice]] = [[] for _ in patterns]
    for index, (path, leaf) in enumerate(distinct_leaves(params)):
        matching = [k for k, pattern in enumerate(patterns) if re.search(pattern, path)]
        if not matching:
            raise ValueError(
                f"no fragment pattern matches parameter {path!r}; "
                f"patterns={list(patterns)}, add one such as '.*'"
            )
        groups[matching[0]].append(_slice(path, index, leaf))

    for group, pattern in zip(groups, patterns, strict=True):
        if not group:
            raise ValueError(
                f"fragment pattern {pattern!r} matches no parameter that an earlier "
                "pattern left; remove it or put it first"
            )
    slices = tuple(tuple(group) for group in groups)
    return Fragments(jax.tree.structure(params), slices)


def _cut_routers(params: PyTree, num_fragments: int) -> Fragments:
    """Cut into everything but the routers, and the routers."""
    if num_fragments != 2:
        raise ValueError(
            f"num_fragments={num_fragments!r} does not fit fragment_strategy="
            f"{ROUTERS!r}; use 2"
        )

    groups: tuple[list[LeafSlice], list[LeafSlice]] = ([], [])
    for index, (path, leaf) in enumerate(distinct_leaves(params)):
        groups[is_router(path)].append(_slice(path, index, leaf))
    if not all(groups):
        raise ValueError(
            f"fragment_strategy={ROUTERS!r} needs a model with experts, and these "
            "parameters have no router (a leaf with 'router' in its path, or 'gate' "
            "below 'moe'); leave router_interval out, or pass "
            "fragments=cut_by_patterns(params, patterns)"
        )
    return Fragments(jax.tree.structure(params), tuple(map(tuple, groups)))


@dataclasses.dataclass(frozen=True)
class _Unit:
    slices: tuple[LeafSlice, ...]
    is_block: bool

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.slices)


def _num_named_blocks(units: list[_Unit], blocks: str | None) -> int:
    """Return the number of blocks, 0 if neither the user nor paths name them."""
    if not blocks:
        paths = [part.path.split("/") for unit in units for part in unit.slices]
        if not any(BLOCKS in path[:-1] for path in paths):
            return 0
    return sum(unit.is_block for unit in units)


def _slice(
    path: str,
    index: int,
    leaf: Any,
    rows: tuple[int, ...] | None = None,
    axis: int = 0,
) -> LeafSlice:
    size = math.prod(leaf.shape)
    if rows is not None:
        size = size // leaf.shape[axis] * len(rows)
    num_bytes = size * jnp.dtype(leaf.dtype).itemsize

    return LeafSlice(
        path=path,
        leaf=index,
        rows=rows,
        num_params=size,
        num_bytes=num_bytes,
        axis=axis,
    )


def _cut_experts(params: PyTree, units: list[_Unit], num_fragments: int) -> Fragments:
    """Cut into fragments of dense parts, then of experts."""
    leaves = distinct_leaves(params)
    axes = {i: expert_axis(path) for i, (path, _) in enumerate(leaves)}
    expert_axes = {i: axis for i, axis in axes.items() if axis is not None}
    if not expert_axes:
        raise ValueError(
            "fragment_strategy='experts' needs a model with experts, and these "
            "parameters have none; use 'strided'"
        )
    if any(part.axis for unit in units for part in unit.slices):
        raise ValueError(
            "fragment_strategy='experts' needs layers along the leading axis, and "
            "these parameters stack them along another one; use 'strided'"
        )
    numbers = {leaves[i][1].shape[axis] for i, axis in expert_axes.items()}
    if len(numbers) > 1:
        raise ValueError(f"layers have {sorted(numbers)} experts; use 'strided'")
    (num_experts,) = numbers

    dense = []
    for unit in units:
        slices = tuple(part for part in unit.slices if part.leaf not in expert_axes)
        if slices:
            dense.append(_Unit(slices, unit.is_block))
    most = len(dense) + num_experts
    if num_fragments not in range(2, most + 1):
        raise ValueError(
            f"num_fragments={num_fragments!r} does not fit fragment_strategy='experts' "
            f"with {len(dense)} dense units and {num_experts} experts; use 2 to {most}"
        )

    # Fragments of both kinds are about as large; each has one unit or expert at least.
    dense_bytes = sum(unit.num_bytes for unit in dense)
    expert_bytes = sum(
        _slice(leaves[i][0], i, leaves[i][1]).num_bytes for i in expert_axes
    )
    share = dense_bytes / (dense_bytes + expert_bytes)
    num_dense = min(max(round(num_fragments * share), 1), len(dense), num_fragments - 1)
    num_dense = max(num_dense, num_fragments - num_experts)
    num_rest = num_fragments - num_dense

    groups = _grouped(dense, num_dense, "strided")
    for k in range(num_rest):
        first = k * num_experts // num_rest
        end = (k + 1) * num_experts // num_rest
        slices = []
        for i, axis in expert_axes.items():
            path, leaf = leaves[i]
            slices.append(
                _slice(path, i, leaf, rows=tuple(range(first, end)), axis=axis)
            )
        groups.append(tuple(slices))
    return Fragments(jax.tree.structure(params), tuple(groups))


def _check_layer_axis(layer_axis: Any) -> None:
    if layer_axis is None:
        return
    if not hasattr(layer_axis, "__index__") or layer_axis < 0:
        raise ValueError(
            f"layer_axis={layer_axis!r} must be a number of an axis, 0 or more, or None"
        )


def _units(params: PyTree, blocks: str | None, layer_axis: int | None) -> list[_Unit]:
    """List the units in network order, not in the order of their names."""
    leaves = distinct_leaves(params)
    # Layers are found by names without boxes, so boxes do not change the cut.
    names = unboxed_paths(params)
    named = [(name, leaf) for name, (_, leaf) in zip(names, leaves, strict=True)]
    places = stacks.find(named, blocks, layer_axis)
    name_of = _namer(names, places)

    slices = collections.defaultdict(list)  # By rank, stack and layer.
    num_rows: dict[str, int] = {}
    for index, (path, leaf) in enumerate(leaves):
        name = names[index]
        stack, layer, axis = places.get(name, stacks.Place(name_of(name), -1))
        kind = BLOCKS if name in places else stack.rsplit("/", 1)[-1].lower()
        ranks = (i for i, known in enumerate(UNIT_ORDER) if re.search(known, kind))
        rank = next(ranks, len(UNIT_ORDER))
        if layer is not None:
            slices[rank, stack, layer].append(_slice(path, index, leaf))
            continue

        has_axis = len(leaf.shape) > axis
        length = num_rows.setdefault(stack, leaf.shape[axis] if has_axis else 0)
        if not has_axis or leaf.shape[axis] != length:
            raise ValueError(
                f"stacked parameter {path!r} has shape {leaf.shape}, but {stack!r} "
                f"holds {length} blocks along axis {axis}; name another by layer_axis="
            )
        for row in range(length):
            slices[rank, stack, row].append(
                _slice(path, index, leaf, rows=(row,), axis=axis)
            )

    return [
        _Unit(tuple(slices[unit]), is_block=unit[2] >= 0) for unit in sorted(slices)
    ]


def _namer(paths: list[str], places: dict[str, stacks.Place]) -> Callable[[str], str]:
    """Return a function that names the unit of a leaf outside of blocks.

    A unit is an entry next to layers, or next to their parents; without layers, an
    entry at the first level that has several. So `{"params": x}` is cut like x.
    """
    split = [tuple(path.split("/")) for path in paths]
    stack_paths = {tuple(place.stack.split("/")) for place in places.values()}
    above = {parts[:depth] for parts in stack_paths for depth in range(len(parts) + 1)}
    if split and not above:
        shortest = min(map(len, split))
        shared = min(len(os.path.commonprefix(split)), shortest - 1)
        above = {split[0][:depth] for depth in range(shared + 1)}

    def name(path: str) -> str:
        parts = tuple(path.split("/"))
        depth = 1
        while parts[:depth] in above and depth < len(parts):
            depth += 1
        return "/".join(parts[:depth])

    return name


def _assign(sizes: Sequence[int], num_fragments: int, strategy: str) -> list[int]:
    if strategy == "strided":
        return [i % num_fragments for i in range(len(sizes))]
    if strategy == "sequential":
        return [i * num_fragments // len(sizes) for i in range(len(sizes))]

    # Longest-processing-time rule: within 4/3 of the optimal largest fragment.
    owner = [0] * len(sizes)
    load = [0] * num_fragments
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner[i] = load.index(min(load))
        load[owner[i]] += max(sizes[i], 1)  # An empty tensor fills a fragment too.
    return owner


def _grouped(
    units: list[_Unit], num_fragments: int, strategy: str
) -> list[tuple[LeafSlice, ...]]:
    """Assign units to fragments; return each one's slices, rows of a leaf joined."""
    owner = _assign([unit.num_bytes for unit in units], num_fragments, strategy)
    groups: list[dict[int, LeafSlice]] = [{} for _ in range(num_fragments)]
    for unit, k in zip(units, owner, strict=True):
        for part in unit.slices:
            held = groups[k].get(part.leaf)
            groups[k][part.leaf] = part if held is None else _joined(held, part)
    return [tuple(group[leaf] for leaf in sorted(group)) for group in groups]


def _joined(one: LeafSlice, other: LeafSlice) -> LeafSlice:
    """Join rows of one stacked leaf."""
    return dataclasses.replace(
        one,
        rows=tuple(sorted((*(one.rows or ()), *(other.rows or ())))),
        num_params=one.num_params + other.num_params,
        num_bytes=one.num_bytes + other.num_bytes,
    )
