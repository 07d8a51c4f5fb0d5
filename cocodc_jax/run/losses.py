"""The loss of one region, for a run's configuration and devices."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import cocodc_jax as cc
from cocodc_jax import models
from cocodc_jax.engine.mesh import DATA, EXPERT, INSIDE, MODEL, SEQUENCE, Mesh, is_cpu
from cocodc_jax.engine.region_map import LocalRegions, PyTree
from cocodc_jax.run.config.train_config import RunConfig, TrainConfig
from cocodc_jax.sync.needs import LossFn


def make(
    run: RunConfig,
    model: models.TransformerConfig,
    method: cc.methods.Method,
    mesh: Mesh,
) -> models.LossFn:
    """Return the training loss."""
    if run.is_pipelined:
        routed = run.regions if run.random_routing else None
        loss_fn = models.make_pipelined_loss_fn(
            model,
            num_stages=run.stages,
            num_microbatches=run.microbatches,
            num_routed_regions=routed,
            subspace=subspace_of(run, model),
            codec=run.stage_codec,
        )
    else:
        loss_fn = _plain(model, layout(run, mesh), run.accumulate_steps)

    if not run.step_seconds:
        return loss_fn
    if "gradient_fn" in method.needs:
        raise ValueError(
            f"step_seconds={run.step_seconds} paces inner steps, but the merges of "
            f"method={method.name!r} take gradients too; use another curvature"
        )
    block = LocalRegions.of(mesh, run.regions, run.how_mapped)
    return paced(loss_fn, run.step_seconds, block)


def judge(
    config: TrainConfig, model: models.TransformerConfig, mesh: Mesh
) -> models.LossFn:
    """Return the evaluation loss, without stages and simulated step times."""
    divided = layout(config.run, mesh)
    model = with_kernels(
        config,
        model,
        config.method.build(),
        mesh.devices.flat[0],
        is_divided=divided is not None,
    )
    return _plain(model, divided, parts=1)


def _plain(
    model: models.TransformerConfig, divided: models.Layout | None, parts: int
) -> models.LossFn:
    """Return the loss without stages, of a batch that is computed in parts."""
    if divided is not None:
        return models.make_divided_loss_fn(model, divided, parts)
    return models.make_accumulated_loss_fn(models.make_loss_fn(model), parts)


def layout(run: RunConfig, mesh: Mesh) -> models.Layout | None:
    """Return how a region's devices share its work.

    None in pipelines and on a single CPU device. A single accelerator has a layout, as
    its kernels need one.
    """
    if run.is_pipelined or (is_cpu(mesh) and run.devices_per_region == 1):
        return None
    return axes(run, torus_steps(mesh))


def axes(run: RunConfig, steps: tuple[int, ...] = ()) -> models.Layout:
    """Return the mesh axes over which a region's devices share its work."""
    expert = EXPERT if run.expert_axis > 1 else None
    sequence = SEQUENCE if run.sequence_axis > 1 else None
    return models.Layout(
        data=DATA, model=MODEL, steps=steps, sequence=sequence, expert=expert
    )


def torus_steps(mesh: Mesh) -> tuple[int, ...]:
    """Return the steps of a mesh in which weights are gathered, see `gather_steps`."""
    if mesh.shape[SEQUENCE] * mesh.shape[EXPERT] > 1:
        return ()
    return gather_steps(mesh.devices[0, 0, :, 0, 0, 0])


# Number of devices up to which XLA keeps gathers over two axes as gathers.
_AT_ONCE = 16


def gather_steps(devices: np.ndarray) -> tuple[int, ...]:
    """Cut a data axis into steps along a TPU's torus, as `models.Layout` takes them."""
    if not hasattr(devices[0], "coords"):
        return ()

    places = np.array([(getattr(x, "core_on_chip", 0), *x.coords) for x in devices])
    # The first index at which each axis changes, and its length.
    axes = sorted(
        (int(np.argmax(line != line[0])), len(np.unique(line)))
        for line in places.T
        if (line != line[0]).any()
    )
    sizes = [size for _, size in axes]
    if len(sizes) < 2 or (len(sizes) == 2 and len(devices) <= _AT_ONCE):
        return ()

    strides = [math.prod(sizes[:i]) for i in range(len(sizes) + 1)]
    is_box = [*(first for first, _ in axes), len(devices)] == strides
    return tuple(sizes) if is_box else ()


def with_kernels(
    config: TrainConfig,
    model: models.TransformerConfig,
    method: cc.methods.Method,
    device: Any,
    is_divided: bool,
) -> models.TransformerConfig:
    """Return the model with its kernels and backward passes chosen for a device.

    `is_divided` says whether a region's loss has a `layout`.
    """
    needs_forward_mode = "gradient_fn" in method.needs
    backward = models.backward.choose(
        model.backward,
        device.platform,
        is_divided or config.run.is_pipelined,
        needs_forward_mode,
    )
    dispatch = model.expert_dispatch
    if dispatch == "auto":
        has_kernel = device.platform == "tpu" and not needs_forward_mode
        dispatch = "ragged" if has_kernel else "blocks"

    return models.attention.choose(
        dataclasses.replace(model, backward=backward, expert_dispatch=dispatch),
        platform=device.platform,
        length=config.data.sequence_length,
        is_divided=is_divided,
        needs_forward_mode=needs_forward_mode,
        sequence_axis=config.run.sequence_axis,
        most_head_width=models.attention.head_width_of(device),
    )


def subspace_of(
    run: RunConfig, model: models.TransformerConfig
) -> models.Subspace | None:
    """Return the subspace of the residual stream, None if there is none."""
    size = run.stage_subspace
    return models.Subspace(model.width, size) if size else None


_INT = jax.ShapeDtypeStruct((), jnp.int32)
_BOOL = jax.ShapeDtypeStruct((), jnp.bool_)
_ZERO_MS = time.monotonic_ns() // 1_000_000  # int32 counts 24 days from here


def paced(loss_fn: LossFn, step_seconds: float, block: LocalRegions) -> LossFn:
    """Return the same loss with a gradient that takes at least a given time.

    It simulates an accelerator's step time and leaves the host's cores free meanwhile.
    If all regions of the lab share a few cores, computing takes time from sending and
    relaying, which does not happen in a deployment. The time is that of the gradients
    of all regions of a block.

    Data dependencies enforce the order. A first callback reads the clock: it takes the
    parameters and returns a 0 that is added to the batch, of integers. A second one
    sleeps until the time is over: it takes the gradient and returns the predicate of a
    conditional that passes the gradient on. Adding a number to the gradient instead
    made XLA compile the optimizer differently, and changed the last bits.

    Call it in a `jax.shard_map` over regions, with one device per region. Reverse mode
    only.
    """
    # In turn, each takes its share of the time.
    seconds = step_seconds / block.size if block.one_by_one else step_seconds

    def begin(*_: Any) -> tuple[np.int32, np.int32]:
        return np.int32(_now_ms()), np.int32(0)

    def until(began_ms: np.ndarray, *_: Any) -> np.bool_:
        time.sleep(max(0.0, seconds - (_now_ms() - int(began_ms)) / 1000))
        return np.bool_(True)

    @jax.custom_vjp
    def gate(params: PyTree, began_ms: jax.Array) -> PyTree:
        return params

    def backward(began_ms: jax.Array, grads: PyTree) -> tuple[PyTree, None]:
        is_over = _call(until, _BOOL, began_ms, *_parts(grads))
        # The compiler cannot prove that the result is the gradient.
        passed = jax.lax.cond(
            is_over, lambda g: g, lambda g: jax.tree.map(jnp.negative, g), grads
        )
        return passed, None

    gate.defvjp(lambda params, began_ms: (params, began_ms), backward)

    def paced_loss(params: PyTree, batch: PyTree, key: jax.Array) -> Any:
        before = _parts(jax.lax.stop_gradient(params))
        began_ms, zero = _call(begin, (_INT, _INT), *before)
        batch = jax.tree.map(lambda x: x + zero.astype(x.dtype), batch)
        return loss_fn(gate(params, began_ms), batch, key)

    return paced_loss


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000 - _ZERO_MS


def _call(function: Callable, result: Any, *arguments: jax.Array) -> Any:
    """Return a callback; JAX requires it to be manual over all mesh axes."""
    inside = jax.shard_map(
        lambda *x: io_callback(function, result, *x),
        axis_names=set(INSIDE),
        in_specs=P(),
        out_specs=P(),
    )
    return inside(*arguments)


def _parts(tree: PyTree) -> list[jax.Array]:
    """Return one number of each leaf, which is ready when the leaf is ready."""
    return [x.ravel()[0] for x in jax.tree.leaves(tree)]
