"""A method for a trainer that owns its step: `stacked`.

A trainer calls `tx.update(grads, state, params)` in its own step, and its code has no
region axis. Its parameters have one, as the leading axis of every leaf, and its loss is
the mean over regions:

    loss = jnp.mean(jax.vmap(loss_of_one_region)(params, batches))

A region's parameters are in one term of that mean, so their gradient is the region's
own divided by M. `stacked` multiplies by M, and maps `synchronized` over the axis.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from cocodc_jax import methods
from cocodc_jax.core.boxes import (
    with_region_axis,
    without_region_axis,
    without_region_name,
)
from cocodc_jax.core.optimizer import SynchronizedState, sync_axes, synchronized
from cocodc_jax.sync.fragments import Fragments
from cocodc_jax.sync.method import Method
from cocodc_jax.sync.needs import UserInputs, wants_batch
from cocodc_jax.transforms.numerics import check_choice

PyTree = Any

_AXIS = "region"
LOSSES = ("mean", "sum")


def stacked(
    inner: optax.GradientTransformation | optax.MultiSteps,
    method: Method | str,
    num_regions: int,
    *,
    loss: str = "mean",
    fragments: Fragments | None = None,
    user_inputs: UserInputs = UserInputs(),  # noqa: B008  (frozen)
    spmd_axis_name: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Train all regions in one step of any trainer, as its optimizer.

    Parameters, gradients and updates have leaves `[M, ...]`, on one device or with M
    over a mesh. The state is a `SynchronizedState`: regional values have leaves
    `[M, ...]`, and values that are equal in all regions (the outer model, messages in
    flight) have one copy. Extra arguments of `update` are passed unchanged to each
    region, if `inner` takes them.

    Args:
      inner: optimizer of a region's own steps.
      method: from `cocodc_jax.methods`, or the name of one, with its defaults. Not
        supported, besides what `synchronized` refuses: merges that need the loss or
        the outputs of the last batch.
      num_regions: M.
      loss: how the trainer's loss combines those of regions. "mean" multiplies
        gradients by M; "sum", or a gradient taken for each region, leaves them.
      fragments: how to cut one region's parameters; by default as the method does.
      user_inputs: inputs that only the user can provide, see `synchronized`.
      spmd_axis_name: name of the mesh axis that shards the regions; needed if the
        optimizer has sharding constraints.

    >>> tx = stacked(optax.sgd(1.0), "diloco", num_regions=2)
    >>> params = {"w": jnp.zeros((2, 3))}
    >>> grads = jax.grad(lambda p: (p["w"].sum(1) * jnp.array([1.0, 2.0])).mean())
    >>> updates, state = tx.update(grads(params), tx.init(params), params)
    >>> updates["w"][:, 0].tolist()
    [-1.0, -2.0]
    """
    check_choice("loss", loss, LOSSES)
    if isinstance(method, str):
        method = methods.get(method)
    if wants_batch(method.needs):
        raise ValueError(
            f"method={method.name!r} needs the last batch in a merge, which stacked "
            "does not have for each region; use synchronized or RegionProgram"
        )

    tx = synchronized(
        inner,
        method,
        axis_name=_AXIS,
        num_regions=num_regions,
        fragments=fragments,
        user_inputs=user_inputs,
    )

    axes = sync_axes(method)
    scale = num_regions if loss == "mean" else 1

    def map_regional(
        function: Callable[[PyTree], PyTree], state: SynchronizedState
    ) -> SynchronizedState:
        """Apply a function to the fields whose leaves are `[M, ...]`."""
        fields = {
            name: function(getattr(state, name))
            for name, axis in axes._asdict().items()
            if axis == 0
        }
        return state._replace(**fields)

    def init(params: PyTree) -> SynchronizedState:
        _check_regions(params, num_regions)
        one_region = tx.init(without_region_axis(params))
        state = jax.vmap(lambda x: x, None, axes, axis_size=num_regions)(one_region)
        return map_regional(lambda x: with_region_axis(x, params), state)

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, SynchronizedState]:
        if params is None:
            raise ValueError("stacked needs params: tx.update(grads, state, params)")
        _check_regions(params, num_regions)

        def of_region(updates: PyTree, state: Any, params: PyTree) -> Any:
            scaled = jax.tree.map(lambda x: (x * scale).astype(x.dtype), updates)
            return tx.update(scaled, state, params, **extra)

        update_all: Any = jax.vmap(
            of_region,
            in_axes=(0, axes, 0),
            out_axes=(0, axes),
            axis_name=_AXIS,
            axis_size=num_regions,
            spmd_axis_name=spmd_axis_name,
        )
        # An optimizer of Levanter's reads the names of boxes, of one region.
        updates, state = update_all(
            without_region_name(updates),
            map_regional(without_region_name, state),
            without_region_name(params),
        )
        updates = with_region_axis(updates, params)
        return updates, map_regional(lambda x: with_region_axis(x, params), state)

    update_fn: Any = update
    return optax.GradientTransformationExtraArgs(init, update_fn)


def mean_of_regions(params: PyTree) -> PyTree:
    """Return the mean model of all regions, for an evaluation.

    Args:
      params: leaves `[M, ...]`, boxed or not. Floating-point ones are averaged, in at
        least float32; of others the first region's is taken.

    >>> mean_of_regions({"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])})["w"].tolist()
    [2.0, 3.0]
    """

    def mean(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x[0]
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return x.mean(0, dtype=wide).astype(x.dtype)

    structure = jax.tree.structure(without_region_axis(params))
    return structure.unflatten(map(mean, jax.tree.leaves(params)))


def _check_regions(params: PyTree, num_regions: int) -> None:
    for keys, x in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.ndim(x) or jnp.shape(x)[0] != num_regions:
            raise ValueError(
                f"params has a leaf {jax.tree_util.keystr(keys)} of shape "
                f"{jnp.shape(x)}, whose leading axis must be the "
                f"num_regions={num_regions}: stack the regions' parameters"
            )
