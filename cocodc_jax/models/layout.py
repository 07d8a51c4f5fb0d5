"""Products and lookups with weights that are sharded over the devices of a region.

`sharding.py` has the shardings. A compiler that is left the choice may gather the batch
as well as the weights. Here every device computes with its own sequences, in a
`jax.shard_map` that is manual over all axes (`divided.py`), with explicit collectives:

    a weight     is cast to the compute dtype, gathered over "data" where it is used,
                 and gathered again if the backward pass recomputes its product
    its gradient is a float32 sum over the device's tokens, reduce-scattered over "data"
                 (fully sharded data parallelism; ZeRO stage 3, arXiv 1910.02054)
    keys, values are gathered over "sequence", where positions are sharded over one;
                 weights are then sharded over both token axes, as if these were one
    activations  are summed over "model" after each pair of matrices, and their
                 cotangents before it (Megatron-LM, arXiv 1909.08053, section 3)

Derivatives are written by hand, because JAX's transposition does not know which values
are replicated over an axis.

A TPU's compiler (libtpu 0.0.42) has no gather and no scatter over three axes of a torus
at once, and for some sizes none over two: it makes them sums of full arrays, with twice
the bytes. `Layout.steps` along the torus, one after another, move the bytes of one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from cocodc_jax.models.backward import product

# No rematerialisation policy keeps gathered weights: all of them are the full model.
WEIGHTS = "weights"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Axes inside a region.

    Attributes:
      data: divides the batch, and the width of weights.
      model: divides heads, features and vocabulary.
      steps: sizes of the groups in which weights are gathered over data, first among
        neighbours, then among such groups, and gradients are scattered; empty is all at
        once.
      sequence: divides positions, and with data the width of weights; None keeps
        sequences on one device.
      expert: divides the batch too, with data the width of weights, and the experts of
        a mixture; None has all experts on each device.
    """

    data: str = "data"
    model: str = "model"
    steps: tuple[int, ...] = ()
    sequence: str | None = None
    expert: str | None = None

    @property
    def tokens(self) -> str | tuple[str, ...]:
        """Axes that shard a region's tokens, and so the width of weights."""
        return _named(self.data, self.expert, self.sequence)

    @property
    def batch(self) -> str | tuple[str, ...]:
        """Axes that shard a region's sequences."""
        return _named(self.data, self.expert)

    @property
    def of_experts(self) -> Layout:
        """The layout of the weights of a device's experts."""
        if self.expert is None:
            return self
        return dataclasses.replace(self, expert=None, steps=())

    def own_part(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """Return the device's positions of an array with those of full sequences."""
        return x if self.sequence is None else own_share(x, self.sequence, axis)

    def whole(self, x: jax.Array) -> jax.Array:
        """Undo `own_part`: gather positions; cotangents are summed and scattered."""
        if self.sequence is None:
            return x
        return jax.lax.all_gather(x, self.sequence, axis=1, tiled=True)

    def groups(self) -> list[list[list[int]] | None]:
        """Return the groups that gather in each step; None is all devices of data."""
        size = jax.lax.axis_size(self.tokens)
        if size != math.prod(self.steps or (size,)):
            raise ValueError(
                f"steps={self.steps} do not make up the {size} devices of "
                f"{self.tokens!r}; use sizes whose product that is"
            )

        groups = []
        stride = 1
        for step in self.steps:
            places = np.arange(size).reshape(-1, step, stride)
            groups.append(places.swapaxes(1, 2).reshape(-1, step).tolist())
            stride *= step

        return groups or [None]


def _named(data: str, *others: str | None) -> str | tuple[str, ...]:
    present = tuple(name for name in others if name is not None)
    return (data, *present) if present else data


def own_share(x: jax.Array, name: str, axis: int) -> jax.Array:
    """Return the device's part of `x`, cut along `axis` over a mesh axis."""
    size = x.shape[axis] // jax.lax.axis_size(name)
    first = jax.lax.axis_index(name) * size
    return jax.lax.dynamic_slice_in_dim(x, first, size, axis)


def multiply(
    x: jax.Array, w: jax.Array, layout: Layout | None, side: int, backward: str
) -> jax.Array:
    """Multiply by a weight, one side of which is sharded over data; in x's dtype."""
    if layout is None:
        return product(x, w.astype(x.dtype), backward)
    return _product(x, w, layout, side)


def summed(x: jax.Array, layout: Layout | None) -> jax.Array:
    """Sum products over the model axis, whose devices each have some features."""
    return x if layout is None else _summed(x, layout)


def shared(x: jax.Array, layout: Layout | None) -> jax.Array:
    """Mark activations that several products read, to sum their cotangents."""
    return x if layout is None else _shared(x, layout)


def lookup(
    table_VD: jax.Array, ids_BL: jax.Array, dtype: str, layout: Layout | None
) -> jax.Array:
    """Return rows of a table, `[B, L, D]`, in `dtype`; gradients sum in float32."""
    if layout is None:  # Gathered, then cast: rows of one token repeat.
        return table_VD[ids_BL].astype(dtype)
    return _lookup(table_VD, ids_BL, dtype, layout)


def gather(w: jax.Array, dtype: Any, side: int, layout: Layout) -> jax.Array:
    """Return a weight in `dtype`, gathered along the side that the data axis shards."""
    cast = w.astype(dtype)
    if jax.lax.axis_size(layout.tokens) == 1:
        return cast
    for groups in layout.groups():
        cast = jax.lax.all_gather(
            cast, layout.tokens, axis=side, tiled=True, axis_index_groups=groups
        )
        cast = checkpoint_name(cast, WEIGHTS)
    return cast


def scatter(grad: jax.Array, side: int, layout: Layout) -> jax.Array:
    """Sum a gradient over the data axis, and keep the device's part of a side."""
    if jax.lax.axis_size(layout.tokens) == 1:
        return grad

    for groups in reversed(layout.groups()):
        grad = jax.lax.psum_scatter(
            grad,
            layout.tokens,
            scatter_dimension=side,
            tiled=True,
            axis_index_groups=groups,
        )

    return grad


def sum_over(x: jax.Array, axis: str | tuple[str, ...]) -> jax.Array:
    """Sum over one or several axes; over one device this does nothing."""
    return x if jax.lax.axis_size(axis) == 1 else jax.lax.psum(x, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x: jax.Array, w: jax.Array, layout: Layout, side: int) -> jax.Array:
    return _product_forward(x, w, layout, side)[0]


def _product_forward(
    x: jax.Array, w: jax.Array, layout: Layout, side: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    whole = gather(w, x.dtype, side, layout)
    return x @ whole, (x, whole)


def _product_backward(
    layout: Layout, side: int, residuals: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, whole = residuals
    tokens = tuple(range(x.ndim - 1))
    grad_w = jax.lax.dot_general(
        x, grad, ((tokens, tokens), ((), ())), preferred_element_type=jnp.float32
    )
    return grad @ whole.T, scatter(grad_w, side, layout)


_product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _shared(x: jax.Array, layout: Layout) -> jax.Array:
    return x


_shared.defvjp(
    lambda x, layout: (x, None), lambda layout, _, grad: (sum_over(grad, layout.model),)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _summed(x: jax.Array, layout: Layout) -> jax.Array:
    return sum_over(x, layout.model)


_summed.defvjp(
    lambda x, layout: (sum_over(x, layout.model), None), lambda layout, _, grad: (grad,)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(
    table_VD: jax.Array, ids_BL: jax.Array, dtype: str, layout: Layout
) -> jax.Array:
    return _lookup_forward(table_VD, ids_BL, dtype, layout)[0]


def _lookup_forward(
    table_VD: jax.Array, ids_BL: jax.Array, dtype: str, layout: Layout
) -> tuple[jax.Array, tuple[jax.Array, int]]:
    whole_VD = gather(table_VD, dtype, 1, layout)
    num_rows = whole_VD.shape[0]
    if jax.lax.axis_size(layout.model) > 1:
        ids_BL -= num_rows * jax.lax.axis_index(layout.model)

    # Rows of other devices: past the end, where nothing is read or written.
    ids_BL = jnp.where((ids_BL >= 0) & (ids_BL < num_rows), ids_BL, num_rows)
    x_BLD = whole_VD.at[ids_BL].get(mode="fill", fill_value=0)
    return sum_over(x_BLD, layout.model), (ids_BL, num_rows)


def _lookup_backward(
    dtype: str, layout: Layout, residuals: tuple[jax.Array, int], grad_BLD: jax.Array
) -> tuple[jax.Array, None]:
    ids_BL, num_rows = residuals
    grad_VD = jnp.zeros((num_rows, grad_BLD.shape[-1]), jnp.float32)
    grad_VD = grad_VD.at[ids_BL].add(grad_BLD.astype(jnp.float32), mode="drop")
    # Transposed: else a TPU's compiler sums the full table on every device, and cuts
    # it.
    return scatter(grad_VD.T, 0, layout).T, None


_lookup.defvjp(_lookup_forward, _lookup_backward)
