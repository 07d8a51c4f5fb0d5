"""Inner steps: every region trains alone, in one `lax.scan` under `shard_map`.

The program is manual over the region axis. Parameters enter varying over it, so the
gradient of a region is its own: of *replicated* parameters it would silently become
the sum over regions (style.md, fact 1). The only collective here is that of methods
which exchange something at every step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cocodc_jax.runtime import crossing, parcel
from cocodc_jax.runtime.mesh import REGION, wants_one_piece
from cocodc_jax.runtime.places import (
    as_own,
    from_all_places,
    mean_over_places,
    over_places,
)
from cocodc_jax.runtime.state import RegionState
from cocodc_jax.sync.every_step import StepExchange
from cocodc_jax.transforms.compressor import Compressor
from cocodc_jax.transforms.numerics import vary_like

PyTree = Any
LossFn = Callable[[PyTree, PyTree, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]


@dataclasses.dataclass(frozen=True)
class Block:
    """The regions that one place along the mesh's region axis holds.

    Attributes:
      size: how many.
      one_by_one: map over them in turn (`lax.map`), not all at once (`vmap`): on a
        CPU a batch of matrix products is slower than as many plain ones.
    """

    size: int
    one_by_one: bool

    @classmethod
    def of(cls, mesh: Mesh, num_regions: int) -> Block:
        """The block of `num_regions` regions on `mesh`."""
        is_cpu = mesh.devices.flat[0].platform == "cpu"
        return cls(num_regions // mesh.shape[REGION], is_cpu)

    def map(self, fn: Callable, in_axes: Any = 0) -> Callable:
        """Maps `fn`, written for one region, over the block; one path for all sizes.

        Args:
          fn: function of one region's values.
          in_axes: 0 (mapped) or None (shared) for each argument, or one for all.
        """

        def mapped(*args):
            axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
            is_shared = [axis is None for axis in axes]
            each = tuple(
                None if shared else arg
                for arg, shared in zip(args, is_shared, strict=True)
            )

            def one(each):
                return fn(
                    *(
                        arg if shared else x
                        for arg, x, shared in zip(args, each, is_shared, strict=True)
                    )
                )

            if self.size == 1:
                out = one(jax.tree.map(lambda x: x[0], each))
                return jax.tree.map(lambda x: x[None], out)
            return jax.lax.map(one, each) if self.one_by_one else jax.vmap(one)(each)

        return mapped


def mean_over_regions(tree: PyTree, in_one_piece: bool = False) -> PyTree:
    """Mean over all regions of a tree of `[block, ...]` leaves, inside `over_places`.

    Summed in at least float32: XLA's CPU backend aborts the process on a bfloat16
    all-reduce in a partly manual program.

    Args:
      tree: of a block of regions.
      in_one_piece: whether leaves cross as one, see `mesh.wants_one_piece`.
    """
    return _reduced(tree, mean_over_places, in_one_piece)


def _reduced(tree: PyTree, mean: Callable, in_one_piece: bool) -> PyTree:
    """`mean` of the blocks' means, in the dtypes of `tree`."""

    def of_block(x, *others):
        return x.astype(jnp.result_type(jnp.float32, x, *others)).mean(0)

    if in_one_piece:
        leaves = jax.tree.leaves(tree)
        means = jax.tree.map(lambda x: of_block(x, *leaves), tree)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), means)
        piece = parcel.pack(jax.tree.map(lambda x: x[None], means))
        means = parcel.unpack(mean(piece[0]), shapes)
    else:
        means = jax.tree.map(lambda x: mean(of_block(x)), tree)
    return jax.tree.map(lambda x, like: x.astype(like.dtype), means, tree)


def are_finite(tree: PyTree) -> jax.Array:
    """Whether every number of a region is finite, bool `[R]` for leaves `[R, ...]`."""
    each = [
        jnp.isfinite(x).all(axis=tuple(range(1, x.ndim))) for x in jax.tree.leaves(tree)
    ]
    return jnp.stack(each).all(axis=0)


def make_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    block: Block,
    exchange: StepExchange | None = None,
    compressor: Compressor | None = None,
    all_reduce: str | None = None,
) -> Callable:
    """One inner step of a block of regions, a `lax.scan` body.

    Args:
      loss_fn: `(params, batch, key) -> (loss, aux)` of one region.
      optimizer: the inner optimizer.
      block: the regions a device holds.
      exchange: what regions exchange at every step, if anything.
      compressor: for `exchange`.
      all_reduce: one of `crossing.ALL_REDUCES` where messages cross in one piece; None
        leaves everything to the compiler.

    Returns:
      `step(state, (batch, active)) -> (state, (loss, aux))`, every leaf `[block, ...]`;
      `active` is bool `[block]`, or None if every region steps.
    """

    def gradient(params, batch, key_data):
        key, use = jax.random.split(jax.random.wrap_key_data(key_data))
        out, grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch, use)
        return out, grads, jax.random.key_data(key)

    def update(grads, opt_state, params):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def step(state: RegionState, xs: tuple[PyTree, jax.Array | None]):
        batch, active = xs
        out, grads, key = block.map(gradient)(state.params, batch, state.key)
        sender = state.sender
        if exchange is not None:
            grads, sender = _exchange(
                exchange, compressor, block, grads, state, all_reduce
            )
        params, opt_state = block.map(update)(grads, state.opt_state, state.params)
        # Adafactor puts constants into its state: they too are a region's own.
        opt_state = vary_like(opt_state, state.opt_state)
        new = RegionState(params, opt_state, key, sender)
        return (new if active is None else where_active(active, new, state)), out

    return step


def _exchange(
    exchange: StepExchange,
    compressor: Compressor | None,
    block: Block,
    grads: PyTree,
    state: RegionState,
    all_reduce: str | None,
):
    """Sends every region's gradient; gives each what it makes of all messages."""

    def send(grads, sender, key_data):
        # A key of its own: 0 and 1 are the two that the step splits.
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data), 3)
        return exchange.send(grads, sender, compressor, key)

    message, sender = block.map(send)(grads, state.sender, state.key)
    sender = vary_like(sender, state.sender)
    if exchange.receive is None:
        made = _mean_for_all(message, all_reduce)
    else:
        messages = _of_all(message, all_reduce)
        made = exchange.receive(messages, compressor)
    return for_all_regions(made, block.size), sender


def _mean_for_all(message: PyTree, all_reduce: str | None) -> PyTree:
    """The mean of all regions' messages, at each place its own."""
    if all_reduce != "direct":
        return as_own(mean_over_regions(message, all_reduce is not None))
    num = jax.lax.axis_size(REGION)
    return _reduced(
        message, lambda x: crossing.direct_sum(x, REGION, num) / num, in_one_piece=True
    )


def _of_all(message: PyTree, all_reduce: str | None) -> PyTree:
    """All regions' messages, `[R, ...]`."""
    if all_reduce is None:
        return from_all_places(message)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), message)
    piece = parcel.pack(message)
    if all_reduce == "direct":
        num = jax.lax.axis_size(REGION)
        rows = crossing.direct_gather(piece, REGION, num)
    else:
        rows = from_all_places(piece)
    return parcel.unpack(rows, shapes)


def for_all_regions(tree: PyTree, num_regions: int) -> PyTree:
    """The same for every region: leaves `[R, ...]`."""
    return jax.tree.map(
        lambda x: jnp.broadcast_to(x[None], (num_regions, *x.shape)), tree
    )


def where_active(active: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` for the regions that are `active`, bool `[R]`; `old` for the others."""

    def choose(x, y):
        return jnp.where(active.reshape(-1, *(1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(choose, new, old)


def make_steps(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    num_regions: int,
    exchange: StepExchange | None = None,
    compressor: Compressor | None = None,
    all_reduce: str = "direct",
) -> Callable:
    """T inner steps of all regions, as one program over the mesh (not yet jitted).

    Args: as of `make_step`; `all_reduce` is used where messages cross in one piece.

    Returns:
      `steps(state, batches, active) -> (state, (losses, aux))` with batches
      `[T, R, ...]`, active bool `[T, R]` or None, losses float32 `[T, R]`, and aux a
      dict of the same shape.
    """
    block = Block.of(mesh, num_regions)
    kind = all_reduce if wants_one_piece(mesh) else None
    step = make_step(loss_fn, optimizer, block, exchange, compressor, kind)

    def steps(state: RegionState, batches: PyTree, active: jax.Array | None):
        return jax.lax.scan(step, state, (batches, active))

    return over_places(
        steps,
        mesh,
        in_specs=(P(REGION), P(None, REGION), P(None, REGION)),
        out_specs=(P(REGION), P(None, REGION)),
    )
