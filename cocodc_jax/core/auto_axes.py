"""Compute an update with Auto mesh axes where the caller's are Explicit.

`jax.make_mesh` makes Explicit axes by default. There JAX (0.10.2) can neither index nor
permute nor sum an axis of `jax.vmap` that is sharded over the mesh, and compressors
would have to state the sharding of each gather. So all axes are Auto inside, and
results get the shardings of the arguments that they replace.
"""

from collections.abc import Callable
from typing import Any

import jax

from cocodc_jax.transforms.numerics import vary_like

PyTree = Any


def with_auto_axes(update: Callable) -> Callable:
    """Return `update(updates, state, params, **extra)` for axes of all kinds.

    It returns updates like `params`, and a state like `state`. The extra argument
    `value_fn(params)` is called with the caller's axes.
    """

    def call(updates: PyTree, state: Any, params: PyTree = None, **extra: Any):
        axes = jax.sharding.get_abstract_mesh().explicit_axes
        if params is None or not axes:
            return update(updates, state, params, **extra)

        param_shardings = _shardings(params)
        arrays = {name: x for name, x in extra.items() if _is_of_arrays(x)}
        others = {name: x for name, x in extra.items() if name not in arrays}

        value_fn = others.get("value_fn")
        if callable(value_fn):
            others["value_fn"] = jax.sharding.explicit_axes(
                value_fn, axes=axes, in_sharding=(param_shardings,)
            )

        def inside(updates: PyTree, state: Any, params: PyTree, arrays: dict):
            new_updates, new_state = update(updates, state, params, **arrays, **others)
            # Results of regions stay so, also where all regions have equal ones.
            return vary_like(new_updates, params), vary_like(new_state, state)

        auto: Any = jax.sharding.auto_axes(
            inside,
            axes=axes,
            out_sharding=(param_shardings, _shardings(state)),
        )
        return auto(updates, state, params, arrays)

    return call


def _shardings(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.typeof(x).sharding, tree)


def _is_of_arrays(value: Any) -> bool:
    return all(hasattr(x, "dtype") for x in jax.tree.leaves(value))
