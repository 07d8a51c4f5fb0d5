"""Validate a program's arguments before anything is compiled or donated.

Checks shapes, types and placement only; never reads a value or waits for a device.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from cocodc_jax.core.checks import check_arrays
from cocodc_jax.core.state import TrainState
from cocodc_jax.sharding.mesh import DATA, REGION
from cocodc_jax.sync.needs import UserInputs
from cocodc_jax.transforms.layers import named_leaves
from cocodc_jax.transforms.numerics import check_transform

PyTree = Any


def check_kind(argument: str, value: Any, kind: type, made_by: str) -> None:
    """Refuse an argument of the wrong type, such as a name or an uncalled function.

    Raises:
      ValueError: naming the argument and its value.
    """
    if not isinstance(value, kind):
        raise ValueError(f"{argument}={value!r} must be a {kind.__name__}: {made_by}")


def check_functions(loss_fn: Any, optimizer: Any) -> None:
    """Refuse a loss that cannot be called, or an optimizer that was not built.

    Raises:
      ValueError: naming the argument and its value.
    """
    if not callable(loss_fn):
        raise ValueError(
            f"loss_fn={loss_fn!r} must be a function, (params, batch, key) -> (loss, "
            "aux)"
        )
    check_transform("optimizer", optimizer, "optax.adam(1e-3)")


def check_mesh(mesh: Mesh, num_regions: int) -> None:
    """Refuse a mesh that cannot hold the regions.

    Raises:
      ValueError: if it lacks an axis, or its region axis does not divide the regions.
    """
    missing = [axis for axis in (REGION, DATA) if axis not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"mesh has the axes {mesh.axis_names}, but no {missing[0]!r}; use "
            "make_mesh(regions, data=..., model=...), which gives the axes "
            "('region', 'stage', 'data', 'expert', 'sequence', 'model')"
        )
    if num_regions % mesh.shape[REGION]:
        raise ValueError(
            f"regions={num_regions} is not a multiple of the mesh's region axis, "
            f"{mesh.shape[REGION]}"
        )


def check_second_moment(user_inputs: UserInputs, opt_state: PyTree) -> None:
    """Refuse an optimizer without a second moment of the parameters.

    Raises:
      ValueError: the one of that function.
    """
    assert user_inputs.second_moment is not None
    # Its memory, of devices or hosts, makes no difference here.
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), opt_state)
    jax.eval_shape(user_inputs.second_moment, plain)


def check_like(params: PyTree, shapes: PyTree) -> None:
    """Refuse parameters of another structure, shape or dtype than the program's.

    Raises:
      ValueError: naming the first leaf that differs.
    """
    check_arrays(params)
    given, made = jax.tree.structure(params), jax.tree.structure(shapes)
    if given != made:
        raise ValueError(
            f"params has the structure {given}, but the program was made for {made}"
        )
    pairs = zip(
        named_leaves(jax.eval_shape(lambda x: x, params)),
        jax.tree.leaves(shapes),
        strict=True,
    )
    for (path, leaf), like in pairs:
        if (leaf.shape, leaf.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"params has a leaf {path!r} of {leaf.dtype}{list(leaf.shape)}, but "
                f"the program was made for {like.dtype}{list(like.shape)}"
            )


def check_key(key: jax.Array, impl: str) -> None:
    """Refuse a value that is not a PRNG key of the program's implementation.

    Raises:
      ValueError: naming both.
    """
    try:
        given, num_axes = str(jax.random.key_impl(key)), jax.random.key_data(key).ndim
    except TypeError as error:
        raise ValueError(
            f"key={key!r} must be a PRNG key: jax.random.key(seed)"
        ) from error
    if num_axes != 1:
        raise ValueError(
            f"key has the shape {key.shape}, but must be one PRNG key: "
            "jax.random.key(seed); each region gets its own from it"
        )
    if given != impl:
        raise ValueError(
            f"key is of the PRNG implementation {given!r}, but the program was made "
            f"for {impl!r}, JAX's default then: give jax.random.key(seed, "
            f"impl={impl!r}), or set jax.config.update('jax_default_prng_impl', "
            f"{given!r}) before the program is made"
        )


def check_batches(batches: PyTree, num_regions: int, own_regions: int) -> int:
    """Refuse batches whose second axis is not the regions, and return T.

    Raises:
      ValueError: naming the leaf, its shape and the expected one.
    """
    named = named_leaves(batches)
    if not named:
        raise ValueError("batches has no arrays; give leaves [T, R, B, ...]")
    first, leaf = named[0]
    num_steps = np.shape(leaf)[:1]
    for path, leaf in named:
        shape = np.shape(leaf)
        rows = num_regions if is_on_mesh(leaf) else own_regions
        who = f"batches has a leaf {path!r} of shape {shape}"
        if len(shape) < 2:
            raise ValueError(
                f"{who}, without an axis of regions: leaves are [T, R, B, ...], T "
                f"steps of R = {rows} regions ([R, B, ...] for one step of `run_steps`)"
            )
        if shape[1] == num_regions != rows:
            raise ValueError(
                f"{who}, rows of all {num_regions} regions, but this is one of "
                f"several processes: each gives those of its own regions alone, here "
                f"{rows}"
            )
        if shape[1] != rows:
            raise ValueError(
                f"{who}, whose second axis must be the {rows} regions"
                f"{' of this process' if rows != num_regions else ''}: leaves are "
                "[T, R, B, ...] ([R, B, ...] for one step of `run_steps`)"
            )
        if shape[:1] != num_steps:
            raise ValueError(
                f"{who}, but a leaf {first!r} has {num_steps[0]} steps along the "
                "first axis: all leaves have as many"
            )
    return num_steps[0]


def is_on_mesh(leaf: Any) -> bool:
    """Return whether a leaf has all regions' rows, whatever the number of processes.

    So it is if it is sharded over devices of several processes, or only a shape.
    """
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    return is_shape or (_is_real(leaf) and not leaf.is_fully_addressable)


def check_alive(state: TrainState) -> None:
    """Refuse a state that was already donated to a call of `advance`.

    Raises:
      ValueError: if one of its regional arrays was donated.
    """
    # Steps donate all arrays, merges the parameters: checking those is enough.
    arrays = filter(_is_real, jax.tree.leaves((state.region.params, state.region.key)))
    if any(x.is_deleted() for x in arrays):
        raise ValueError(
            f"the state of step {state.step} was donated to `advance` and is gone: "
            "go on with the state that `advance` returned, and copy what is needed of "
            "an old one before (`jax.tree.map(jnp.copy, ...)`)"
        )


def _is_real(leaf: Any) -> bool:
    """Return whether a leaf is a device array, not a tracer."""
    return _is_of_arrays(type(leaf))


@functools.cache
def _is_of_arrays(kind: type) -> bool:
    """Cache `_is_real` by type: a state has hundreds of leaves, of few types."""
    return issubclass(kind, jax.Array) and not issubclass(kind, Tracer)
