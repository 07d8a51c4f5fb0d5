"""The loss of one region, for a run's configuration and devices."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

import cocodc_jax as cc
from cocodc_jax import models
from cocodc_jax.run.config import RunConfig, TrainConfig
from cocodc_jax.run.simulated_step_time import paced
from cocodc_jax.sharding.local_regions import LocalRegions
from cocodc_jax.sharding.mesh import DATA, EXPERT, MODEL, SEQUENCE, Mesh, is_cpu


def make(
    run: RunConfig,
    model: models.TransformerConfig,
    method: cc.methods.Method,
    mesh: Mesh,
) -> models.LossFn:
    """Return the training loss.

    Raises:
      ValueError: if the method does not support `step_seconds`.
    """
    if run.is_pipelined:
        routed = run.regions if run.random_routing else None
        loss_fn = models.make_pipelined_loss_fn(
            model,
            run.stages,
            run.microbatches,
            routed,
            subspace_of(run, model),
            run.stage_codec,
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


def judge(run: RunConfig, model: models.TransformerConfig, mesh: Mesh) -> models.LossFn:
    """Return the evaluation loss: the same, without stages and simulated time."""
    return _plain(model, layout(run, mesh), 1)


def _plain(
    model: models.TransformerConfig, over: models.Layout | None, parts: int
) -> models.LossFn:
    if over is not None:
        return models.make_divided_loss_fn(model, over, parts)
    return models.make_accumulated_loss_fn(models.make_loss_fn(model), parts)


def layout(run: RunConfig, mesh: Mesh) -> models.Layout | None:
    """Return how a region's devices share its work.

    On accelerators also for a single device, as its kernels need it.
    """
    if run.is_pipelined or (is_cpu(mesh) and run.devices_per_region == 1):
        return None
    return _axes(run, torus_steps(mesh))


def _axes(run: RunConfig, steps: tuple[int, ...] = ()) -> models.Layout:
    expert = EXPERT if run.expert_axis > 1 else None
    sequence = SEQUENCE if run.sequence_axis > 1 else None
    return models.Layout(DATA, MODEL, steps, sequence, expert)


def weight_axes(run: RunConfig) -> tuple[str | tuple[str, ...], str]:
    """Return the axes that shard the width of weights, and those of their features."""
    return _axes(run).tokens, MODEL


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
    mesh: Mesh,
) -> models.TransformerConfig:
    """Return the model with its kernels and backward passes chosen.

    Raises:
      ValueError: if those requested are not supported by these devices and this method.
    """
    is_divided = layout(config.run, mesh) is not None
    return with_kernels_of(config, model, method, mesh.devices.flat[0], is_divided)


def with_kernels_of(
    config: TrainConfig,
    model: models.TransformerConfig,
    method: cc.methods.Method,
    device: Any,
    is_divided: bool,
) -> models.TransformerConfig:
    """Return the same for a device whose share of the loss is divided or not."""
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
        device.platform,
        config.data.sequence_length,
        is_divided,
        needs_forward_mode,
        config.run.sequence_axis,
        models.attention.head_width_of(device),
    )


def subspace_of(
    run: RunConfig, model: models.TransformerConfig
) -> models.Subspace | None:
    """Return the subspace of the residual stream, None if there is none.

    Raises:
      ValueError: if the model is narrower than that.
    """
    if not run.stage_subspace:
        return None
    return models.Subspace(model.width, run.stage_subspace)
