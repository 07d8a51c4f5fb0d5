"""How the state of `synchronized` is laid out over regions: axes and shardings.

Parts that are equal in all regions (the outer model, its optimizer, means in flight)
need one copy for a `jax.vmap` on one device, and no region axis on a mesh. Inside a
region the outer model is sharded like the parameters.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from cocodc_jax import methods
from cocodc_jax.core.optimizer import SynchronizedState
from cocodc_jax.sync.method import Method
from cocodc_jax.sync.outer import RegionalOuter
from cocodc_jax.transforms.layers import named_leaves

PyTree = Any


def sync_axes(
    method: Method | str, regional: Any = 0, shared: Any = None
) -> SynchronizedState:
    """Return a prefix of the state that marks regional and shared parts.

    Use it for `in_axes` or specs, so that the outer model is not stored once per
    region: `jax.vmap(step, in_axes=(0, sync_axes(method), 0), out_axes=...)`, or
    `sync_axes(method, P("region"), P())` on a mesh. `regional` is for parts that differ
    between regions, `shared` for those that are equal.
    """
    method = methods.get(method) if isinstance(method, str) else method
    outer = method.sync and method.sync.outer
    is_regional = isinstance(outer, RegionalOuter)
    is_told_apart = is_regional and outer.group != "all"
    own = {"inner", "per_step", "memories", "copies", "correction_ratio"}
    own |= {"outer", "opt_states"} if is_regional else set()
    own |= {"means"} if is_told_apart else set()
    fields = SynchronizedState._fields
    return SynchronizedState(*(regional if x in own else shared for x in fields))


def sync_shardings(
    tree: PyTree, shardings: PyTree, axes: PyTree = 0, axis_name: str = "region"
) -> PyTree:
    """Return shardings for all regions' values, from those of one region's parameters.

    A leaf is sharded like the parameter whose path its own path ends with, if its shape
    can be: moments of the inner optimizer, and outer parameters, momenta and messages.
    All other leaves are replicated inside a region. The result is for `out_shardings`
    of a function under `jax.vmap`.

    Args:
      tree: one region's values, or their shapes from `jax.eval_shape`: an optimizer
        state, or a training state that contains it.
      shardings: `NamedSharding` of each parameter of one region, a tree.
      axes: prefix of `tree` with 0 for values that have a region axis in front and None
        for those that are equal in all regions, see `sync_axes`.
      axis_name: name of the mesh's region axis.
    """
    known = {_path(path): sharding for path, sharding in named_leaves(shardings)}
    if not known:
        raise ValueError("shardings has no leaves; pass those of one region's params")
    mesh = next(iter(known.values())).mesh

    def of_leaf(path: str, x: Any, axis: int | None) -> NamedSharding:
        parts = _path(path).split("/")
        ends = ("/".join(parts[i:]) for i in range(len(parts)))
        spec = next((known[end].spec for end in ends if end in known), PartitionSpec())
        if len(spec) > x.ndim or not _divides(NamedSharding(mesh, spec), x.shape):
            spec = PartitionSpec()
        lead = () if axis is None else (axis_name,)
        return NamedSharding(mesh, PartitionSpec(*lead, *spec))

    is_none = lambda x: x is None  # noqa: E731
    each = jax.tree.leaves(jax.tree.broadcast(axes, tree, is_none), is_leaf=is_none)
    pairs = zip(named_leaves(tree), each, strict=True)
    return jax.tree.structure(tree).unflatten(
        [of_leaf(*named, axis) for named, axis in pairs]
    )


def _path(path: str) -> str:
    return path.removesuffix("/value")  # Of a Flax box, around the array.


def _divides(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True
