"""Evaluation, equal for every method: one set of parameters, fixed batches."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.engine import transfer
from cocodc_jax.engine.devices import LoweredProgram
from cocodc_jax.engine.mesh import (
    REGION,
    batch_axes,
    in_own_context,
    trace_without_mesh_if_needed,
)
from cocodc_jax.engine.region_map import pmean_over_regions, region_shard_map
from cocodc_jax.sync.model_state import AnyLossFn, PyTree


@in_own_context()
def make_evaluate(
    loss_fn: AnyLossFn, mesh: Mesh, batches: PyTree
) -> Callable[..., jax.Array]:
    """Compile `evaluate(params) -> mean loss`, a float32 scalar on the mesh.

    Args:
      loss_fn: as in training, or the model's evaluation mode; its key is fixed here.
        With a model state, the state is its second argument, also in
        `evaluate(params, model_state)`, and the new state is discarded.
      mesh: the inner mesh.
      batches: leaves `[E, B, ...]`, kept on the mesh; E a multiple of the region axis.

    Raises:
      ValueError: if E is not a multiple of the region axis.
    """
    num_batches = jax.tree.leaves(batches)[0].shape[0]
    if num_batches % mesh.shape[REGION]:
        raise ValueError(
            f"eval_batches={num_batches} is not a multiple of the mesh's region axis, "
            f"{mesh.shape[REGION]}"
        )
    batches = transfer.put(batches, NamedSharding(mesh, P(REGION, batch_axes(mesh))))
    compiled = _jit_evaluate(loss_fn, mesh)
    return in_own_context()(lambda *model: compiled(model, batches))


def list_evaluate(
    loss_fn: AnyLossFn, mesh: Mesh, params: PyTree, shape: tuple[int, ...]
) -> LoweredProgram:
    """Return the program of `make_evaluate`, for compiling without running it.

    `shape` is that of the batches of tokens, `[E, B, L]`.
    """
    sharding = NamedSharding(mesh, P(REGION, batch_axes(mesh)))
    batches = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    evaluate = _jit_evaluate(loss_fn, mesh)
    return LoweredProgram("evaluation", evaluate, ((params,), batches))


def _jit_evaluate(loss_fn: AnyLossFn, mesh: Mesh) -> Callable:
    """Make `evaluate(judged, batches)`, compiled."""
    loss_fn = trace_without_mesh_if_needed(loss_fn)

    def evaluate(model: tuple[PyTree, ...], batches: PyTree) -> jax.Array:
        model = jax.tree.map(lambda x: jax.lax.pcast(x, REGION, to="varying"), model)
        losses = jax.lax.map(
            lambda batch: loss_fn(*model, batch, jax.random.key(0))[0], batches
        )
        return pmean_over_regions(jnp.mean(losses.astype(jnp.float32)))

    specs = P(), P(REGION)
    return jax.jit(region_shard_map(evaluate, mesh, in_specs=specs, out_specs=P()))
